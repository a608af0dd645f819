"""Paged attention, page writing and matrix products for LLM inference in JAX: each a public operation with several implementations.

It knows arrays: activations, weights, pages of keys and values, block tables, lengths; and which implementation of an operation is best
for the platform that a program is lowered for. It does not know models, layers, caches or who owns a page, and imports jax only.
Choosing and lowering need no Pallas: that is imported with the GPU kernels, where a program is lowered with one.

    paged_attention            one or several new tokens per row, each row over its own pages
    paged_prefill_attention    a chunk of one sequence over its pages
    write_pages                new keys and values into their slots
    product                    activations times weights, with bits that do not depend on the number of rows where that is asked for
    split_rotated              queries, keys and values out of one product, the first two turned by rotary angles
    quantize                   keys and values as write_pages stores them in one-byte pages

`docs/kernels.md` says what runs where, and what has been compiled but never run.
"""

from pallas_kernels.paged_attention_op import paged_attention, paged_prefill_attention
from pallas_kernels.product_op import product
from pallas_kernels.quantization import quantize
from pallas_kernels.rotation_op import split_rotated
from pallas_kernels.write_pages_op import write_pages

__all__ = ["paged_attention", "paged_prefill_attention", "product", "quantize", "split_rotated", "write_pages"]


def __dir__() -> list[str]:
    return __all__
