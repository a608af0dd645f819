"""Weights in and out: safetensors, GGUF and the hub in, safetensors out.

It knows file formats, where models are found, and how a tensor of a file becomes a parameter of the decoder or the other way
round. It does not know what the families' tables say (see `jaxkv.families`) nor what a model computes, and never needs torch.
"""

from jaxkv.weights.default_model import DEFAULT_MODEL
from jaxkv.weights.generation_defaults import GenerationDefaults, GenerationWarning
from jaxkv.weights.loading import load, load_config
from jaxkv.weights.saving import save
from jaxkv.weights.tokenizer_warning import TokenizerWarning

__all__ = ["DEFAULT_MODEL", "GenerationDefaults", "GenerationWarning", "TokenizerWarning", "load", "load_config", "save"]
