"""transformers on torch: `model.generate`, batches of a fixed number of rows.

pip install transformers torch
"""

from typing import Any

import torch
import transformers


class Engine:
    """Prompts are padded on the left to the longest of their batch."""

    static = True
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __init__(self, job: Any):
        torch.set_num_threads(job.threads)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)).eval()
        self.model.generation_config.eos_token_id = None  # goes on past it, without changing any token's probability

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens[0], pad_token_id=0)
        return out[:, width:].tolist()
