"""transformers on torch: `model.generate_batch`, its continuous batching over pages.

pip install transformers torch
"""

from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

PAGE = 64
"""Tokens a page holds; the default, 256, wastes much of a short prompt's last page."""


class Engine:
    """What `generate_batch` does, by its manager: that alone takes a number of new tokens for each prompt."""

    static = False
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __init__(self, job: Any):
        torch.set_num_threads(job.threads)
        self.length = job.length
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(new_tokens))
        pages = -(-self.length // PAGE) * rows
        batching = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages, max_batch_tokens=512, max_requests_per_batch=rows, allow_block_sharing=False
        )
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            order = {}
            for i, (prompt, count) in enumerate(zip(prompts, new_tokens)):
                order[manager.add_request(prompt, max_new_tokens=count)] = i
            done: list[list[int]] = [[] for _ in prompts]
            left = len(prompts)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    done[order[result.request_id]] = list(result.generated_tokens)
                    left -= 1
                elif not manager.is_running():
                    raise RuntimeError("the manager stopped")
        return done
