"""A job brought to the ladder's sizes (`jaxkv.programs.ladder`), and results cut back to what was asked for.

All of it by NumPy, outside jit: padding and slicing by jax would compile a program for every size.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.cache.pages import page_bytes
from jaxkv.config import CacheConfig, ModelConfig, pages_for
from jaxkv.decode.prompts import longest_known
from jaxkv.decode.run_state import Chunk, Job, Plan
from jaxkv.model.token_ids import ArrayLike
from jaxkv.programs import ladder
from jaxkv.sharding import explicit_mesh

MAX_SEQS = 64
"""Rows of the batch unless `max_seqs` says otherwise."""


class Asked(NamedTuple):
    """What the results are cut back to: prompts, new tokens, and the rows and pages of a row that can be in use."""

    num_prompts: int
    max_new: int
    rows: int
    pages_per_row: int


def shapes_are_the_callers(*inputs: Any) -> bool:
    """Whether inputs keep their shapes: a caller's jit is being traced, or they are divided over devices."""
    return ladder.inside_a_jit() or explicit_mesh(inputs) is not None or ladder.on_several_devices(inputs)


def pad(x: Any, *sizes: int, fill: int = 0) -> ArrayLike:
    """An array whose first axes have these sizes: filled up, or cut where there was only padding."""
    if isinstance(x, Tracer):
        x = x[tuple(slice(size) for size in sizes)]
        return jnp.pad(x, [(0, size - n) for n, size in zip(x.shape, sizes)], constant_values=fill)
    known = np.asarray(x)
    out = np.full((*sizes, *known.shape[len(sizes) :]), fill, known.dtype)
    place = tuple(slice(min(a, b)) for a, b in zip(known.shape, sizes))
    out[place] = known[place]
    return cast(Array, out)


def repeat_last(values: Any, size: int) -> Any:
    """`pad` with the last entry, of a pytree: of sampling values and keys, which must be valid and which no padding draws with. What has
    no axis, such as one key for all, stays."""

    def repeated(x: Any) -> Any:
        if x.ndim == 0:
            return x
        index = np.minimum(np.arange(size, dtype=np.int32), x.shape[0] - 1)
        numpys = not isinstance(x, Tracer) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # keys compile for each number
        return np.asarray(x)[index] if numpys else x[index]

    return jax.tree.map(repeated, values)


def padded(job: Job, prompts: int, width: int) -> Job:
    """The job with room for so many prompts of so many tokens, and for the ladder's number of end tokens."""
    return dataclasses.replace(
        job,
        prompts=pad(job.prompts, prompts, width),
        prompt_lengths=pad(job.prompt_lengths, prompts, fill=1),
        limits=pad(job.limits, prompts, fill=1),
        keys=repeat_last(job.keys, prompts),
        sampling=repeat_last(job.sampling, prompts),
        eos=pad(job.eos, ladder.ends(job.eos.shape[0]), fill=-1),
    )


def cut(x: Any, *sizes: int, groups: int = 0) -> Array:
    """The front of an array [rows, ...] as [rows / groups, groups, ...], or as it is without groups; on its device if it is committed
    to one. Sizes of axes that it does not have do not count."""
    known = x if isinstance(x, Tracer) else np.asarray(x)
    front = known[tuple(slice(size) for size in sizes[: known.ndim])]
    if groups:
        front = front.reshape(-1, groups, *front.shape[1:])
    if isinstance(front, Tracer):
        return front
    return jax.device_put(front, x.sharding) if x.committed and len(x.devices()) == 1 else jax.device_put(front)


def on_a_rung(config: ModelConfig, job: Job, plan: Plan, sizes: CacheConfig, given: Any) -> tuple[Job, Plan, CacheConfig]:
    """Job, plan and sizes of the rung above.

    Args:
      config: of the model.
      job, plan, sizes: of exactly what was asked for.
      given: `GenerateOptions`; its `max_seqs`, `num_pages`, `page_size` and `prefill_chunk`, where the caller gave them, stay as they are.
    """
    num_prompts, width = job.prompts.shape
    longest = longest_known(job.prompt_lengths, width)
    allowed = config.max_seq_len if job.draft is None else min(config.max_seq_len, job.draft.config.max_seq_len)
    width = ladder.prompt(longest, allowed)
    room = ladder.sequence(min(longest + plan.max_new, allowed), allowed)
    prompts = ladder.rows(num_prompts)
    rows = ladder.rows(prompts * job.num_samples, MAX_SEQS) if given.max_seqs is None else sizes.max_seqs
    num_pages = sizes.num_pages
    if given.num_pages is None:
        num_pages = ladder.pages(
            _pages_needed(job, rows, longest + plan.max_new, sizes.page_size) + 1,
            page_bytes((config,) if job.draft is None else (config, job.draft.config), sizes.page_size, sizes.dtype),
            rows * pages_for(room, sizes.page_size) + 1,
        )
    chunk = Chunk.holding(given.prefill_chunk, width, rows)
    return (
        padded(job, prompts, width),
        dataclasses.replace(plan, max_new=room, chunk=chunk),
        CacheConfig(num_pages, sizes.page_size, rows, room, sizes.dtype),
    )


def _pages_needed(job: Job, rows: int, longest: int, page_size: int) -> int:
    """Pages that the `rows` largest requests need, samples sharing nothing."""
    lengths, limits = job.prompt_lengths, job.limits
    if isinstance(lengths, Tracer) or isinstance(limits, Tracer):
        tokens: Int[np.ndarray, " num_prompts"] = np.full(job.prompts.shape[0], longest)
    else:
        tokens = np.minimum(np.asarray(lengths) + np.asarray(limits), longest)
    pages = np.sort(np.repeat(-(-tokens // page_size), job.num_samples))
    return int(pages[-rows:].sum())
