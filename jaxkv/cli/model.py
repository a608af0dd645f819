"""A command's model: checked, with its tokenizer, before any weight is read."""

import os
import warnings

import jax

from jaxkv.cache.pages import page_bytes
from jaxkv.config import ModelConfig
from jaxkv.weights.loading import Opened, open_model
from jaxkv.weights.tokenizer_warning import TokenizerWarning


def open_with_tokenizer(name: str) -> Opened:
    """The model's files.

    Raises:
      ValueError: they hold no tokenizer, or one that cannot be used; and all that `jaxkv.load` raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", TokenizerWarning)
        try:
            opened = open_model(name)
        except TokenizerWarning as warning:
            raise ValueError(str(warning)) from warning
    if opened.tokenizer is None:
        raise ValueError(
            f"{name} holds no tokenizer: save one along, with jaxkv.save(model, folder, tokenizer=tokenizer) or "
            "tokenizer.save_pretrained(folder)"
        )
    return opened


def check_pool(config: ModelConfig, page_size: int, num_pages: int | None) -> None:
    """Refuse a pool that no memory holds: XLA ends the process where it cannot even count the bytes.

    Raises:
      ValueError: keys and values alone would need more memory than there is.
    """
    pages = 2 if num_pages is None else num_pages  # the null page, and at least one more
    needed = pages * page_bytes((config,), page_size)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**46
    if needed > max(there, 2**40 if jax.default_backend() != "cpu" else 0):
        raise ValueError(
            f"{pages} pages (--num-pages) of {page_size} tokens (--page-size) need {needed / 1e9:,.0f} GB, there are {there / 1e9:,.0f}"
        )
