"""Rotary parameters: transformers' `rope_parameters` turned into `Rope` and back."""

import math
from typing import Any

from jaxkv.config import ModelConfig, Rope
from jaxkv.families.checking import number

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_IGNORED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_READ = {
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope(parameters: dict[str, Any], head_dim: int, max_seq_len: int, *, partial: bool = False) -> Rope:
    """Turn transformers' rotary parameters into ours.

    Args:
      parameters: one layer type's `rope_parameters`, in the names of transformers 5.
      head_dim: width of a head.
      max_seq_len: the configuration's `max_position_embeddings`.
      partial: whether the family rotates only a part of each head when `partial_rotary_factor` says so.

    Raises:
      ValueError: a kind of scaling or a parameter that is not supported, with its value.
    """
    kind = parameters.get("rope_type") or "default"
    if kind not in _KINDS:
        raise ValueError(f"unsupported rope_type={kind!r} (supported: {', '.join(_KINDS)})")
    given = {k: v for k, v in parameters.items() if v is not None}
    unknown = sorted(set(given) - _IGNORED - _READ.get(kind, {"factor", "original_max_position_embeddings"}))
    if unknown:
        raise ValueError(
            f"unsupported in rope_parameters or rope_scaling with rope_type={kind!r}: {', '.join(f'{k}={given[k]!r}' for k in unknown)}"
        )
    fraction = number("partial_rotary_factor", given.get("partial_rotary_factor", 1.0), above=0, most=1)
    if fraction != 1.0 and not partial:
        raise ValueError(f"unsupported partial_rotary_factor={fraction!r} in this family")
    fields: dict[str, Any] = {"theta": _number(given, "rope_theta", above=1), "kind": kind}
    fields["rotary_dim"] = _rotary_dim(head_dim, fraction)
    if kind != "default":
        fields["factor"] = _number(given, "factor", kind=kind)
        if fields["factor"] < 1:
            raise ValueError(f"rope factor must be >= 1, got {given['factor']!r}")
    if kind == "dynamic":  # transformers takes the trained length from the configuration, whatever the parameters say
        fields["original_max_seq_len"] = max_seq_len
    if kind in ("llama3", "yarn"):
        fields["original_max_seq_len"] = int(_number(given, "original_max_position_embeddings", kind=kind))
    if kind == "llama3":
        fields["low_freq_factor"] = _number(given, "low_freq_factor", kind=kind)
        fields["high_freq_factor"] = _number(given, "high_freq_factor", kind=kind)
        if fields["low_freq_factor"] >= fields["high_freq_factor"]:
            raise ValueError(
                f"low_freq_factor={fields['low_freq_factor']} must be below high_freq_factor={fields['high_freq_factor']}"
            )
    if kind == "yarn":
        fields["beta_fast"] = _number(given, "beta_fast") if given.get("beta_fast") else 32.0
        fields["beta_slow"] = _number(given, "beta_slow") if given.get("beta_slow") else 1.0
        fields["truncate"] = given.get("truncate", True)
        if not isinstance(fields["truncate"], bool):
            raise ValueError(f"truncate must be true or false, got {given['truncate']!r}")
        fields["attention_factor"] = _yarn_attention_factor(given)
    return Rope(**fields)


def _number(given: dict[str, Any], name: str, *, above: int | float = 0, kind: str = "default") -> float:
    if name not in given:
        raise ValueError(f"rope_type={kind!r} needs {name}, which is missing or null")
    return number(name, given[name], above=above)


def _rotary_dim(head_dim: int, fraction: float) -> int:
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} (where it is not given, hidden_size / num_attention_heads) and partial_rotary_factor={fraction!r} "
            f"rotate {rotary_dim} dimensions: it must be an even number"
        )
    return rotary_dim


def _yarn_attention_factor(given: dict[str, Any]) -> float:
    """The factor on cos and sin: given, or from the context extension as the paper has it."""
    if "attention_factor" in given:
        return _number(given, "attention_factor")
    factor = _number(given, "factor")

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(_number(given, "mscale")) / grown(_number(given, "mscale_all_dim"))
    return grown(1.0)


def write_rope(rope: Rope, head_dim: int) -> dict[str, Any]:
    """The inverse of `read_rope`."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.rotary_dim != head_dim:
        exact = rope.rotary_dim / head_dim
        out["partial_rotary_factor"] = exact if int(head_dim * exact) == rope.rotary_dim else (rope.rotary_dim + 0.5) / head_dim
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_seq_len
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        out |= {"attention_factor": rope.attention_factor, "truncate": rope.truncate}
    return out


def read_single_rope(hf: Any, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """`rope` and `max_seq_len` of a family with one rotary base.

    Linear and dynamic scaling are written next to the length the model was trained on, and multiply it; yarn's extended
    length counts when the configuration states only the trained one.
    """
    trained = hf.max_position_embeddings
    rope = read_rope(hf.rope_parameters, head_dim, trained, partial=partial)
    length = trained
    if rope.kind in ("linear", "dynamic"):
        length = int(trained * rope.factor)
    if rope.kind == "yarn":
        length = max(trained, int(rope.original_max_seq_len * rope.factor))
    return {"rope": rope, "max_seq_len": length}


def write_single_rope(c: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_single_rope`."""
    if c.rope is None:
        raise ValueError(f"a {c.family} model needs rotary positions, got positions={c.positions!r}")
    length = c.max_seq_len
    if c.rope.kind == "linear":
        length = round(c.max_seq_len / c.rope.factor)
    if c.rope.kind == "dynamic":
        length = c.rope.original_max_seq_len
    return {"rope_parameters": write_rope(c.rope, c.head_dim), "max_position_embeddings": length}
