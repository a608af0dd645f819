"""Prompts as vLLM's users write them: texts, token ids, dictionaries, mixed; and conversations in a chat template."""

from typing import Any, NamedTuple

import numpy as np

from jaxkv.config import shown
from jaxkv.text.chat import in_template


class Prompt(NamedTuple):
    """One prompt: its text, or its token ids, or both; and the salt that it is shared under."""

    text: str | None
    ids: list[int] | None
    cache_salt: str | None = None


_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}
_FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these'


def as_prompts(prompts: Any) -> list[Prompt]:
    """Prompts in all forms.

    Raises:
      ValueError: one has another form.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    one = isinstance(prompts, str | dict) or (isinstance(prompts, list | tuple) and prompts and all(map(_is_id, prompts)))
    if one:
        return [_prompt(prompts)]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be {_FORMS}, got {shown(prompts)}")
    return [_prompt(prompt) for prompt in prompts]


def _is_id(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, dict):
        if unknown := sorted(map(str, prompt.keys() - _FIELDS)):
            raise ValueError(f"a prompt has no field {unknown[0]!r} here: there are {sorted(_FIELDS)}")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if (text is None and ids is None) or not isinstance(text, str | None) or not isinstance(salt, str | None):
            raise ValueError(f'a prompt needs a "prompt" that is a text, or "prompt_token_ids", got {shown(prompt)}')
        return Prompt(text, None if ids is None else _ids(ids), salt)
    return Prompt(None, _ids(prompt))


def _ids(ids: Any) -> list[int]:
    known = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(known, list | tuple) or not all(map(_is_id, known)):
        raise ValueError(f"a prompt must be {_FORMS.removesuffix(', or a list of these')}, got {shown(ids)}")
    return [int(x) for x in known]


def chat_prompts(tokenizer: Any, messages: Any, options: dict[str, Any]) -> list[Prompt]:
    """Conversations in the model's chat template.

    Raises:
      ValueError: there is no template, it fails, or `messages` have another form.
    """
    if tokenizer is None or not (tokenizer.chat_template or options.get("chat_template")):
        raise ValueError("the model has no chat template: give one as chat_template, or use generate with whole texts")
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f'messages must be [{{"role": ..., "content": ...}}, ...] or a list of such lists, got {shown(messages)}'
        )
    chats = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for chat in chats:
        if not isinstance(chat, list | tuple) or not all(isinstance(m, dict) and "role" in m for m in chat) or not chat:
            raise ValueError(f'a conversation must be [{{"role": ..., "content": ...}}, ...], got {shown(chat)}')
        text = in_template(tokenizer, list(chat), tokenize=False, **options)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them already
        prompts.append(Prompt(str(text), list(ids)))
    return prompts
