"""transformers, imported when it is first needed, and without its advice and warnings: what matters is an error here."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType


def transformers() -> ModuleType:
    """The module. It takes a second to import, and would advise to install torch, which is not wanted here."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers


@contextlib.contextmanager
def quiet() -> Iterator[ModuleType]:
    """The module, its log silent until the block ends: what it says there becomes one error of ours, or does not matter."""
    logging = transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity(100)
    try:
        yield transformers()
    finally:
        logging.set_verbosity(before)
