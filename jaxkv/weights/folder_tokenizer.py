"""The tokenizer of a Hugging Face folder, by transformers; custom code is never run and nothing is asked on stdin."""

import importlib.util
from pathlib import Path
from typing import Any

from jaxkv.families.hf import quiet
from jaxkv.weights.safetensors_file import read_json
from jaxkv.weights.tokenizer_warning import no_tokenizer

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def folder_tokenizer(folder: Path) -> Any:
    """The tokenizer; None where there is none, and with a `TokenizerWarning` where it cannot be used."""
    present = [name for name in (*_VOCABULARIES, *_SETTINGS) if (folder / name).is_file()]
    if not present:
        return None
    tokenizer, fault = _read(folder, present)
    if fault is not None:
        no_tokenizer(fault)
    return tokenizer


def _broken_file(folder: Path, present: list[str]) -> str | None:
    """What is wrong with the first file that cannot be read on its own."""
    for name in present:
        path = folder / name
        if path.stat().st_size == 0:
            return f"{path} is empty"
        if name.endswith(".json"):
            try:
                read_json(path)
            except ValueError as error:
                return str(error)
    return None


def _why(folder: Path, present: list[str], error: Exception) -> str:
    if broken := _broken_file(folder, present):
        return broken
    if _SETTINGS[0] in present and read_json(folder / _SETTINGS[0]).get("auto_map"):
        return f"{folder / _SETTINGS[0]} asks for code of its own (auto_map), which is not run"
    by_sentencepiece = next((n for n in present if n.endswith(".model")), None)
    if by_sentencepiece and importlib.util.find_spec("sentencepiece") is None:
        return f"{folder / by_sentencepiece} needs the package sentencepiece (pip install sentencepiece)"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{folder / present[0]} cannot be read: {type(error).__name__}: {reason}"


def _read(folder: Path, present: list[str]) -> tuple[Any, str | None]:
    """The tokenizer, or why there is none."""
    try:
        with quiet() as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        words = set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens)
    except Exception as error:  # whatever the files' content makes transformers raise: KeyError, AttributeError, Rust's own
        return None, _why(folder, present, error)
    if not words:
        missing = "" if set(present) & set(_VOCABULARIES) else f", and there is no {' or '.join(_VOCABULARIES[:2])} beside it"
        return None, f"{folder / present[0]} makes a tokenizer without words{missing}"
    return tokenizer, None
