"""From what was typed to token arrays: prompts, how many new tokens there is room for, and padding."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxkv.text import encode
from jaxkv.weights.generation_defaults import FILE, GenerationDefaults

DEFAULT_NEW_TOKENS = 256
SHORTEST_WIDTH = 32


@runtime_checkable
class Keyboard(Protocol):
    """What is asked of stdin."""

    def read(self) -> str:
        """All of it."""
        ...

    def isatty(self) -> bool:
        """Whether somebody would have to type."""
        ...


def read_prompts(arguments: Sequence[str], stdin: Keyboard) -> list[str]:
    """The prompts: those given, '-' replaced by all of stdin; stdin too where none is given and it is no terminal.

    Raises:
      ValueError: there is none, or one is empty.
    """
    if not arguments and not stdin.isatty():
        arguments = ["-"]
    if not arguments:
        raise ValueError("no prompt given (write one, or '-' for stdin)")
    if sum(a == "-" for a in arguments) > 1:
        raise ValueError("'-' is given more than once, but stdin can be read only once")
    prompts = [_all_of(stdin).rstrip("\n") if a == "-" else a for a in arguments]
    for number, prompt in enumerate(prompts, 1):
        if any("\ud800" <= c <= "\udfff" for c in prompt):  # how Python spells bytes of an argument that are no UTF-8
            raise ValueError(f"prompt {number} is not UTF-8: {prompt!r}")
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty: {prompt!r}")
    return prompts


def _all_of(stdin: Keyboard) -> str:
    try:
        return stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8: {error}") from error


def token_rows(tokenizer: Any, prompts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
      ValueError: a prompt has none, or the chat template refuses it.
    """
    rows = [encode(tokenizer, prompt, raw=raw) for prompt in prompts]
    if not all(rows):
        raise ValueError(f"prompt {[*map(bool, rows)].index(False) + 1} has no tokens")
    return rows


def new_token_budget(lengths: Sequence[int], wanted: int | None, max_seq_len: int, defaults: GenerationDefaults) -> int:
    """How many tokens every prompt may get: as many as wanted, else as the model's file says, else 256; or what there is room for.

    Raises:
      ValueError: the model has no room for a prompt, or not for as many tokens as wanted.
    """
    longest = max(lengths)
    number = list(lengths).index(longest) + 1
    room = max_seq_len - longest
    if room < 1:
        raise ValueError(f"prompt {number} has {longest} tokens, and the model allows {max_seq_len}, new ones included")
    if wanted is not None and wanted > room:
        raise ValueError(
            f"--max-new-tokens {wanted} is too many: prompt {number} has {longest} tokens, and the model allows {max_seq_len}"
        )
    if wanted is not None:
        return wanted
    usual = defaults.max_new_tokens or DEFAULT_NEW_TOKENS
    if defaults.max_new_tokens is None and defaults.max_length is not None:
        usual = defaults.max_length - longest
    if usual < 1:
        raise ValueError(
            f"prompt {number} has {longest} tokens, and max_length of the model's {FILE} is {defaults.max_length}: give "
            "--max-new-tokens"
        )
    return min(usual, room)
