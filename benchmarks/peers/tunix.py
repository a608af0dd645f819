"""Tunix's sampler, JAX with a dense cache, in static batches padded on the left to a power of two.

pip install google-tunix
"""

import functools
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors


class _Ids:
    """What its sampler takes for a tokenizer; a text is its ids in digits."""

    def __init__(self, pad: int):
        self.pad = pad

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return self.pad


class Engine:
    """Llama's family alone. A cache is as long as its workload needs: its cost grows with the cache, not with the tokens held."""

    static = True
    version = f"google-tunix {version('google-tunix')}, jax {jax.__version__}"

    def __init__(self, job: Any):
        config = json.loads((Path(job.model) / "config.json").read_text())
        if config["model_type"] != "llama" or config.get("rope_scaling"):
            raise ValueError(f"this adapter builds plain Llamas, not {config['model_type']}")
        heads = config["num_attention_heads"]
        ends = config["eos_token_id"]
        self.pad = ends[0] if isinstance(ends, list) else ends
        self.config = llama3.ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            num_kv_heads=config["num_key_value_heads"],
            rope_theta=(config.get("rope_parameters") or config)["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            weight_tying=config["tie_word_embeddings"],
        )
        # its model leaves the config's theta unread (0.1.7) and would turn by 1e6: the same work, other tokens
        llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=self.config.rope_theta)
        self.model = create_model_from_safe_tensors(job.model, self.config, dtype=jnp.dtype(job.dtype))
        self.samplers: dict[int, Sampler] = {}

    def run(self, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> list[list[int]]:
        """Greedy tokens."""
        width = 1 << (max(map(len, prompts)) - 1).bit_length()
        c, size = self.config, width + room
        if size not in self.samplers:
            cache = CacheConfig(size, c.num_layers, c.num_kv_heads, c.head_dim)
            self.samplers[size] = Sampler(self.model, _Ids(self.pad), cache)
        out = self.samplers[size](
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=new_tokens[0],
            max_prompt_length=width,
            eos_tokens=[-1],
        )
        return [row.tolist() for row in out.tokens]
