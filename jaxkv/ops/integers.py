"""Divisions of counts, which are never negative: XLA divides them in one operation, where `//` takes ten to round down below zero."""

from jax import lax
from jaxtyping import Array, Int


def quotient(x: Int[Array, "*shape"], by: int) -> Int[Array, "*shape"]:
    """x // by, for x >= 0; rounded towards zero where x is negative."""
    return x if by == 1 else lax.div(x, lax.full_like(x, by))


def quotient_up(x: Int[Array, "*shape"], by: int) -> Int[Array, "*shape"]:
    """-(-x // by), for x >= 0."""
    return x if by == 1 else lax.div(x + (by - 1), lax.full_like(x, by))


def remainder(x: Int[Array, "*shape"], by: int) -> Int[Array, "*shape"]:
    """x % by, for x >= 0; at most 0 where x is negative."""
    return lax.full_like(x, 0) if by == 1 else lax.rem(x, lax.full_like(x, by))
