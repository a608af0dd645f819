"""A tokenizer that cannot be used is a warning, not an error: the weights can be had without it."""

import warnings


class TokenizerWarning(UserWarning):
    """A model's tokenizer cannot be used, and why; `jaxkv.load` gives None in its place.

    `warnings.simplefilter("error", jaxkv.weights.TokenizerWarning)` makes it an error, before any weight is read.
    """


def no_tokenizer(reason: str) -> None:
    """Warn, with the reason in one line."""
    line = " ".join(reason.split())
    warnings.warn(f"no tokenizer: {line}", TokenizerWarning, stacklevel=5)
