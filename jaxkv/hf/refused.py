"""What transformers takes and jaxkv does not, by name, and what to use instead. A value that changes nothing is let through."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.hf.values import plain
from jaxkv.weights.generation_defaults import UNSUPPORTED, changes_nothing

_BY_HAND = "choose tokens by hand from the logits of jaxkv.extend"
_READ_ON = "read jaxkv.stream(model.decoder, ...) and stop when it is enough"
_OUTPUTS = "jaxkv.generate(model.decoder, ...) gives tokens, lengths and log-probabilities"
_HUB = "the hub's own environment variables (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE), or a local folder"
_QUANTIZED = 'dtype="bfloat16" for the weights; keys and values are quantized by jaxkv.generate(..., cache_dtype="int8")'
_HIDDEN = "model.decoder.forward gives the last hidden states; others and attention weights are not kept"

GENERATE = {
    **dict.fromkeys(UNSUPPORTED, _BY_HAND),
    "stop_strings": "cut the decoded text at them, or give their tokens as eos_token_id",
    "stopping_criteria": f"eos_token_id and max_new_tokens, or {_READ_ON}",
    "max_time": _READ_ON,
    "streamer": "jaxkv.stream(model.decoder, ...) yields tokens, jaxkv.Detokenizer makes text of them",
    "output_scores": f"{_OUTPUTS}; jaxkv.score those of given tokens",
    "output_logits": f"{_OUTPUTS}; model(input_ids).logits are those of given tokens",
    "output_attentions": _HIDDEN,
    "output_hidden_states": _HIDDEN,
    "return_dict_in_generate": _OUTPUTS,
    "past_key_values": "model(input_ids, past_key_values=...), or jaxkv.extend on a cache of your own",
    "inputs_embeds": "input_ids",
    "position_ids": "attention_mask, which positions follow from",
    "token_type_ids": "leave it out: no model here has any",
    "logits_processor": _BY_HAND,
    "logits_warper": _BY_HAND,
    "prefix_allowed_tokens_fn": _BY_HAND,
    "assistant_model": "jaxkv.generate(model.decoder, ..., speculative=jaxkv.Draft(assistant.decoder))",
    "prompt_lookup_num_tokens": "jaxkv.generate(model.decoder, ..., speculative=jaxkv.NGram())",
    "generation_config": "the arguments themselves (do_sample=, temperature=, ...); the model's own is model.generation_config",
    "num_beam_groups": "num_beams alone",
    "diversity_penalty": "num_beams alone",
    "cache_implementation": "leave it out: the cache is paged; jaxkv.generate(model.decoder, ...) takes its sizes",
    "synced_gpus": "leave it out; jaxkv.load(..., mesh=...) spreads a model over devices",
    "negative_prompt_ids": _BY_HAND,
    "return_tensors": "numpy.asarray or jax.numpy.asarray of the result",
}

CALL = {
    **{name: GENERATE[name] for name in ("inputs_embeds", "position_ids", "token_type_ids", "output_attentions", "output_hidden_states")},
    "labels": "jaxkv.score(model.decoder, tokens) gives the log-probabilities to make a loss of",
    "cache_position": "leave it out: the cache knows its lengths",
    "logits_to_keep": "jaxkv.extend, which gives each row's last logits",
}  # fmt: skip

FROM_PRETRAINED = {
    "device_map": "leave it out: JAX's default device is used; mesh= spreads a model over devices",
    "quantization_config": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "trust_remote_code": "leave it out: code that comes with a model is never run",
    "attn_implementation": "jaxkv.generate(model.decoder, ..., implementation=...)",
    "revision": "huggingface_hub.snapshot_download(name, revision=...), and the folder that it gives",
    "subfolder": "the path of the local folder itself",
    "token": _HUB,
    "cache_dir": _HUB,
    "local_files_only": _HUB,
    "force_download": _HUB,
    "config": "jaxkv.Decoder(jaxkv.ModelConfig(...), rngs=...)",
    "state_dict": "jaxkv.save and jaxkv.load, or flax.nnx.update(model.decoder, state)",
    "low_cpu_mem_usage": "leave it out: one parameter at a time is on the host anyway",
    "use_safetensors": "leave it out: nothing else is read, but GGUF",
    "max_memory": "mesh=, which spreads a model over devices",
    "offload_folder": "mesh=, which spreads a model over devices",
}
_ASKS_NOTHING = {"use_safetensors": (True,), "low_cpu_mem_usage": (True,)}


def refuse(function: str, given: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Arguments of transformers' that a function does not have.

    Raises:
      ValueError: one asks for something; the message says what to use instead.
      TypeError: one is not known to transformers, either.
    """
    unknown = [name for name in given if name not in instead]
    if unknown:
        raise TypeError(f"{function}() got unexpected arguments {', '.join(unknown)}")
    for name, value in given.items():
        if not _asks_nothing(name, plain(value)):
            raise ValueError(f"{name} is not supported: {instead[name]}")


def _asks_nothing(name: str, value: Any) -> bool:
    if name in UNSUPPORTED:
        return changes_nothing(name, value)
    if name == "token_type_ids" and value is not None:
        return not np.any(np.asarray(value))
    if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
        return True
    return isinstance(value, bool) and value in _ASKS_NOTHING.get(name, ())
