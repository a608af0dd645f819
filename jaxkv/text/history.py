"""The turns of a chat, as a model's template writes them, and which of them have to go when there is no more room."""

from typing import Any

from jaxkv.text.chat import in_template


class ChatHistory:
    """Messages of a conversation: a question is asked, and answered or taken back.

    Args:
      tokenizer: anything with transformers' `apply_chat_template`.
      system: the first message, which stays; None is none (the template may put one of its own).

    Attributes:
      messages: as transformers has them, `{"role": ..., "content": ...}`.

    Raises:
      ValueError: there is no tokenizer, the model has no chat template, or its template takes no system message.
    """

    def __init__(self, tokenizer: Any, *, system: str | None = None):
        if tokenizer is None:
            raise ValueError("there is no tokenizer: jaxkv.load returns None for one where the model's files hold none")
        if not tokenizer.chat_template:
            raise ValueError(
                "the model has no chat template, so it was not made to converse: take one that was (their names often end in "
                "-Instruct or -Chat), or let this one continue texts, with jaxkv generate"
            )
        self.tokenizer = tokenizer
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)
        try:
            self._render([*self._system, {"role": "user", "content": "Hi"}])
        except ValueError as error:
            way_out = "; some templates take no system message: do without it" if self._system else ""
            raise ValueError(f"{error}{way_out}") from error

    def ask(self, question: str, room: int) -> tuple[list[int], int]:
        """Adds a question; drops the oldest turns until all fits.

        Args:
          question: of the user.
          room: tokens that the history may have, the beginning of the answer included.

        Returns:
          The history's token ids, and how many turns (a question and its answer) were dropped.

        Raises:
          ValueError: the question alone has no room, or the template refuses it; it has not been added then.
        """
        kept, new, dropped = self.messages[len(self._system) :], {"role": "user", "content": question}, 0
        while True:
            messages = [*self._system, *kept, new]
            tokens = self._render(messages)
            if len(tokens) <= room:
                self.messages = messages
                return tokens, dropped
            if not kept:
                raise ValueError(f"the message has {len(tokens)} tokens in the model's template, and there is room for {room}")
            kept, dropped = kept[2:], dropped + 1

    def answered(self, text: str) -> None:
        """Adds the answer to the question that was asked last."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forgets the question that was asked last."""
        self.messages.pop()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._system)

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return list(in_template(self.tokenizer, messages, add_generation_prompt=True, tokenize=True, return_dict=False))
