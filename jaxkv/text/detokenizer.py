"""Text out of tokens as they come: exactly what decoding all of them gives, each piece as soon as nothing can change it.

What a token adds depends on its neighbours: a character may be spread over several byte tokens, and in SentencePiece's byte
fallback one invalid byte turns the whole run of byte tokens it ends up in into replacement characters. So a window of the latest
tokens is decoded again for each new one, and byte tokens are tried behind it: what they change is not certain yet.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes bytes into that are no character (yet)."""

LONGEST_UNFINISHED = 3
"""Bytes that an unfinished character can have."""

# One byte token each, as byte fallback and as byte-level BPE spell it.
_BYTES = {0xFF: ("<0xFF>", "\u00ff"), 0x41: ("<0x41>", "A"), 0x80: ("<0x80>", "\u0122"), 0xA0: ("<0xA0>", "\u0142")}
# What may follow an unfinished character or a run of bytes: something invalid, a letter, and one to three bytes that complete any
# beginning of a character (those of E0 and F0 need a first one from A0 on, all others take 80).
_PROBES = ((0xFF,), (0x41,), (0x80,), (0x80,) * 2, (0x80,) * 3, (0xA0,), (0xA0, 0x80), (0xA0, 0x80, 0x80))


class Detokenizer:
    """Turns a growing list of tokens into text that only ever gets longer.

    The pieces of `add` and the one of `finish`, joined, are `tokenizer.decode(tokens, skip_special_tokens=...,
    clean_up_tokenization_spaces=False)`, whatever the tokens are. The cost of a token depends on how many of those before it may
    still change, which is a few characters, or the latest run of byte tokens.

    Args:
      tokenizer: anything with transformers' `decode`.
      skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._window: list[int] = []  # the latest tokens; those before depend on none that can come
        self._context = 0  # how many of them are there only as neighbours of what is new
        self._out = 0  # characters of the window's text that are out already
        self._probes, self._whole_runs = _probes(self)

    def add(self, token: int) -> str:
        """The text that one more token makes certain; "" while it may still change."""
        self._window.append(int(token))
        text = self.decode(self._window)
        certain, ended = self._certain(text)
        new = text[self._out : certain]
        self._out = max(self._out, certain)
        if ended:
            self._move_window()
        return new

    def finish(self) -> str:
        """The text that was held back, when no more tokens come; the next token begins a new text."""
        rest = self.decode(self._window)[self._out :]
        self._window, self._context, self._out = [], 0, 0
        return rest

    def decode(self, tokens: Sequence[int]) -> str:
        """All of these tokens at once."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        return str(text)

    def _certain(self, text: str) -> tuple[int, bool]:
        """How many characters no later token can change, and whether what comes is decoded as if it stood alone."""
        broken = text.endswith(REPLACEMENT)
        if self._probes is None:  # unknown how this tokenizer spells bytes
            kept = len(text.rstrip(REPLACEMENT))
            return (max(kept, len(text) - LONGEST_UNFINISHED), False) if broken else (len(text), True)
        if not broken and not self._whole_runs:
            return len(text), True
        certain, ended = len(text), True
        for tokens, alone in self._probes if broken else self._probes[:1]:
            changed = self.decode([*self._window, *tokens])
            if changed != text + alone:
                ended = False
                certain = min(certain, _common(text, changed))
        return certain, ended

    def _move_window(self) -> None:
        """Forget the old context; what is new becomes the context, if there is text in it to tell a beginning from a middle."""
        later = self._window[self._context :]
        text = self.decode(later)
        if text:
            self._window, self._out = later, len(text)
        self._context = len(self._window)


def _probes(detokenizer: Detokenizer) -> tuple[list[tuple[list[int], str]] | None, bool]:
    """The probes as tokens with their text alone, and whether a run of byte tokens is decoded as a whole.

    None where the tokenizer has no byte tokens that are found by their names.
    """
    find = getattr(detokenizer.tokenizer, "convert_tokens_to_ids", None)
    if find is None:
        return None, False
    for spelling in range(2):
        ids = {byte: find(names[spelling]) for byte, names in _BYTES.items()}
        if None in ids.values() or len(set(ids.values())) < len(ids):
            continue
        expected = {byte: "A" if byte == 0x41 else REPLACEMENT for byte in ids}
        if all(detokenizer.decode([ids[byte]]) == text for byte, text in expected.items()):
            probes = [([ids[byte] for byte in probe]) for probe in _PROBES]
            alone = [(tokens, detokenizer.decode(tokens)) for tokens in probes]
            return alone, detokenizer.decode([ids[0x41], ids[0xFF]]) != "A" + REPLACEMENT
    return None, False


def _common(a: str, b: str) -> int:
    """Characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
