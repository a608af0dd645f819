"""The text of an answer while its tokens come, and the stop texts that end it.

    certain text | may be the beginning of a stop text | not decided by the tokenizer yet |
    given out      held back

Host only: no jax.
"""

from collections.abc import Sequence
from typing import Any

from jaxkv.text import Detokenizer


class StopTexts:
    """Looks for texts in a text that grows.

    Args:
      stops: none of them empty.
      included: whether the text that is left ends with the stop text, or before it.
    """

    def __init__(self, stops: Sequence[str], included: bool):
        self.stops, self._included = list(stops), included
        self._longest = max(map(len, stops), default=0)

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """The stop text that comes first among those that end within the last `new` characters, and where the text ends then."""
        begin = max(len(text) - new - self._longest + 1, 0)
        found = []
        for nth, stop in enumerate(self.stops):
            place = text.find(stop, max(len(text) - new - len(stop) + 1, begin, 0))
            if place >= 0:
                found.append((place, nth))
        if not found:
            return None
        place, nth = min(found)
        stop = self.stops[nth]
        return stop, place + len(stop) if self._included else place

    def held_back(self, text: str) -> int:
        """Characters at the text's end that may be the beginning of a stop text."""
        most = min(self._longest - 1, len(text))
        for length in range(most, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


class AnswerText:
    """The text of one answer.

    Args:
      tokenizer: anything with transformers' `decode`.
      stops: texts that end the answer, looked for behind its first `min_tokens` tokens.
      skip_special_tokens: leave special tokens out.

    Attributes:
      text: so far, up to a stop text; what may be the beginning of one is in it.
      stop: the stop text that was found.
    """

    def __init__(self, tokenizer: Any, stops: StopTexts, *, min_tokens: int, skip_special_tokens: bool):
        self.text, self.stop = "", None
        self._stops, self._min_tokens, self._tokens = stops, min_tokens, 0
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def add(self, token: int) -> None:
        """One more token."""
        self._tokens += 1
        self._say(self._detokenizer.add(token))

    def finish(self) -> None:
        """No more tokens come."""
        if self.stop is None:
            self._say(self._detokenizer.finish())

    @property
    def certain(self) -> int:
        """Characters of the text that nothing can change."""
        return len(self.text) if self.stop is not None else len(self.text) - self._stops.held_back(self.text)

    def _say(self, new: str) -> None:
        if not new:
            return
        self.text += new
        found = self._stops.find(self.text, len(new)) if self._stops.stops and self._tokens > self._min_tokens else None
        if found is not None:
            self.stop, end = found
            self.text = self.text[:end]
