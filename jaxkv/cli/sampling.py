"""How `jaxkv generate` samples: what was typed, then the model's `generation_config.json`, then the command's own default."""

import argparse
from typing import Any

from jaxkv.decode.sampling import Sampling
from jaxkv.weights.generation_defaults import GenerationDefaults

_FIELDS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def typed_sampling(args: argparse.Namespace) -> Sampling:
    """What was typed, which can be checked before any file is read.

    Raises:
      ValueError: a value is out of range.
    """
    return Sampling(*(_first(getattr(args, name), default) for name, default in _FIELDS.items()))


def chosen_sampling(args: argparse.Namespace, defaults: GenerationDefaults) -> Sampling:
    """What the tokens are drawn by."""
    usual = _FIELDS | {"temperature": _first(defaults.temperature, 1.0) if defaults.do_sample else 0.0}
    said = {name: getattr(defaults, name) for name in ("top_k", "top_p", "min_p")}
    t, k, p, m = (_first(getattr(args, name), said.get(name), default) for name, default in usual.items())
    return Sampling(float(t), int(k), float(p), float(m))


def chosen_samples(args: argparse.Namespace, defaults: GenerationDefaults, sampling: Sampling) -> int:
    """Answers to each prompt.

    Raises:
      ValueError: several were asked for that would all be the same.
    """
    if not sampling.always_greedy:
        return _first(args.num_samples, defaults.num_return_sequences, 1)
    if _first(args.num_samples, 1) > 1:
        raise ValueError(f"--num-samples {args.num_samples} greedy answers would all be the same: give a --temperature above 0")
    return 1


def complaint(defaults: GenerationDefaults) -> str | None:
    """One line that names what the model's file asks for and this command does not do, or None."""
    return defaults.complaint(*(("num_beams",) if _first(defaults.num_beams, 1) > 1 else ()))


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
