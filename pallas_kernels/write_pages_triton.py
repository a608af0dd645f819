"""New keys and values into their slots, in place, on NVIDIA GPUs: one program per token and kv head (Pallas's Triton backend).

Features are padded to a power of two by repeating the last one: the padding lanes read it, compute the same value and store it to
the same place, so that no masked store is needed (the interpreter lets masked lanes overwrite live ones).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.quantization import LARGEST


def _write_kernel(slots_ref, *refs, head_dim: int, num_slots: int, pools: int):
    """Pools are written through the outputs, which alias the inputs; refs = new (2), pools in, pools out."""
    new, out = refs[:2], refs[2 + pools :]
    program = pl.program_id(0)
    slot = slots_ref[program]
    padded = max(16, 1 << (head_dim - 1).bit_length())
    feature = jnp.minimum(lax.iota(jnp.int32, padded), head_dim - 1)

    @pl.when(slot < num_slots)
    def _():
        for source, pool, scales in zip(new, out[:2], out[2:] or (None, None)):
            values = source[jnp.full((padded,), program), feature]
            if scales is not None:
                largest = LARGEST[jnp.dtype(pool.dtype).name]
                wide = values.astype(jnp.float32)
                peak = jnp.max(jnp.abs(wide))
                scale = jnp.where(peak > 0, peak / largest, 1.0)
                values = jnp.minimum(jnp.maximum(wide / scale, -largest), largest)
                if jnp.issubdtype(pool.dtype, jnp.integer):
                    values = jnp.where(values < 0, jnp.ceil(values - 0.5), jnp.floor(values + 0.5))
                scales[slot] = scale
            pool.at[jnp.full((padded,), slot), feature][...] = values.astype(pool.dtype)


def write_pages_triton(
    pools: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The pools with the new vectors in their slots.

    Args:
      pools: (k_pages, v_pages) [num_pages, kv_heads, page_size, head_dim], then their scales when quantized; donate them.
      k, v: [tokens, kv_heads, head_dim] floating.
      slots: i32[tokens * kv_heads], from `slot_indices`; 2**31 - 1 drops the vector.
      interpret: run on the CPU by Pallas's interpreter, for tests.

    Returns:
      The pools, each aliased to its input.
    """
    head_dim = pools[0].shape[-1]
    flat = tuple(pool.reshape(-1, *pool.shape[3:]) for pool in pools)
    rows = slots.shape[0]
    out = pl.pallas_call(
        functools.partial(_write_kernel, head_dim=head_dim, num_slots=flat[0].shape[0], pools=len(pools)),
        grid=(rows,),
        out_shape=tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in flat),
        input_output_aliases={3 + i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="write_pages",
    )(slots, k.reshape(rows, head_dim), v.reshape(rows, head_dim), *flat)
    return tuple(new.reshape(pool.shape) for new, pool in zip(out, pools))
