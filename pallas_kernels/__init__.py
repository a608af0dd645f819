"""Paged attention for JAX: one public operation, plain XLA and Pallas GPU kernels behind it.

    paged_attention            one or several new tokens per row, each row over its own pages
    paged_prefill_attention    a chunk of one sequence over its pages
    write_pages                new keys and values into their slots

It needs jax only. `docs/kernels.md` says what runs where, and what has been compiled but never run.
"""

from pallas_kernels.paged_attention_op import paged_attention, paged_prefill_attention
from pallas_kernels.write_pages_op import quantize, write_pages

__all__ = ["paged_attention", "paged_prefill_attention", "quantize", "write_pages"]
