"""How the tensors of a model file lie inside our parameters: a table that is read in both directions.

A file's tensor is one or several blocks of rows, and each block is a view of one parameter:

    file                                       parameter layers.0.attention.qkv  [kv_heads, q_per_kv + 2, head_dim, hidden]
    q_proj.weight  [heads * head_dim, hidden]      [:, :q_per_kv]
    k_proj.weight  [kv_heads * head_dim, hidden]   [:, q_per_kv]
    v_proj.weight  [kv_heads * head_dim, hidden]   [:, q_per_kv + 1]

Loading assigns a block to its view, saving copies the view out; neither knows a family.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxkv.config import ModelConfig

ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one block of rows lies: `parameter[index]`, its axes permuted into the file's order by `axes`."""

    parameter: str
    index: tuple[int | slice, ...] = ()
    axes: tuple[int, ...] | None = None

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The block as a view of the parameter, with as many elements as its rows in the file."""
        view = parameter[self.index] if self.index else parameter
        return view if self.axes is None else view.transpose(self.axes)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face checkpoint: its name, its shape, and its blocks of rows in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def rows(self, view: np.ndarray) -> int:
        """How many of the file's rows a block's view holds."""
        return view.size // math.prod(self.shape[1:])


def whole(name: str, parameter: str, *shape: int) -> Tensor:
    """A tensor that is a whole parameter, reshaped at most."""
    return Tensor(name, shape, (Part(parameter),))


def norm(c: ModelConfig, name: str, parameter: str, size: int | None = None) -> Iterator[Tensor]:
    """A norm's weight and, for layer norms, its bias."""
    size = c.hidden_size if size is None else size
    yield whole(f"{name}.weight", f"{parameter}.weight", size)
    if c.norm == "layer":
        yield whole(f"{name}.bias", f"{parameter}.bias", size)


def linear(name: str, parameter: str, out: int, inp: int, bias: bool, bias_parameter: str) -> Iterator[Tensor]:
    """A linear layer that is a whole parameter, `[out, in]`."""
    yield whole(f"{name}.weight", parameter, out, inp)
    if bias:
        yield whole(f"{name}.bias", bias_parameter, out)


def qkv_parts(c: ModelConfig, parameter: str) -> dict[str, tuple[Part, int]]:
    """The queries', keys' and values' blocks of a fused parameter, and their rows."""
    rows = c.num_kv_heads * c.head_dim
    return {
        "q": (Part(parameter, (ALL, slice(0, c.q_per_kv))), c.q_per_kv * rows),
        "k": (Part(parameter, (ALL, c.q_per_kv)), rows),
        "v": (Part(parameter, (ALL, c.q_per_kv + 1)), rows),
    }


def split_attention(c: ModelConfig, layer: int, name: str, out: str = "o_proj") -> Iterator[Tensor]:
    """Attention whose file keeps queries, keys and values apart: `{name}.{q,k,v}_proj` and `{name}.{out}`."""
    ours = f"layers.{layer}.attention"
    for letter, (part, rows) in qkv_parts(c, f"{ours}.qkv").items():
        yield Tensor(f"{name}.{letter}_proj.weight", (rows, c.hidden_size), (part,))
    if c.qkv_bias:
        for letter, (part, rows) in qkv_parts(c, f"{ours}.qkv_bias").items():
            yield Tensor(f"{name}.{letter}_proj.bias", (rows,), (part,))
    yield from attention_out(c, layer, f"{name}.{out}")
    if c.qk_norm:
        for letter in "qk":
            yield whole(f"{name}.{letter}_norm.weight", f"{ours}.{letter}_norm.weight", c.head_dim)


def attention_out(c: ModelConfig, layer: int, name: str) -> Iterator[Tensor]:
    """Attention's output projection."""
    ours = f"layers.{layer}.attention.out"
    yield from linear(name, ours, c.hidden_size, c.num_heads * c.head_dim, c.out_bias, f"{ours}_bias")


def split_gated_mlp(c: ModelConfig, layer: int, name: str) -> Iterator[Tensor]:
    """A gated MLP whose file keeps gate and up apart: `{name}.{gate,up,down}_proj`."""
    ours = f"layers.{layer}.mlp"
    for half, projection in enumerate(("gate_proj", "up_proj")):
        yield Tensor(f"{name}.{projection}.weight", (c.intermediate_size, c.hidden_size), (Part(f"{ours}.up", (half,)),))
        if c.mlp_bias:
            yield Tensor(f"{name}.{projection}.bias", (c.intermediate_size,), (Part(f"{ours}.up_bias", (half,)),))
    yield from linear(f"{name}.down_proj", f"{ours}.down", c.hidden_size, c.intermediate_size, c.mlp_bias, f"{ours}.down_bias")


def plain_mlp(c: ModelConfig, layer: int, up: str, down: str) -> Iterator[Tensor]:
    """An MLP without a gate."""
    ours = f"layers.{layer}.mlp"
    yield from linear(up, f"{ours}.up", c.intermediate_size, c.hidden_size, c.mlp_bias, f"{ours}.up_bias")
    yield from linear(down, f"{ours}.down", c.hidden_size, c.intermediate_size, c.mlp_bias, f"{ours}.down_bias")


def embeddings(c: ModelConfig, embed: str, lm_head: str = "lm_head") -> Iterator[Tensor]:
    """The token embedding and, where it is not tied, the output matrix."""
    width = c.hidden_size if c.embed_size is None else c.embed_size
    yield whole(f"{embed}.weight", "embed", c.vocab_size, width)
    if not c.tie_embeddings:
        yield whole(f"{lm_head}.weight", "lm_head", c.vocab_size, width)


def llama_layer(c: ModelConfig, layer: int, norms: dict[str, str]) -> Iterator[Tensor]:
    """A layer with Llama's names; `norms` maps the file's norm names to ours."""
    name = f"model.layers.{layer}"
    yield from split_attention(c, layer, f"{name}.self_attn")
    yield from split_gated_mlp(c, layer, f"{name}.mlp")
    for theirs, ours in norms.items():
        yield from norm(c, f"{name}.{theirs}", f"layers.{layer}.{ours}")


PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def llama_tensors(c: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a model with Llama's names."""
    yield from embeddings(c, "model.embed_tokens")
    for i in range(c.num_layers):
        yield from llama_layer(c, i, SANDWICH_NORMS if c.block == "sandwich" else PRE_NORMS)
    yield from norm(c, "model.norm", "final_norm")
