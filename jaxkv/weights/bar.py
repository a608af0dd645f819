"""A bar for what takes long to read or to fetch: on stderr, where somebody watches, and gone when it is full."""

import sys

from tqdm import tqdm

from jaxkv.programs.watched import watched

SHORT = 1.0
"""Seconds; what takes no longer gets no bar."""


def bar(what: str, total: int) -> tqdm:
    """A tqdm bar of `total` bytes; `update` it with those that are there.

    Args:
      what: is said in front of it: "loading".
      total: bytes.
    """
    return tqdm(
        total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False, delay=SHORT, disable=not watched()
    )
