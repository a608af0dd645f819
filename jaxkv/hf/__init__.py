"""The names and conventions of transformers: `AutoModelForCausalLM.from_pretrained(...).generate(**inputs, max_length=100)`.

A thin layer over `load`, `generate` and `extend`: padding on either side becomes padding on the right and back, and `past_key_values`
is a `PagedKVCache`. It knows what transformers calls things, which of its arguments have a counterpart, and what to use instead of
the others; it decides nothing about decoding. Begin reading at `causal_lm.py`.
"""

from jaxkv.hf.auto import AutoModelForCausalLM
from jaxkv.hf.causal_lm import CausalLM, CausalLMOutput

__all__ = ["AutoModelForCausalLM", "CausalLM", "CausalLMOutput"]
