"""`warm_up`: the programs of a session compiled before somebody waits for them, side by side."""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxkv.config import integer, shown
from jaxkv.decode.generate import run_job
from jaxkv.decode.options import GenerateOptions, prepare
from jaxkv.decode.sampling import Sampling
from jaxkv.model.decoder import Decoder, check_decoder


def warm_up(
    model: Decoder,
    *,
    prompts: int | Sequence[int] = 1,
    prompt_tokens: int | Sequence[int] = (64, 1000),
    max_new_tokens: int = 24,
    sampled: Any = (False, True),
    **options: Any,
) -> int:
    """Compile what `generate` and `stream` will need, in as many threads as there are cores, and run none of it.

    Other calls of the same sizes, rounded up to the ladder (`jaxkv.programs.ladder`), then compile nothing; `jaxkv.keep_programs()` before
    it keeps the programs for later processes, too.

    Args:
      model: the decoder.
      prompts: how many prompts a call will have; one number or several.
      prompt_tokens: tokens of the longest of them; one number or several.
      max_new_tokens: tokens to generate at most.
      sampled: whether there will be sampling, True or False, or both in a list; by default both.
      **options: other arguments of `generate`: `num_samples`, `page_size`, `max_seqs`, `deterministic`, ...

    Returns:
      How many different programs there are now for what was asked.

    Raises:
      ValueError: as `generate`.
    """
    check_decoder(model)
    axes = [_several("prompts", prompts), _several("prompt_tokens", prompt_tokens)]
    flags = [sampled] if isinstance(sampled, bool | np.bool_) else list(sampled)
    if any(not isinstance(flag, bool | np.bool_) for flag in flags):
        raise ValueError(f"sampled must be True, False or both, got {shown(sampled)}")
    todo, key = {}, jax.random.key(0)
    for count, tokens, flag in itertools.product(*axes, flags):
        sampling = Sampling(temperature=1.0) if flag else Sampling()
        asked = GenerateOptions.of("warm_up", {"key": key, "sampling": sampling, "max_new_tokens": max_new_tokens, **options})
        room = model.config.max_seq_len - asked.max_new_tokens
        given = np.zeros((count, max(min(tokens, room), 1)), np.int32)
        job, plan, sizes, _ = prepare(model, given, None, asked)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(job))
        todo[plan, sizes, shapes] = job
    with ThreadPoolExecutor(max(1, min(len(todo), os.cpu_count() or 1)), "jaxkv-warm-up") as pool:
        runs = [pool.submit(run_job, model, job.without_prompts(), plan, sizes) for (plan, sizes, _), job in todo.items()]
        for run in runs:
            run.result()
    return len(todo)


def _several(name: str, values: int | Sequence[int]) -> list[int]:
    given = values if isinstance(values, Sequence) and not isinstance(values, str | bytes) else [values]
    return [integer(name, value) for value in given]
