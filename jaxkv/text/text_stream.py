"""Several texts that grow at the same time, written in a readable order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxkv.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What may not reach a terminal: everything that could move the cursor or start an escape sequence, but tab and newline.
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


@runtime_checkable
class Terminal(Protocol):
    """What is asked of a place to write to; files have it, and so has `io.StringIO`."""

    def write(self, text: str, /) -> object:
        """Writes text."""
        ...

    def flush(self) -> None:
        """Makes it visible."""
        ...

    def isatty(self) -> bool:
        """Whether somebody is looking."""
        ...


class TextStream:
    """Writes several texts that grow at the same time, one below the other: the first unfinished one as it grows.

    With one title nothing but the text is written; with several, each text stands below its title. On a terminal the text's
    control characters are dropped.

    Args:
      out: where to; flushed after every piece.
      titles: one per text.
      bold: write titles in bold.
    """

    def __init__(self, out: Terminal, titles: Sequence[str], *, bold: bool = False):
        self.out, self.titles, self.bold = out, list(titles), bold
        self._terminal = out.isatty()
        self._waiting = [""] * len(self.titles)
        self._ended = [False] * len(self.titles)
        self._current = 0
        self._titled = False

    def write(self, index: int, text: str) -> None:
        """More of one text."""
        self._waiting[index] += text
        self._advance()

    def end(self, index: int) -> None:
        """One text has all its tokens."""
        self._ended[index] = True
        self._advance()

    def _advance(self) -> None:
        while self._current < len(self.titles):
            i = self._current
            if self._waiting[i]:
                self._put(i, self._waiting[i])
                self._waiting[i] = ""
            if not self._ended[i]:
                return
            self._put(i, "\n" if i == len(self.titles) - 1 else "\n\n")
            self._current, self._titled = i + 1, False

    def _put(self, index: int, text: str) -> None:
        if len(self.titles) > 1 and not self._titled:
            title = f"[{index + 1}/{len(self.titles)}] {self.titles[index]}"
            self.out.write(f"\x1b[1m{title}\x1b[0m\n" if self.bold else f"{title}\n")
            self._titled = True
        self.out.write(text.translate(_CONTROL) if self._terminal else text)
        self.out.flush()


class Answers:
    """The texts of several prompts while their tokens come in, mixed, and where they are shown.

    Args:
      tokenizer: anything with transformers' `decode`.
      count: number of prompts.
      ends: tokens that end a text and are no part of it.
      stream: where the texts are written as they grow; None keeps them to `texts`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", count: int, ends: Sequence[int], stream: TextStream | None):
        self.ends, self.stream = frozenset(ends), stream
        self._detokenizers = [Detokenizer(tokenizer) for _ in range(count)]
        self._pieces: list[list[str]] = [[] for _ in range(count)]

    @property
    def texts(self) -> list[str]:
        """The texts so far."""
        return ["".join(pieces) for pieces in self._pieces]

    def token(self, index: int, token: int) -> None:
        """One more token of one text."""
        if token in self.ends:
            self._end(index)
        else:
            self._say(index, self._detokenizers[index].add(token))

    def finish(self) -> None:
        """No more tokens come."""
        for index in range(len(self._pieces)):
            self._end(index)

    def _end(self, index: int) -> None:
        self._say(index, self._detokenizers[index].finish())
        if self.stream is not None:
            self.stream.end(index)

    def _say(self, index: int, text: str) -> None:
        if text:
            self._pieces[index].append(text)
            if self.stream is not None:
                self.stream.write(index, text)
