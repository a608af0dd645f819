"""Loops and branches inside `jax.shard_map`, which checks that arrays vary over the same mesh axes before and after each of them.

Constants vary over none: a loop's state that begins as zeros and goes on as results of the device's own data would change its type.
Here it begins as it goes on. Outside of `jax.shard_map`, and inside without its checks (`check_vma=False`), nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def axes_of(*trees: Any) -> frozenset[str]:
    """The manual mesh axes that any array in the pytrees varies over."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return frozenset()
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(trees)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The pytree with every array varying over the axes, too."""
    if not axes:
        return tree

    def cast(x: Any) -> Any:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def vary_like(tree: Any, *others: Any) -> Any:
    """The pytree with every array varying over whatever an array of it or of the others varies over."""
    return vary(tree, axes_of(tree, *others))


def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], state: Any, *like: Any) -> Any:
    """`lax.while_loop` whose state varies over whatever a part of it, or of `like`, varies over: `body` closes over nothing that varies
    over more."""
    axes = axes_of(state, *like)
    if not axes:
        return lax.while_loop(cond, body, state)
    return lax.while_loop(cond, lambda s: vary(body(s), axes), vary(state, axes))


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, Any], Any], state: Any, *like: Any) -> Any:
    """`lax.fori_loop`, as `while_loop` above."""
    axes = axes_of(state, lower, upper, *like)
    if not axes:
        return lax.fori_loop(lower, upper, body, state)
    return lax.fori_loop(lower, upper, lambda i, s: vary(body(i, s), axes), vary(state, axes))
