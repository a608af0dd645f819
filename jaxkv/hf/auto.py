"""Models by name, the way transformers loads them."""

import os
import warnings
from typing import Any

import jax

from jaxkv.hf.causal_lm import CausalLM
from jaxkv.hf.refused import FROM_PRETRAINED, refuse
from jaxkv.weights import GenerationWarning
from jaxkv.weights.loading import dtype_name, open_model


class AutoModelForCausalLM:
    """Loads models by name; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None, **others: Any
    ) -> CausalLM:
        """A model from a hub id, a local folder or a .gguf file, with the sampling defaults of its `generation_config.json`.

        The tokenizer comes from `transformers.AutoTokenizer`, or as the second result of `jaxkv.load`.

        Args:
          name_or_path, mesh: as for `jaxkv.load`.
          dtype: as for `jaxkv.load`: None and "auto" keep the file's; names, and dtypes of JAX's and torch's.
          **others: `torch_dtype` is `dtype`; what transformers takes besides is refused by name.

        Raises:
          ValueError: an argument that jaxkv does not have, with what to use instead; and all that `jaxkv.load` raises.
          TypeError: an argument that nobody knows.
        """
        old_name = others.pop("torch_dtype", None)
        refuse("from_pretrained", others, FROM_PRETRAINED)
        chosen = dtype_name(old_name if dtype is None else dtype)
        opened = open_model(name_or_path)
        defaults = opened.generation_defaults()
        if complaint := defaults.complaint():
            warnings.warn(f"{opened.folder}: {complaint}", GenerationWarning, stacklevel=2)
        return CausalLM(opened.decoder(dtype=chosen, mesh=mesh), defaults)
