"""A prompt as a model's chat template has it, and the tokens that end an answer."""

from collections.abc import Sequence
from typing import Any


def encode(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: in the model's chat template, or as it is where there is none or `raw`.

    Raises:
      ValueError: the template cannot be applied to a user's message.
    """
    if raw or not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    try:
        return list(in_template(tokenizer, chat, add_generation_prompt=True, tokenize=True, return_dict=False))
    except ValueError as error:
        raise ValueError(f"{error}; take the prompt without it (raw)") from error


def end_tokens(tokenizer: Any, known: Sequence[int], *, raw: bool = False, vocab_size: int | None = None) -> tuple[int, ...]:
    """Tokens that end a text: the model's and the tokenizer's own, and in a chat the one its template puts after an answer.

    Args:
      tokenizer: a transformers tokenizer, or None.
      known: the model's own end tokens.
      raw: whether prompts are taken without the template.
      vocab_size: of the model. A tokenizer, and a model's file, may name tokens beyond it, which the model never makes: they are left
        out.
    """
    ends = {*known}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id} - {None}
        if not raw and tokenizer.chat_template:
            special = set(tokenizer.get_added_vocab().values())
            ids = tokenizer(_after_an_answer(tokenizer), add_special_tokens=False)["input_ids"]
            ends |= {*[t for t in ids if t in special][:1]}
    return tuple(sorted(end for end in ends if vocab_size is None or end < vocab_size))


def _after_an_answer(tokenizer: Any) -> str:
    """What the template puts after an answer; "" where it takes none, whether a question follows or not."""
    mark = "jaxkv"
    for roles in (["user", "assistant"], ["user", "assistant", "user"]):
        try:
            text = in_template(tokenizer, [{"role": role, "content": mark} for role in roles], tokenize=False)
        except ValueError:  # some templates want a chat to end with a question, some know no answers
            continue
        return text.split(mark)[min(2, text.count(mark))]
    return ""


def in_template(tokenizer: Any, chat: list[dict[str, Any]], **options: Any) -> Any:
    """A chat in the model's template, as transformers' `apply_chat_template`.

    Raises:
      ValueError: the template fails, whatever it raises.
    """
    try:
        return tokenizer.apply_chat_template(chat, **options)
    except Exception as error:  # a template is a program: it may raise anything
        roles = " and ".join(dict.fromkeys(message["role"] for message in chat))
        reason = " ".join(str(error).split())
        raise ValueError(f"the model's chat template fails for {roles} ({type(error).__name__}: {reason})") from error
