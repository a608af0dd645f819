"""What `jaxkv generate` does: prompts in, text out while it is made, one line of figures at the end.

The model runs on a second thread and hands its tokens over a queue; the main thread turns them into text, so that Ctrl-C and a
closed pipe are noticed at once.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.text.streaming import Answers, Terminal, TextStream
from jaxkv.weights.default_model import cache_folder

DEFAULT_NEW_TOKENS = 256
SHORTEST_WIDTH = 32


@runtime_checkable
class Keyboard(Protocol):
    """What is asked of stdin."""

    def read(self) -> str:
        """All of it."""
        ...

    def isatty(self) -> bool:
        """Whether somebody would have to type."""
        ...


class Clock:
    """Tells compilation, prefill and decode of one `generate` apart: by its compiler events and its tokens' times."""

    def __init__(self):
        self.start = self.ready = self.end = time.perf_counter()
        self.times: list[float] = []
        self.first: dict[int, float] = {}  # of each prompt
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == "/jax/core/compile/backend_compile_duration" and not self.times:
            self.ready = time.perf_counter()

    def token(self, prompt: int) -> None:
        """One token of a prompt has come."""
        now = time.perf_counter()
        self.first.setdefault(prompt, now)
        self.times.append(now)

    def figures(self, prompt_tokens: int) -> dict[str, float | None]:
        """Tokens/s: of the prompts until each has its first token, of the tokens after that; and seconds of compilation."""
        prefilled = max(self.first.values(), default=self.end)
        later = sum(t > prefilled for t in self.times)
        return {
            "prompt_tokens_per_second": _rate(prompt_tokens, prefilled - self.ready),
            "decode_tokens_per_second": _rate(later, self.times[-1] - prefilled) if later else None,
            "compile_seconds": self.ready - self.start,
            "generate_seconds": self.end - self.ready,
        }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def read_prompts(arguments: Sequence[str], stdin: Keyboard) -> list[str]:
    """The prompts: those given, '-' replaced by all of stdin; stdin too where none is given and it is no terminal.

    Raises:
      ValueError: there is none, or one is empty.
    """
    if not arguments and not stdin.isatty():
        arguments = ["-"]
    if not arguments:
        raise ValueError("no prompt given (write one, or '-' for stdin)")
    if sum(a == "-" for a in arguments) > 1:
        raise ValueError("'-' is given more than once, but stdin can be read only once")
    prompts = [stdin.read().rstrip("\n") if a == "-" else a for a in arguments]
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty: {prompt!r}")
    return prompts


