"""How an engine is set up: vLLM's names, checked, and the sizes that follow from them."""

import dataclasses
from typing import Any

from jaxkv.config import CacheConfig, ModelConfig, check_cache_dtype, integer, number, pages_for
from jaxkv.decode.prompts import check_flags, numerics_of
from jaxkv.engine.batch import Limits
from jaxkv.engine.memory import pages_that_fit
from jaxkv.ops.kernels import kernels
from jaxkv.ops.numerics import Numerics

WIDTH = 64
"""Tokens of a piece of a prompt: docs/measurements.md, "Length of a prompt's pieces"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The keyword arguments of `Engine`, which are those of `jaxkv.LLM`.

    Args:
      block_size: tokens a page holds.
      max_model_len: tokens of prompt and answer together, at most; None is what the model allows.
      max_num_seqs: sequences in a step, at most.
      max_num_batched_tokens: tokens in a step, at most: one for each sequence, the others for prompts; more than `max_num_seqs`.
      enable_prefix_caching: keep pages for later prompts that begin alike.
      gpu_memory_utilization: share of the device's free memory (of the machine's, on a CPU) that pages may take, in (0, 1].
      num_gpu_blocks_override: pages, the null page included, whatever memory there is.
      kv_cache_dtype: of keys and values; "auto" is the model's.
      seed: of the requests that have none; each draws differently.
      deterministic: a request's bits then do not depend on what else runs.
      implementation: of the kernels, see `pallas_kernels.paged_attention`.

    Raises:
      ValueError: a value is out of range.
    """

    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    seed: int = 0
    deterministic: bool = False
    implementation: str | None = None

    def __post_init__(self):
        optional = {"max_model_len": 2, "num_gpu_blocks_override": 2}
        for name, least in {
            "block_size": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2,
            "seed": -(2**31),
            **optional,
        }.items():
            value = getattr(self, name)
            if value is not None or name not in optional:
                object.__setattr__(self, name, integer(name, value, least))
        check_flags(enable_prefix_caching=self.enable_prefix_caching, deterministic=self.deterministic)
        number("gpu_memory_utilization", self.gpu_memory_utilization)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, which leaves no room for prompts beside one token of each of "
                f"{self.max_num_seqs} sequences (max_num_seqs): give at least {self.max_num_seqs + 1}"
            )
        check_cache_dtype("kv_cache_dtype", self.dtype)

    @property
    def dtype(self) -> str | None:
        """Of keys and values; None is the model's."""
        return None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def numerics(self) -> Numerics:
        """How the model is computed."""
        return numerics_of(self.implementation, self.deterministic)

    def limits(self, config: ModelConfig) -> Limits:
        """Sizes of the scheduler.

        Raises:
          ValueError: the model does not allow `max_model_len` tokens.
        """
        allowed = config.max_seq_len
        longest = allowed if self.max_model_len is None else self.max_model_len
        if longest > allowed:
            raise ValueError(f"max_model_len is {longest}, but the model allows {allowed} tokens")
        chunk = self.max_num_batched_tokens - self.max_num_seqs
        width = min(WIDTH, chunk)
        native = self.implementation in (None, "cpu") and kernels().implementation == "cpu"
        return Limits(
            rows=self.max_num_seqs,
            page_size=self.block_size,
            pieces=chunk // width,
            width=width,
            padding_costs=not native,
            max_model_len=longest,
            prefix_caching=self.enable_prefix_caching,
        )

    def sizes(self, config: ModelConfig, limits: Limits, device: Any) -> CacheConfig:
        """The pool of pages, as large as memory allows.

        Raises:
          ValueError: there is not enough memory for one page.
        """
        longest, size = limits.max_model_len, limits.page_size
        one_page = CacheConfig(2, size, 1, size, self.dtype)
        num_pages = self.num_gpu_blocks_override
        if num_pages is None:
            most = limits.rows * pages_for(longest, size) + 1
            num_pages = pages_that_fit(config, one_page, device, self.gpu_memory_utilization, most)
        return CacheConfig(num_pages, size, limits.rows, longest, self.dtype)
