"""Lines that somebody types at a terminal, or that come out of a pipe."""

import contextlib
import sys
from typing import Protocol, runtime_checkable

from jaxkv.text import Terminal

PROMPT = "> "


@runtime_checkable
class LineSource(Protocol):
    """What is asked of stdin."""

    def readline(self) -> str:
        """The next line, "" at the end."""
        ...

    def isatty(self) -> bool:
        """Whether somebody types."""
        ...


class Lines:
    """One line after the other, with a prompt and editing (arrow keys, earlier lines) where somebody types.

    Args:
      stdin, stdout, stderr: the process's.
    """

    def __init__(self, stdin: LineSource, stdout: Terminal, stderr: Terminal):
        self.typed = stdin.isatty()
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        if self.typed:
            with contextlib.suppress(ImportError):  # not everywhere
                import readline  # noqa: F401 (makes `input` edit)

    def read(self) -> str | None:
        """The next line without its end; None when there are no more.

        Raises:
          ValueError: it is not UTF-8.
          KeyboardInterrupt: Ctrl-C.
        """
        try:
            line = self._type() if self.typed else self._stdin.readline()
        except EOFError:
            self.note("")
            return None
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is not UTF-8: {error}") from error
        if not self.typed and not line:
            return None
        if any("\ud800" <= c <= "\udfff" for c in line):  # how Python spells bytes that are no UTF-8, in some locales
            raise ValueError(f"the message is not UTF-8: {line!r}")
        return line.rstrip("\r\n")

    def note(self, text: str) -> None:
        """Says something on stderr to whoever types."""
        if self.typed:
            print(text, file=self._stderr, flush=True)

    def _type(self) -> str:
        if self._stdout.isatty() and self._stdin is sys.stdin:
            return input(PROMPT)
        print(PROMPT, end="", file=self._stderr, flush=True)  # stdout has nothing but answers
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return line
