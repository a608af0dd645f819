"""Stderr: whether anybody watches it, so that what takes long says so there, and a line on it."""

import contextlib
import os
import sys

VARIABLE = "JAXKV_PROGRESS"
"""Environment variable: "1" says what takes long wherever stderr leads, "0" never does."""


def watched() -> bool:
    """Whether stderr is a terminal or a notebook's, unless `$JAXKV_PROGRESS` says otherwise."""
    if chosen := os.environ.get(VARIABLE):
        return chosen != "0"
    stream = sys.stderr
    if stream is None or getattr(stream, "closed", False):
        return False
    # A notebook's stream is no terminal by its own account, but its text appears below the cell as it is written.
    return stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel"


def say(line: str) -> None:
    """A line on stderr, under jaxkv's name. One that is closed, or a full disk, is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        print(f"jaxkv: {line}", file=sys.stderr, flush=True)
