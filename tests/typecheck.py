"""The run-time check of annotations, as jaxtyping's import hook applies it to every function of the packages."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import beartype
import jax
import jaxtyping


def _holds_arrays(annotation: Any) -> bool:
    if inspect.isclass(annotation):
        return issubclass(annotation, jax.Array | jaxtyping.AbstractArray)
    return any(_holds_arrays(part) for part in get_args(annotation))


def check(function: Callable) -> Callable:
    """beartype, but for an `__init__` that takes arrays: a pytree's, which JAX rebuilds with any leaves."""
    if function.__name__ == "__init__":
        parameters = inspect.signature(function).parameters.values()
        if any(_holds_arrays(p.annotation) for p in parameters):
            return function
    return beartype.beartype(function)
