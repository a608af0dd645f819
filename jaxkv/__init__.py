"""jaxkv: a paged KV cache, continuous batching and decoding for JAX, entirely usable inside your own `jax.jit`."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.report import CacheStats
from jaxkv.config import CacheConfig, ModelConfig, Rope
from jaxkv.decode.beam_search import BeamSearchOutput, beam_search
from jaxkv.decode.extend import extend
from jaxkv.decode.generate import generate, stream
from jaxkv.decode.naive import generate_naive
from jaxkv.decode.outputs import GenerateOutput, GenerateStats, Token
from jaxkv.decode.sampling import Sampling, sample
from jaxkv.decode.speculative import Draft, NGram
from jaxkv.decode.step import StepInputs, step
from jaxkv.hf import AutoModelForCausalLM, CausalLM
from jaxkv.model.decoder import Decoder
from jaxkv.rl.rollout import Mismatch, Sequences, mismatch, sequences
from jaxkv.rl.score import score
from jaxkv.text import Detokenizer
from jaxkv.weights import load, save

if TYPE_CHECKING:
    from jaxkv import viz

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`jaxkv.viz`, loaded when it is asked for: drawing is no part of decoding."""
    if name == "viz":
        return importlib.import_module("jaxkv.viz")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


__all__ = [
    "AutoModelForCausalLM",
    "BeamSearchOutput",
    "CacheConfig",
    "CacheStats",
    "CausalLM",
    "Decoder",
    "Detokenizer",
    "Draft",
    "GenerateOutput",
    "GenerateStats",
    "Mismatch",
    "ModelConfig",
    "NGram",
    "PagedKVCache",
    "Rope",
    "Sampling",
    "Sequences",
    "StepInputs",
    "Token",
    "beam_search",
    "extend",
    "generate",
    "generate_naive",
    "load",
    "mismatch",
    "sample",
    "save",
    "score",
    "sequences",
    "step",
    "stream",
    "viz",
]
