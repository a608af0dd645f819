"""Paged attention as one operation of jax: which implementation is lowered where, and what `jax.vmap` makes of it.

Pallas and its backends are imported by the implementations that need them, when one of those is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choose
from pallas_kernels.config import kernel_config, mosaic_config
from pallas_kernels.dispatch import Place, broadcast, make_operation, one_by_one
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import INT32_MAX, AttentionOptions
from pallas_kernels.paged_attention_xla import paged_attention_xla


def _problem(arrays: Iterable[Any], given: tuple[bool, ...]) -> Problem:
    """The call whose fields are the arrays, None where `given` is false."""
    rest = iter(arrays)
    fields: list[Any] = [next(rest) if there else None for there in given]
    return Problem(*fields)


def _run(
    place: Place,
    *arrays,
    given: tuple[bool, ...],
    options: AttentionOptions,
    implementation: str | None,
    capability: str | None,
) -> tuple[jax.Array, jax.Array]:
    problem = _problem(arrays, given)
    pages = problem.k_pages
    name, generation = choose(implementation, place, capability, pages.shape, pages.dtype)
    if name == "xla":
        return paged_attention_xla(problem, options)
    if name == "cpu":
        from pallas_kernels.cpu.paged_attention import paged_attention_cpu

        return paged_attention_cpu(problem, options)
    interpret = name.endswith("_interpret")
    if name.startswith("mosaic"):
        from pallas_kernels.paged_attention_mosaic import paged_attention_mosaic

        return paged_attention_mosaic(problem, options, mosaic_config(generation), interpret=interpret)
    from pallas_kernels.paged_attention_triton import paged_attention_triton

    _, queries, heads, head_dim = problem.q.shape
    rows = queries * (heads // pages.shape[1])
    config = kernel_config(
        generation, head_dim=head_dim, page_dtype=pages.dtype, rows=rows, deterministic=options.deterministic
    )
    return paged_attention_triton(problem, options, config, interpret=interpret)


def _results(*types: jax.ShapeDtypeStruct, given: tuple[bool, ...], **static) -> list[jax.ShapeDtypeStruct]:
    q = _problem(types, given).q
    return [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)]


def _joined_pools(size: int, problem: Problem, batched: Problem) -> Problem:
    """The pools of a batch one behind the other, and the block tables, which have the batch in front, pointing into them."""
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    fields = {name: getattr(problem, name) for name in names if getattr(problem, name) is not None}
    wide = broadcast(size, list(fields.values()), [getattr(batched, name) for name in fields])
    joined = {name: x.reshape(-1, *x.shape[2:]) for name, x in zip(fields, wide)}
    num_pages, *rest = wide[0].shape[1:]
    slots = size * num_pages * rest[0] * rest[1]
    if slots > INT32_MAX:
        raise ValueError(f"a batch of pools may have at most 2**31 - 1 (page, head, token) slots together, got {slots}")
    first = lax.iota(jnp.int32, size)[:, None, None] * num_pages
    return problem._replace(**joined, block_tables=jnp.clip(problem.block_tables, 0, num_pages - 1) + first)


def _batch(operation: Callable, size: int, arrays: list, batched: list[bool], *, given: tuple[bool, ...], **static) -> list:
    """The batch becomes more rows: of one pool, or of all pools one behind the other. Sinks belong to heads: where they differ within
    the batch, its elements are computed one after the other."""
    problem, moved = _problem(arrays, given), _problem(batched, given)
    if moved.sinks:
        return one_by_one(operation, arrays, batched, given=given, **static)
    rows = ("q", "block_tables", "lengths", "num_queries")
    wide = broadcast(size, [getattr(problem, name) for name in rows], [getattr(moved, name) for name in rows])
    problem = problem._replace(**dict(zip(rows, wide)))
    if moved.k_pages or moved.v_pages or moved.k_scales or moved.v_scales:
        problem = _joined_pools(size, problem, moved)
    problem = problem._replace(**{name: getattr(problem, name).reshape(-1, *getattr(problem, name).shape[2:]) for name in rows})
    out = operation(*(x for x in problem if x is not None), given=given, **static)
    return [x.reshape(size, -1, *x.shape[1:]) for x in out]


_operation = make_operation("paged_attention", run=_run, results=_results, batch=_batch)


def run_attention(
    problem: Problem, options: AttentionOptions, implementation: str | None, capability: str | None
) -> tuple[jax.Array, jax.Array]:
    """(out [batch, queries, heads, head_dim] in q.dtype, lse f32[batch, queries, heads]) by the implementation that is chosen at lowering.

    Args:
      problem: checked by the public operation.
      options: static options.
      implementation: a name that `check_name` has passed, or None.
      capability: of `named_capability`.

    Raises:
      NotImplementedError: at lowering, where the named implementation cannot run on the platform.
    """
    arrays = [x for x in problem if x is not None]
    static = {
        "given": tuple(x is not None for x in problem), "options": options, "implementation": implementation, "capability": capability,
    }  # fmt: skip
    # Mosaic's interpreter works by ordered callbacks, effects that the primitive does not declare; it is the same on every platform.
    out, lse = (
        _run(Place("other"), *arrays, **static) if implementation == "mosaic_interpret" else _operation(*arrays, **static)
    )
    return out, lse
