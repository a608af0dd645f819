"""How many programs jax's backend compiles: those of eager operations, padding and slicing included."""

import contextlib
from collections.abc import Iterator

import jax

from jaxkv.programs.progress import COMPILES

_seen: list[str] = []


def _note(event: str, _: float, **more: object) -> None:
    if event == COMPILES:
        _seen.append(str(more.get("fun_name", "")))


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that holds, at the end of the block, one entry for each program that was compiled inside."""
    found: list[str] = []
    before = len(_seen)
    yield found
    found += _seen[before:]
