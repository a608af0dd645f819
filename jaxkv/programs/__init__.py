"""Compiled programs: few, kept on disk between processes, and announced while somebody waits for them.

It knows the ladder of sizes that shapes are rounded up to outside a caller's jit, jax's compilation cache and jax's own events, and
whether anybody watches stderr. It knows neither models nor what a program computes: callers say what they wait for. Begin with
`ladder.py`, then `kept.py`; `progress.py` is what stands around a call that may compile.
"""

from jaxkv.programs.kept import keep_programs
from jaxkv.programs.progress import waiting_on_compiler

__all__ = ["keep_programs", "waiting_on_compiler"]
