"""jax's options by name."""

from typing import Any

import jax


def option(name: str) -> Any:
    """The value of one of jax's options; type checkers do not know them as attributes."""
    return getattr(jax.config, name)
