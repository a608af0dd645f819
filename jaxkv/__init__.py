"""jaxkv: a paged KV cache, continuous batching and decoding for JAX, entirely usable inside your own `jax.jit`.

    model, tokenizer = jaxkv.load("folder, hub id or .gguf file")
    prompts = tokenizer(["texts", "to continue"])["input_ids"]

    generate(model, prompts, max_new_tokens=64)        tokens of all prompts, batched on the device
    stream(model, prompts, max_new_tokens=64)          the same tokens one by one, as they are made
    Conversation(model).answer(tokens)                 a chat on one cache: only what is new of a history is computed
    beam_search(model, prompts, num_beams=4, ...)      the most probable continuations
    Sampling(temperature=0.8, top_p=0.95)              how tokens are chosen: sampling=..., with key=jax.random.key(0)
    NGram(), Draft(smaller_model)                      fewer steps for the same tokens: speculative=...
    score(model, tokens), sequences, mismatch          log-probabilities, for training on what was generated
    PagedKVCache.create, extend, step                  the cache by hand: allocate, fork, truncate, free
    save(model, folder, tokenizer=tokenizer)           files that transformers loads, too
    LLM(name).generate(texts, SamplingParams(...))     requests that come and go, under vLLM's names
    AutoModelForCausalLM.from_pretrained(name)         the names of transformers, and its `generate`
    kernels()                                          which implementation runs on this machine, and why not another
    viz.page_map(cache), viz.record(model, ...)        pictures of a cache at work
    warm_up(model, prompts=8, prompt_tokens=500)       the programs of such calls, compiled before they are waited for
    keep_programs()                                    compiled programs are kept on disk for the next process

Each says in its docstring what it takes and what it raises. Tokens and text (`jaxkv.text`) and the command line (`python -m jaxkv`)
stand beside it. Nothing here but `LLM` and `Conversation` holds state: models and caches go in and come out.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.report import CacheStats
from jaxkv.config import CacheConfig, ModelConfig, Rope
from jaxkv.decode.beam_search import beam_search
from jaxkv.decode.conversation import Conversation
from jaxkv.decode.extend import extend
from jaxkv.decode.generate import generate, stream
from jaxkv.decode.naive import generate_naive
from jaxkv.decode.outputs import BeamSearchOutput, GenerateOutput, GenerateStats, Token
from jaxkv.decode.sampling import Sampling, sample
from jaxkv.decode.speculative import Draft, NGram
from jaxkv.decode.step import StepInputs, step
from jaxkv.decode.warm_up import warm_up
from jaxkv.engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from jaxkv.hf import AutoModelForCausalLM, CausalLM
from jaxkv.model.decoder import Decoder
from jaxkv.ops.kernels import Kernels, kernels
from jaxkv.programs import keep_programs
from jaxkv.rl.rollout import Mismatch, Sequences, mismatch, sequences
from jaxkv.rl.score import score
from jaxkv.text import Detokenizer
from jaxkv.weights import load, save

if TYPE_CHECKING:
    from jaxkv import viz

__version__ = "0.1.0"


_INSTEAD = {
    "AutoTokenizer": "the tokenizer that jaxkv.load returns beside the model, or transformers.AutoTokenizer",
}
"""What people look for who come from elsewhere, and what there is."""


def __getattr__(name: str) -> Any:
    """`jaxkv.viz`, loaded when it is asked for: drawing is no part of decoding."""
    if name == "viz":
        return importlib.import_module("jaxkv.viz")
    if name in _INSTEAD:  # `from jaxkv import` would replace the text of an AttributeError by its own
        raise ImportError(f"jaxkv has no {name}; use {_INSTEAD[name]}")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "LLM",
    "AutoModelForCausalLM",
    "BeamSearchOutput",
    "CacheConfig",
    "CacheStats",
    "CausalLM",
    "CompletionOutput",
    "Conversation",
    "Decoder",
    "Detokenizer",
    "Draft",
    "GenerateOutput",
    "GenerateStats",
    "Kernels",
    "Mismatch",
    "ModelConfig",
    "NGram",
    "PagedKVCache",
    "RequestOutput",
    "Rope",
    "Sampling",
    "SamplingParams",
    "Sequences",
    "StepInputs",
    "Token",
    "beam_search",
    "extend",
    "generate",
    "generate_naive",
    "keep_programs",
    "kernels",
    "load",
    "mismatch",
    "sample",
    "save",
    "score",
    "sequences",
    "step",
    "stream",
    "viz",
    "warm_up",
]
