"""jaxkv itself: `jaxkv.generate`, in the environment that runs the comparison."""

from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import jaxkv


class Engine:
    """`generate` with `rows` rows. Every run of a workload uses one compiled program, because `token_limits` is traced."""

    static = False
    version = f"jaxkv {jaxkv.__version__}, jax {version('jax')}"

    def __init__(self, job: Any):
        self.model, _ = jaxkv.load(job.model, dtype=job.dtype)
        jax.block_until_ready(jax.tree.leaves(self.model))

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        out = jaxkv.generate(
            self.model,
            prompts,
            max_new_tokens=room,
            eos_token_id=(),
            token_limits=np.asarray(new_tokens, np.int32),
            max_seqs=min(rows, len(prompts)),
        )
        return np.asarray(out.tokens)[:, 0].tolist()