def encode(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: in the model's chat template, or as it is where there is none or `raw`."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def end_tokens(tokenizer: Any, known: Sequence[int], *, raw: bool) -> tuple[int, ...]:
    """Tokens that end a text: the model's and the tokenizer's own, and in a chat the one its template puts after an answer."""
    ends = {*known} | ({tokenizer.eos_token_id} - {None})
    if not raw and tokenizer.chat_template:
        mark = "jaxkv"
        chat = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(mark)[2]
        special = set(tokenizer.get_added_vocab().values())
        ends |= {*[t for t in tokenizer(after, add_special_tokens=False)["input_ids"] if t in special][:1]}
    return tuple(sorted(ends))


def new_token_budget(lengths: Sequence[int], wanted: int | None, max_seq_len: int) -> int:
    """How many tokens every prompt may get.

    Raises:
      ValueError: the model has no room for a prompt, or not for as many tokens as wanted.
    """
    longest = max(lengths)
    number = list(lengths).index(longest) + 1
    room = max_seq_len - longest
    if room < 1:
        raise ValueError(f"prompt {number} has {longest} tokens, and the model allows {max_seq_len}, new ones included")
    if wanted is not None and wanted > room:
        raise ValueError(
            f"--max-new-tokens {wanted} is too many: prompt {number} has {longest} tokens, and the model allows {max_seq_len}"
        )
    return min(DEFAULT_NEW_TOKENS, room) if wanted is None else wanted


def padded(rows: Sequence[Sequence[int]], max_seq_len: int, *, exact: bool) -> np.ndarray:
    """i32[rows, width]; width a power of two, so that prompts of similar length share one compiled program.

    `exact` keeps to the longest prompt: a pool has to hold the width, which matters to those who chose its size.
    """
    width = longest = max(map(len, rows))
    if not exact:
        width = min(max(SHORTEST_WIDTH, 1 << (longest - 1).bit_length()), max_seq_len)
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless another place or none was asked for."""
    chosen = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (type checkers do not know jax's options)
    if chosen is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))


class Status:
    """One line on a terminal that says what takes so long; nothing where stderr is no terminal."""

    def __init__(self, err: Terminal):
        self.err, self.shown = (err if err.isatty() else None), False

    def show(self, text: str) -> None:
        """Replaces the line; "" removes it."""
        if self.err is not None and (text or self.shown):
            self.err.write(f"\r\x1b[K{text}")
            self.err.flush()
            self.shown = bool(text)


def run(args: argparse.Namespace) -> int:
    """The command; see `jaxkv generate --help`."""
    sampling = jaxkv.Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    prompts = read_prompts(args.prompts, sys.stdin)
    use_compilation_cache()
    model, tokenizer = jaxkv.load(args.model, dtype=args.dtype)
    rows = [encode(tokenizer, prompt, raw=args.raw) for prompt in prompts]
    if not all(rows):
        raise ValueError(f"prompt {[*map(bool, rows)].index(False) + 1} has no tokens")
    lengths = [len(row) for row in rows]
    ends = end_tokens(tokenizer, model.config.eos_token_ids, raw=args.raw)
    options = {
        "max_new_tokens": new_token_budget(lengths, args.max_new_tokens, model.config.max_seq_len),
        "sampling": sampling,
        "key": jax.random.key(args.seed),
        "eos_token_id": ends or None,
        "page_size": args.page_size,
        "num_pages": args.num_pages,
    }
    stream = None if args.json else TextStream(sys.stdout, [_title(p) for p in prompts], bold=_bold(sys.stdout))
    answers = Answers(tokenizer, len(prompts), ends, stream)
    clock = Clock()
    tokens = padded(rows, model.config.max_seq_len, exact=args.num_pages is not None)
    result = _generate(model, tokens, lengths, options, clock, answers)
    stats = {
        "prompt_tokens": sum(lengths),
        "generated_tokens": int(np.sum(result.lengths)),
        **clock.figures(sum(lengths)),
        "page_size": args.page_size,
        "pages_used": int(result.stats.peak_pages),
        "steps": int(result.stats.steps),
        "preemptions": int(result.stats.preemptions),
    }
    if args.json:
        print(json.dumps({"model": args.model, "results": _results(prompts, rows, answers, result), "stats": stats}))
    print(_summary(stats), file=sys.stderr)
    return 0


def _generate(
    model: Any, tokens: np.ndarray, lengths: Sequence[int], options: dict[str, Any], clock: Clock, answers: Answers
) -> jaxkv.GenerateOutput:
    """Runs `jaxkv.stream` on a second thread; returns its result after all text has been written."""
    arrived: queue.SimpleQueue[jaxkv.Token | None] = queue.SimpleQueue()
    done: list[jaxkv.GenerateOutput | BaseException] = []

    def work() -> None:
        def forward() -> Iterator[jaxkv.Token]:
            done.append((yield from jaxkv.stream(model, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), **options)))

        try:
            for token in forward():
                clock.token(token.prompt)
                arrived.put(token)
        except BaseException as error:  # raised again on the main thread
            done.append(error)
        arrived.put(None)

    status = Status(sys.stderr)
    status.show("compiling ...")
    threading.Thread(target=work, daemon=True).start()
    for token in iter(arrived.get, None):
        status.show("")
        answers.token(token.prompt, token.token)
    clock.end = time.perf_counter()
    status.show("")
    (result,) = done
    if isinstance(result, BaseException):
        raise result
    answers.finish()
    return result


def _results(
    prompts: Sequence[str], rows: Sequence[Sequence[int]], answers: Answers, result: jaxkv.GenerateOutput
) -> list[dict[str, Any]]:
    tokens, lengths, logprobs, finished = (
        np.asarray(x)[:, 0] for x in (result.tokens, result.lengths, result.logprobs, result.finished)
    )
    return [
        {
            "prompt": prompt,
            "text": answers.texts[i],
            "prompt_token_ids": list(rows[i]),
            "token_ids": tokens[i, : lengths[i]].tolist(),
            "logprobs": logprobs[i, : lengths[i]].tolist(),
            "finish_reason": "stop" if finished[i] else "length",
        }
        for i, prompt in enumerate(prompts)
    ]


def _title(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= 72 else line[:71] + "…"


def _bold(stream: Terminal) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _summary(stats: dict[str, Any]) -> str:
    def speed(name: str) -> str:
        return "" if stats[name] is None else f" at {stats[name]:.1f} tokens/s"

    return (
        f"prompt: {stats['prompt_tokens']} tokens{speed('prompt_tokens_per_second')} | "
        f"decode: {stats['generated_tokens']} tokens{speed('decode_tokens_per_second')} | "
        f"pages: {stats['pages_used']} of {stats['page_size']} tokens | compile: {stats['compile_seconds']:.1f} s"
    )
