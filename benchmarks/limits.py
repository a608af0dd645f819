"""The limits of a machine: bytes that must be read over the memory's bandwidth, multiply-adds over the speed of matrix products.

Both speeds are measured through XLA, so an engine with a faster matrix product can reach more than 100 %.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.bench.measure import memory_bandwidth, seconds
from jaxkv.config import ModelConfig
from jaxkv.model.decoder import Decoder, parameters_nbytes, value

MATMUL_SIZES = (2048, 3072)
"""Rows and columns of the square products that measure the matmul peak: too large for any cache to matter."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The least that some part of inference has to do.

    Attributes:
      nbytes: read from memory.
      multiply_adds: one multiplication and one addition each.
    """

    nbytes: int
    multiply_adds: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nbytes + other.nbytes, self.multiply_adds + other.multiply_adds)


@dataclasses.dataclass(frozen=True)
class Speed:
    """The highest speeds that were measured on the machine.

    Attributes:
      bandwidth: bytes read per second.
      multiply_adds: per second, by matrix products of the model's dtype.
    """

    bandwidth: float
    multiply_adds: float

    def limit(self, work: Work) -> dict[str, float | int | str]:
        """Seconds that reading and that arithmetic take at least, the longer of the two, and which it is."""
        memory, arithmetic = work.nbytes / self.bandwidth, work.multiply_adds / self.multiply_adds
        return {
            "nbytes": work.nbytes,
            "multiply_adds": work.multiply_adds,
            "memory_seconds": memory,
            "arithmetic_seconds": arithmetic,
            "seconds": max(memory, arithmetic),
            "bound": "memory" if memory >= arithmetic else "arithmetic",
        }


def matmul_peak(dtype: str, sizes: Sequence[int] = MATMUL_SIZES, repeats: int = 5) -> float:
    """Multiply-adds per second of a square matrix product of `dtype`, the best of all sizes and of `repeats` runs."""
    product, best = jax.jit(lambda x, y: x @ y), 0.0
    for n in sizes:
        x = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(dtype)
        seconds(lambda x=x: product(x, x))  # compiles
        best = max(best, n**3 / min(seconds(lambda x=x: product(x, x)) for _ in range(repeats)))
    return best


def measure_speed(dtype: str, before: Speed | None = None) -> Speed:
    """The machine's speed: the greater of the present and the earlier measurement, since other load makes either too low."""
    now = Speed(memory_bandwidth(), matmul_peak(dtype))
    if before is None:
        return now
    return Speed(max(now.bandwidth, before.bandwidth), max(now.multiply_adds, before.multiply_adds))


def _seen(config: ModelConfig, first: int, last: int) -> int:
    """Keys that the tokens at positions first to last - 1 see, themselves included, summed over tokens and layers."""
    total = 0
    for layer in range(config.num_layers):
        window = config.window(layer) or last
        grows = min(last, max(first, window))  # from here on a token sees `window` keys
        total += (grows * (grows + 1) - first * (first + 1)) // 2 + (last - grows) * window
    return total


class Costs:
    """What each piece of work costs a model.

    Args:
      model: the decoder.
    """

    def __init__(self, model: Decoder):
        self.config = c = model.config
        looked_up = [model.position_embed] + ([model.embed] if model.lm_head is not None else [])
        self.parameter_bytes = parameters_nbytes(model) - sum(value(p).nbytes for p in looked_up if p is not None)
        embed = value(model.embed)
        self.head = embed.size if model.lm_head is None else value(model.lm_head).size
        outside = embed.size + sum(value(p).size for p in (model.position_embed, model.lm_head) if p is not None)
        self.linear = sum(x.size for x in jax.tree.leaves(model) if x.ndim > 1) - outside
        self.key_bytes = 2 * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize
        self.key_multiply_adds = 2 * c.num_heads * c.head_dim  # q.k and p.v

    def prefill(self, length: int) -> Work:
        """One prompt up to its first new token's logits, the parameters' bytes left out: prompts share them."""
        arithmetic = length * self.linear + self.head + self.key_multiply_adds * _seen(self.config, 0, length)
        return Work(0, arithmetic)

    def decode(self, held: int, steps: int) -> Work:
        """`steps` further tokens of one row that holds `held` tokens, the parameters' bytes left out: rows share them."""
        seen = _seen(self.config, held, held + steps)
        return Work(self.key_bytes * seen, steps * (self.linear + self.head) + self.key_multiply_adds * seen)

    def parameters(self, passes: int) -> Work:
        """The parameters read so many times."""
        return Work(passes * self.parameter_bytes, 0)

    def batch_prefill(self, batch: int, length: int) -> Work:
        """`batch` prompts of the same length; the parameters are read at least once."""
        one = self.prefill(length)
        return Work(self.parameter_bytes + batch * one.nbytes, batch * one.multiply_adds)

    def step(self, batch: int, length: int, new_tokens: int) -> Work:
        """The middle one of the steps that follow a first token."""
        one = self.decode(length + new_tokens // 2, 1)
        return Work(self.parameter_bytes + batch * one.nbytes, batch * one.multiply_adds)

    def ragged(self, prompts: Sequence[int], answers: Sequence[int], rows: int) -> Work:
        """Prompts and answers of these lengths through `rows` rows, in as few passes as can be."""
        work = self.parameters(max(math.ceil(sum(answers) / rows), max(answers)))
        for prompt, answer in zip(prompts, answers):
            work += self.prefill(prompt) + self.decode(prompt, answer - 1)
        return work
