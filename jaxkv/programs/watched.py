"""Whether anybody watches stderr: then what takes long says so there."""

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
