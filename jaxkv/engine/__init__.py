"""The engine on the host: requests that come and go, answered together, under the names that vLLM's users know.

`LLM` is for scripts and notebooks, `AsyncEngine` for a server, `Engine` is what both stand on. Requests (`sequence`), the pool of pages,
the prefix cache and the scheduler are plain Python that knows nothing of jax; `runner` owns all that is on the device and knows nothing of
texts. Begin reading with `engine.py`, then `scheduler.py`.
"""

from jaxkv.engine.async_engine import AsyncEngine
from jaxkv.engine.engine import Engine
from jaxkv.engine.llm import LLM
from jaxkv.engine.options import EngineOptions
from jaxkv.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxkv.engine.params import RequestOutputKind, SamplingParams
from jaxkv.engine.sequence import Metrics

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "EngineOptions",
    "Logprob",
    "Metrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
