"""GGUF's architectures in Hugging Face's terms: a configuration from the metadata, and tensors under the table's names.

GGUF stores a few tensors in another form than Hugging Face does, which is undone when they are read:

    llama      rows of attn_q and attn_k interleaved: dimension i next to i + head_dim / 2
    gemma      norm weights with the 1 already added
    gpt2       linear layers [out, in] where Hugging Face has [in, out]
    gptneox    attn_qkv as all queries, all keys, all values, where Hugging Face goes head by head
"""

import re
from collections.abc import Sequence

import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.families import family_of
from jaxkv.weights.gguf_config import FAMILY_OF_ARCHITECTURE, read_fields
from jaxkv.weights.gguf_file import GGUFFile

__all__ = ["GGUFSource", "read_fields"]

_LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.#.self_attn.q_proj": "blk.#.attn_q",
    "model.layers.#.self_attn.k_proj": "blk.#.attn_k",
    "model.layers.#.self_attn.v_proj": "blk.#.attn_v",
    "model.layers.#.self_attn.o_proj": "blk.#.attn_output",
    "model.layers.#.self_attn.q_norm": "blk.#.attn_q_norm",
    "model.layers.#.self_attn.k_norm": "blk.#.attn_k_norm",
    "model.layers.#.self_attn.qkv_proj": "blk.#.attn_qkv",
    "model.layers.#.mlp.gate_proj": "blk.#.ffn_gate",
    "model.layers.#.mlp.up_proj": "blk.#.ffn_up",
    "model.layers.#.mlp.gate_up_proj": "blk.#.ffn_up",
    "model.layers.#.mlp.down_proj": "blk.#.ffn_down",
    "model.layers.#.input_layernorm": "blk.#.attn_norm",
    "model.layers.#.post_attention_layernorm": "blk.#.ffn_norm",
}
_GEMMA = {
    **_LLAMA,
    "model.layers.#.post_attention_layernorm": "blk.#.post_attention_norm",
    "model.layers.#.pre_feedforward_layernorm": "blk.#.ffn_norm",
    "model.layers.#.post_feedforward_layernorm": "blk.#.post_ffw_norm",
}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.#.attn.c_attn": "blk.#.attn_qkv",
    "transformer.h.#.attn.c_proj": "blk.#.attn_output",
    "transformer.h.#.mlp.c_fc": "blk.#.ffn_up",
    "transformer.h.#.mlp.c_proj": "blk.#.ffn_down",
    "transformer.h.#.ln_1": "blk.#.attn_norm",
    "transformer.h.#.ln_2": "blk.#.ffn_norm",
}
_GPT_NEOX = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "gpt_neox.layers.#.attention.query_key_value": "blk.#.attn_qkv",
    "gpt_neox.layers.#.attention.dense": "blk.#.attn_output",
    "gpt_neox.layers.#.mlp.dense_h_to_4h": "blk.#.ffn_up",
    "gpt_neox.layers.#.mlp.dense_4h_to_h": "blk.#.ffn_down",
    "gpt_neox.layers.#.input_layernorm": "blk.#.attn_norm",
    "gpt_neox.layers.#.post_attention_layernorm": "blk.#.ffn_norm",
}
_NAMES = {"gemma2": _GEMMA, "gemma3": _GEMMA, "gpt2": _GPT2, "gptneox": _GPT_NEOX}
_HARMLESS = (r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd", r"blk\.\d+\.attn\.(masked_)?bias")


def gguf_name(architecture: str, name: str) -> str:
    """How GGUF spells a tensor of the family's table."""
    module, _, leaf = name.rpartition(".")
    layer = re.search(r"\.(\d+)\.", module)
    spelled = _NAMES.get(architecture, _LLAMA)[module if layer is None else module.replace(layer[0], ".#.", 1)]
    return f"{spelled if layer is None else spelled.replace('#', layer[1])}.{leaf}"


class GGUFSource:
    """The tensors of a GGUF file in Hugging Face's form, see `jaxkv.weights.source.Source`."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self.where, self.harmless = str(file.path), _HARMLESS
        self._file, self._config = file, config
        self._architecture = file.metadata["general.architecture"]
        assert FAMILY_OF_ARCHITECTURE[self._architecture] == config.family
        turned = {self.spellings(t.name)[0] for t in family_of(config.family).tensors(config) if self._transposed(t.name)}
        self.tensors = {
            name: (tensor.shape[::-1] if name in turned else tensor.shape, "float32") for name, tensor in file.tensors.items()
        }
        self._turned = turned

    def _transposed(self, name: str) -> bool:
        return self._architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))

    def spellings(self, name: str) -> Sequence[str]:
        """GGUF's name."""
        return [gguf_name(self._architecture, name)]

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, in Hugging Face's form."""
        tensor, c = self._file.read(name), self._config
        if name in self._turned:
            return tensor.T
        if self._architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
            pairs = tensor.reshape(-1, c.head_dim // 2, 2, *tensor.shape[1:])
            return pairs.swapaxes(1, 2).reshape(tensor.shape)
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1
        if self._architecture == "gptneox" and ".attn_qkv." in name:
            by_kind = tensor.reshape(3, c.num_heads, c.head_dim, *tensor.shape[1:])
            return by_kind.swapaxes(0, 1).reshape(tensor.shape)
        return tensor
