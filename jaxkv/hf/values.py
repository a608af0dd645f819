"""Values as people give them: Python's numbers, and scalars and arrays of NumPy, JAX and torch."""

from typing import Any

import numpy as np

from jaxkv.config import integer

Count = Any
"""An integer of Python, NumPy, JAX or torch."""
Number = Any
"""A number of Python, NumPy, JAX or torch."""
Truth = Any
"""True or False of Python, NumPy, JAX or torch."""

_MOST = 2**31 - 1


def plain(value: Any) -> Any:
    """A scalar of NumPy, JAX or torch as Python's own; everything else as it is."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def count(name: str, value: Any, *, least: int = 1) -> int:
    """An integer of at least `least`.

    Raises:
      ValueError: it is none; the message names it.
    """
    return integer(name, plain(value), least)


def seed(name: str, value: Any) -> int:
    """An integer of 64 bits; None is 0.

    Raises:
      ValueError: it is none; the message names it.
    """
    found = 0 if value is None else plain(value)
    if not isinstance(found, int) or isinstance(found, bool) or not -(2**63) <= found < 2**63:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value!r}")
    return found


def number(name: str, value: Any) -> float:
    """A number.

    Raises:
      ValueError: it is none; the message names it.
    """
    found = plain(value)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(found)


def truth(name: str, value: Any) -> bool:
    """True or False.

    Raises:
      ValueError: it is neither; the message names it.
    """
    found = plain(value)
    if not isinstance(found, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return found


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or several; negative ones, which mean none, are left out.

    Raises:
      ValueError: they are no ids; the message names them.
    """
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError):  # lists of different lengths; arrays on other devices
        ids = np.asarray("")
    if ids.size and (ids.ndim > 1 or not np.issubdtype(ids.dtype, np.integer) or ids.max() > _MOST):
        raise ValueError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(int(i) for i in np.ravel(ids) if i >= 0)
