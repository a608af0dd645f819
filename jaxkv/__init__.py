"""jaxkv: a paged KV cache, continuous batching and decoding for JAX, entirely usable inside your own `jax.jit`."""

from jaxkv import viz
from jaxkv.auto import AutoModelForCausalLM, CausalLM
from jaxkv.beam_search import BeamSearchOutput, beam_search
from jaxkv.config import CacheConfig, ModelConfig, Rope
from jaxkv.generate import GenerateOutput, GenerateStats, Token, generate, stream
from jaxkv.kv_cache import CacheStats, PagedKVCache
from jaxkv.model import Decoder
from jaxkv.naive import generate_naive
from jaxkv.rollout import Mismatch, Sequences, mismatch, sequences
from jaxkv.sampling import Sampling, sample
from jaxkv.score import score
from jaxkv.speculative import Draft, NGram
from jaxkv.step import StepInputs, extend, step
from jaxkv.weights import load, save

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "BeamSearchOutput",
    "CacheConfig",
    "CacheStats",
    "CausalLM",
    "Decoder",
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
