"""Text out of tokens as they come: never half a character."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes into that are no character (yet)."""

MAX_INCOMPLETE = 3
"""Bytes an unfinished character can have, and so how much of a text's end may still change."""


class Detokenizer:
    """Turns a growing list of tokens into text that only ever gets longer.

    A window of the latest tokens is decoded: decoding depends on the neighbours (a leading blank, a character split over
    tokens), but not on those far away. A character that never becomes complete stays out of the text.

    Args:
      tokenizer: anything with transformers' `decode`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self._start = 0  # of the window
        self._next_start = 0  # tokens[_start:_next_start] are the neighbours of what is new
        self._out = 0  # characters of the window's text that are out already

    def add(self, token: int) -> str:
        """The text that one more token makes certain; "" while a character is incomplete."""
        self.tokens.append(token)
        text = self._decode()
        certain = _without_unfinished(text)
        new = certain[self._out :]
        self._out = max(self._out, len(certain))
        if new and certain == text:
            self._start, self._next_start = self._next_start, len(self.tokens)
            self._out = len(self._decode())
        return new

    def _decode(self) -> str:
        window = self.tokens[self._start :]
        return str(self.tokenizer.decode(window, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _without_unfinished(text: str) -> str:
    for _ in range(MAX_INCOMPLETE):
        text = text.removesuffix(INCOMPLETE)
    return text
