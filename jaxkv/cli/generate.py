"""What `jaxkv generate` does: prompts in, text out while it is made, one line of figures at the end.

The model runs on a second thread (`jaxkv.cli.worker`), the main thread turns its tokens into text.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv.cli.model import check_pool, open_with_tokenizer
from jaxkv.cli.progress import Clock, summary
from jaxkv.cli.prompts import new_token_budget, read_prompts, token_rows
from jaxkv.cli.sampling import chosen_samples, chosen_sampling, complaint, typed_sampling
from jaxkv.cli.worker import Worker
from jaxkv.decode.overflow import overflow_message
from jaxkv.programs import keep_programs
from jaxkv.text import Answers, Terminal, TextStream, end_tokens


def run(args: argparse.Namespace) -> int:
    """The command; see `jaxkv generate --help`."""
    typed_sampling(args)
    prompts = read_prompts(args.prompts, sys.stdin)
    keep_programs()
    opened = open_with_tokenizer(args.model)
    tokenizer, config = opened.tokenizer, opened.config
    check_pool(config, args.page_size, args.num_pages)
    defaults = opened.generation_defaults()
    sampling = chosen_sampling(args, defaults)
    samples = chosen_samples(args, defaults, sampling)
    rows = token_rows(tokenizer, prompts, raw=args.raw)
    lengths = [len(row) for row in rows]
    ends = end_tokens(tokenizer, config.eos_token_ids, raw=args.raw, vocab_size=config.vocab_size)
    options = {
        "max_new_tokens": new_token_budget(lengths, args.max_new_tokens, config.max_seq_len, defaults),
        "sampling": sampling,
        "key": jax.random.key(args.seed),
        "num_samples": samples,
        "eos_token_id": ends or None,
        "page_size": args.page_size,
        "num_pages": args.num_pages,
    }
    _note(complaint(defaults))
    model = opened.decoder(dtype=args.dtype)
    titles = [_title(prompt) for prompt in prompts for _ in range(samples)]
    stream = None if args.json else TextStream(sys.stdout, titles, bold=_bold(sys.stdout))
    answers = Answers(tokenizer, len(titles), ends, stream)
    clock = Clock()
    result = _generate(model, rows, options, clock, answers)
    stats = {
        "prompt_tokens": sum(lengths),
        "generated_tokens": int(np.sum(result.lengths)),
        **clock.figures(sum(lengths)),
        "page_size": args.page_size,
        "pages_used": int(result.stats.peak_pages),
        "steps": int(result.stats.steps),
        "preemptions": int(result.stats.preemptions),
        "nonfinite": int(result.stats.nonfinite),
        "kernels": str(jaxkv.kernels()),
    }
    if args.json:
        print(json.dumps({"model": args.model, "results": _results(prompts, rows, answers, result), "stats": stats}))
    _note(overflow_message(stats["nonfinite"], stats["generated_tokens"], model.config.dtype))
    print(summary(stats), file=sys.stderr)
    return 0


def _note(line: str | None) -> None:
    if line is not None:
        print(f"jaxkv generate: {line}", file=sys.stderr)


def _generate(
    model: Any, rows: Sequence[Sequence[int]], options: dict[str, Any], clock: Clock, answers: Answers
) -> jaxkv.GenerateOutput:
    """Runs `jaxkv.stream` on a second thread; returns its result after all text has been written."""

    def work() -> Generator[jaxkv.Token, None, jaxkv.GenerateOutput]:
        stream = jaxkv.stream(model, rows, **options)
        while True:
            try:
                token = next(stream)
            except StopIteration as end:
                return end.value
            clock.token(token.prompt)
            yield token

    worker = Worker(work())
    for token in worker:
        answers.token(token.prompt * options["num_samples"] + token.sample, token.token)
    clock.stop()
    answers.finish()
    assert worker.result is not None
    return worker.result


def _results(
    prompts: Sequence[str], rows: Sequence[Sequence[int]], answers: Answers, result: jaxkv.GenerateOutput
) -> list[dict[str, Any]]:
    """One object per sample of each prompt, a prompt's samples one behind the other."""
    tokens, lengths, logprobs, finished = map(np.asarray, (result.tokens, result.lengths, result.logprobs, result.finished))
    texts, samples = answers.texts, tokens.shape[1]
    return [
        {
            "prompt": prompt,
            "sample": j,
            "text": texts[i * samples + j],
            "prompt_token_ids": list(rows[i]),
            "token_ids": tokens[i, j, : lengths[i, j]].tolist(),
            "logprobs": [x if math.isfinite(x) else None for x in logprobs[i, j, : lengths[i, j]].tolist()],
            "finish_reason": "stop" if finished[i, j] else "length",
        }
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def _title(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= 72 else line[:71] + "…"


def _bold(stream: Terminal) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
