"""A `config.json` before transformers reads it: only what we read, nulls that stand for a default gone, each value of its kind.

transformers checks types, but not ranges, and what it has no field for it keeps as it is; a wrong value then shows as some error
far from its name.
"""

import math
from collections.abc import Mapping
from typing import Any

MOST_LAYERS = 65_536
"""A number that no model reaches, and that a list with an entry a layer can have."""

_SIZES = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "max_position_embeddings n_embd n_layer n_head n_inner n_positions ffn_dim word_embed_proj_dim sliding_window "
    "original_max_position_embeddings sliding_window_pattern".split()
)
_LAYERS = ("num_hidden_layers", "n_layer")
_NULL_SIZES = frozenset(
    "num_key_value_heads head_dim n_inner word_embed_proj_dim sliding_window original_max_position_embeddings "
    "sliding_window_pattern".split()
)
_ABOVE_ZERO = frozenset("query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping".split())
_FRACTIONS = frozenset("rotary_pct partial_rotary_factor".split())
_BASES = frozenset("rope_theta rope_local_base_freq rotary_emb_base".split())
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = {"rope_theta": 1, "partial_rotary_factor": 0, "factor": 0, "attention_factor": 0, "low_freq_factor": 0}
_ROPE_NUMBERS |= {"high_freq_factor": 0, "beta_fast": 0, "beta_slow": 0, "mscale": 0, "mscale_all_dim": 0}
_ROPE_NUMBERS |= {"original_max_position_embeddings": 0}
_ROPE_ZERO_IS_UNSET = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Null is no value that these may have; transformers' default stands in its place.
_DEFAULT_FOR_NULL = _BASES | _FRACTIONS | {"rope_parameters", "rope_scaling", "layer_types", "original_max_position_embeddings"}
_READ = (
    _SIZES
    | _ABOVE_ZERO
    | _DEFAULT_FOR_NULL
    | {*TOKENS}
    | frozenset(
        "rms_norm_eps layer_norm_eps layer_norm_epsilon hidden_act hidden_activation activation_function tie_word_embeddings "
        "use_sliding_window max_window_layers attention_bias mlp_bias scale_attn_weights do_layer_norm_before "
        "_remove_final_layer_norm enable_bias use_parallel_residual".split()
    )
)


def checked(fields: Mapping[str, Any], further: frozenset[str]) -> dict[str, Any]:
    """The fields that change a model's mathematics.

    Args:
      fields: a `config.json`; it stays as it is.
      further: names of fields that are only looked at to refuse them.

    Raises:
      ValueError: a value is of a wrong kind or out of range; the message names the field and shows the value.
    """
    kept = {name: fields[name] for name in sorted((_READ | further) & fields.keys())}
    out = {name: value for name, value in kept.items() if not (value is None and name in _DEFAULT_FOR_NULL)}
    for name, value in out.items():
        if name in _SIZES:
            if value is not None or name not in _NULL_SIZES:
                _size(name, value)
        elif value is not None and name in _ABOVE_ZERO:
            number(name, value, above=0)
        elif name in _BASES:
            number(name, value, above=1)
        elif name in _FRACTIONS:
            number(name, value, above=0, most=1)
        elif name in TOKENS:
            token(name, value)
    for name in _ROPE:
        if name in out:
            out[name] = _rope(name, out[name])
    return out


def number(name: str, value: Any, *, above: int | float, most: int | float = math.inf) -> float:
    """A finite number in a range.

    Raises:
      ValueError: it is none.
    """
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not above < value <= most or value >= 2**63:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number above {above:g}{limit}, got {value!r}")
    return float(value)


def _size(name: str, value: Any) -> None:
    most = MOST_LAYERS if name in _LAYERS else 2**31 - 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most}, got {value!r}")


def token(name: str, value: Any) -> None:
    """Check a begin, end or padding token.

    Raises:
      ValueError: it is no token id, nor null, nor, for the end, a list of ids.
    """
    values = value if isinstance(value, list) and name == "eos_token_id" else [value]
    for one in values:
        whole = isinstance(one, int) and not isinstance(one, bool) and -(2**31) <= one < 2**31
        if not whole and not (one is None and values is not value):
            raise ValueError(
                f"{name} must be a token id{' or a list of them' * (name == 'eos_token_id')}, or null, got {value!r}"
            )


def _rope(name: str, value: Any) -> dict[str, Any]:
    """Rotary parameters, or those of each type of layer, without nulls."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object or null, got {value!r}")
    nested = {"full_attention", "sliding_attention"} & value.keys()
    if nested:
        return {key: _rope(f"{name}[{key!r}]", part) for key, part in value.items() if part is not None}
    given = {key: part for key, part in value.items() if part is not None}
    for key, part in given.items():
        if key in _ROPE_NUMBERS and not (key in _ROPE_ZERO_IS_UNSET and part == 0 and not isinstance(part, bool)):
            number(key, part, above=_ROPE_NUMBERS[key], most=1 if key == "partial_rotary_factor" else math.inf)
    kind = given.get("rope_type", given.get("type"))
    if not isinstance(kind, str | None):
        raise ValueError(f"{name} has a rope_type that is no text: {kind!r}")
    if kind is None and "factor" in given:
        raise ValueError(f"{name} must say its rope_type (linear, dynamic, llama3, yarn, ...), got {value!r}")
    return given
