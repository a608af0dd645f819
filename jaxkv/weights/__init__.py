"""Weights in and out: safetensors, GGUF and the hub in, safetensors out. Never torch."""

from jaxkv.weights.default_model import DEFAULT_MODEL
from jaxkv.weights.loading import load, load_config
from jaxkv.weights.saving import save

__all__ = ["DEFAULT_MODEL", "load", "load_config", "save"]
