"""What a decoder is made of, as frozen and hashable values.

A `ModelConfig` describes the mathematics of a model, whatever family it comes from: it knows neither files nor weight
names (see `jaxkv.families` for those) and holds no array, so that it can be a static argument of `jax.jit`.
"""

import dataclasses
import math
import operator
from typing import Any, Literal

import numpy as np

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "layer"]
Block = Literal["pre", "post", "sandwich", "parallel"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Of keys and values that are stored with a scale each."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def integer(name: str, value: Any, least: int = 1) -> int:
    """A setting as Python's int: NumPy's integers, and arrays of one integer, are integers too.

    Raises:
      ValueError: it is none, is traced, or is not `least` to 2^31 - 1.
    """
    whole = None
    if "bool" not in str(getattr(value, "dtype", type(value).__name__)):
        try:
            whole = operator.index(value)
        except TypeError as error:  # also of a traced value, whose own message has ten lines
            traced = "Tracer" in type(error).__name__ or "Tracer" in type(value).__name__
            _require(
                not traced, f"{name} is traced, but decides on shapes: give a Python integer, or make it a static argument"
            )
    if whole is None or whole < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {shown(value)}")
    _require(whole < 2**31, f"{name} must be an integer <= {2**31 - 1}, got {shown(value)}")
    return whole


def number(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise ValueError unless a setting is one finite number (or None where it is optional)."""
    known = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    _require((optional and value is None) or (known and math.isfinite(value)), f"{name} must be a number, got {shown(value)}")


def shown(value: Any) -> str:
    """A value that somebody passed, in one short line for a message."""
    text = repr(value) if isinstance(value, str | int | float | list | tuple | dict | np.generic | None) else ""
    dtype, shape = (getattr(value, name, None) for name in ("dtype", "shape"))
    if not text and dtype is not None and isinstance(shape, tuple):
        text = f"{dtype}{list(shape)}"
    elif not text or len(text) > 10_000:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:70]}..."


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, how many dimensions turn, and how long contexts are scaled.

    Args:
      theta: base of the geometric series of wave lengths, > 1.
      rotary_dim: leading dimensions of each head that are rotated (even, <= head_dim).
      kind: scaling rule; the fields below it are read only by the kinds named there.
      factor: context extension, >= 1 (linear, dynamic, llama3, yarn).
      original_max_seq_len: tokens the model was trained on (dynamic, llama3, yarn).
      low_freq_factor, high_freq_factor: band limits in turns per original context (llama3).
      beta_fast, beta_slow: band limits in turns per original context (yarn).
      attention_factor: multiplies cos and sin (yarn); 1.0 elsewhere.
      truncate: whether yarn rounds its band limits to whole dimensions.

    Raises:
      ValueError: a value is out of range; the message shows it.

    Source: Su et al. 2021 (arXiv:2104.09864); yarn, Peng et al. 2023 (arXiv:2309.00071); the rest as in transformers.
    """

    theta: float = 10_000.0
    rotary_dim: int = 64
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_seq_len: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        for name in ("rotary_dim", "original_max_seq_len"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            number(f"rope {name}", getattr(self, name))
        _require(self.theta > 1, f"rope theta must be > 1, got {self.theta}")
        _require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0, f"rotary_dim must be even and positive, got {self.rotary_dim}"
        )
        _require(self.factor >= 1, f"rope factor must be >= 1, got {self.factor}")
        kinds = ("default", "linear", "dynamic", "llama3", "yarn")
        _require(self.kind in kinds, f"rope kind must be one of {kinds}, got {self.kind!r}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that changes a decoder's mathematics.

    Args:
      family: Hugging Face's `model_type`; names the weight mapping, never read by the model itself.
      vocab_size: rows of the embedding.
      hidden_size: width of the residual stream.
      num_layers: decoder layers.
      num_heads, num_kv_heads: query heads and key/value heads; query head i reads kv head i // q_per_kv.
      head_dim: width of one head.
      intermediate_size: width inside the MLP.
      max_seq_len: positions the model allows, in tokens.
      embed_size: width of the token embedding when it differs from `hidden_size` (then two projections join them).
      embed_scale: token embeddings are multiplied by it.
      positions: "rotary", or "learned" absolute embeddings.
      position_offset: learned position p is row `p + position_offset`.
      rope: rotary parameters of full-attention layers (None with learned positions).
      local_rope: those of sliding-window layers, if they differ.
      norm, norm_eps: kind of normalisation, and its epsilon.
      norm_plus_one: the stored norm weight is w - 1 (Gemma).
      block: where the norms stand. "pre": x + f(norm(x)); "post": norm(x + f(x)); "sandwich": x + norm(f(norm(x)));
        "parallel": x + attention(norm1(x)) + mlp(norm2(x)).
      final_norm: a norm before the logits.
      qkv_bias, out_bias, mlp_bias: which linear layers have biases.
      qk_norm: RMS norm over head_dim of each query and key head, before the rotation.
      query_scale: multiplies q.k; None is head_dim ** -0.5.
      windows: per layer, how many latest tokens (its own included) a token sees, or None for all; () is all None.
      attn_soft_cap, logits_soft_cap: cap * tanh(x / cap) on attention scores and on logits.
      mlp: "gated" (down(act(gate) * up)) or "plain" (down(act(up))).
      activation: of the MLP.
      tie_embeddings: the logits use the embedding matrix.
      dtype: of the parameters and activations, and of the cache unless it says otherwise.
      bos_token_id, eos_token_ids, pad_token_id: tokens that begin, end and pad a text, as the model's files name them; the
        model itself never reads them.

    Raises:
      ValueError: a value is out of range or two disagree; the message shows them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_seq_len: int
    embed_size: int | None = None
    embed_scale: float = 1.0
    positions: Literal["rotary", "learned"] = "rotary"
    position_offset: int = 0
    rope: Rope | None = None
    local_rope: Rope | None = None
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    block: Block = "pre"
    final_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    query_scale: float | None = None
    windows: tuple[int | None, ...] = ()
    attn_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    tie_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        sizes = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim intermediate_size max_seq_len".split()
        for name in [*sizes, *(["embed_size"] if self.embed_size is not None else [])]:
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        object.__setattr__(self, "position_offset", integer("position_offset", self.position_offset, 0))
        for name, least in (("windows", 1), ("eos_token_ids", -(2**31))):
            given = getattr(self, name)
            _require(isinstance(given, tuple | list), f"{name} must be a tuple, got {shown(given)}")
            object.__setattr__(self, name, tuple(None if x is None else integer(name, x, least) for x in given))
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        _require(self.dtype in _DTYPES, f"dtype must be one of {_DTYPES}, got {self.dtype!r}")
        _require(self.norm in ("rms", "layer"), f"norm must be 'rms' or 'layer', got {self.norm!r}")
        _require(self.mlp in ("gated", "plain"), f"mlp must be 'gated' or 'plain', got {self.mlp!r}")
        _require(self.activation in ("silu", "gelu", "gelu_tanh", "relu"), f"activation is unknown: {self.activation!r}")
        _require(self.block in ("pre", "post", "sandwich", "parallel"), f"block is unknown: {self.block!r}")
        _require(
            (self.positions == "rotary") == (self.rope is not None),
            f"positions={self.positions!r} does not go with rope={self.rope}: rotary needs one, learned takes none",
        )
        for rope in (self.rope, self.local_rope):
            _require(rope is None or isinstance(rope, Rope), f"rope must be a jaxkv.Rope, got {shown(rope)}")
            dims = 0 if rope is None else rope.rotary_dim
            _require(dims <= self.head_dim, f"rotary_dim {dims} is larger than head_dim {self.head_dim}")
        _require(
            len(self.windows) in (0, self.num_layers),
            f"windows has {len(self.windows)} entries for {self.num_layers} layers",
        )

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None for full attention."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> Rope | None:
        """Rotary parameters of a layer, None with learned positions."""
        local = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if local else self.rope


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes of a paged cache as one value: `PagedKVCache.of_sizes(config, sizes)` makes it.

    Hashable, so that it can be a static argument of `jax.jit`, where a cache is made inside.

    Args:
      num_pages: pages in the pool, the null page (page 0) included, >= 2.
      page_size: tokens a page holds, >= 1.
      max_seqs: rows, >= 1.
      max_seq_len: tokens one row may hold, >= 1.
      dtype: of keys and values; None is the model's.

    Raises:
      ValueError: a value is out of range; the message shows it, and how many pages one longest row needs.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    max_seq_len: int
    dtype: str | None = None

    def __post_init__(self):
        for name, least in (("page_size", 1), ("max_seqs", 1), ("max_seq_len", 1), ("num_pages", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        check_cache_dtype("dtype", self.dtype)
        _require(
            self.num_pages >= 2,
            f"num_pages must be >= 2 (page 0 is the null page and holds nothing), got {self.num_pages}; one sequence of "
            f"{self.max_seq_len} tokens needs {pages_for(self.max_seq_len, self.page_size)} pages and the null page",
        )

    @property
    def pages_per_seq(self) -> int:
        """Width of a block table: pages that one longest row needs."""
        return pages_for(self.max_seq_len, self.page_size)


def check_cache_dtype(name: str, dtype: Any) -> None:
    """Raise ValueError unless it is None or the name of a dtype that keys and values can be stored in."""
    dtypes = _DTYPES + QUANTIZED_DTYPES
    _require(
        dtype is None or (isinstance(dtype, str) and dtype in dtypes),
        f"{name} must be one of {dtypes} or None, got {shown(dtype)}",
    )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return math.ceil(tokens / page_size)
