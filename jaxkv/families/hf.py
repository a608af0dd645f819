"""transformers, imported when it is first needed: that takes a second, and it advises to install torch, which is not wanted here."""

import os
from types import ModuleType


def transformers() -> ModuleType:
    """The module, imported without its advice."""
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
