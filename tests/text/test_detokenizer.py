"""Streamed text is what decoding all tokens gives, for any tokens and every kind of tokenizer, and no piece comes late.

Once two characters of byte fallback in a row came out as U+FFFD, and an unfinished character at the end was lost.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.tokenizers_of_all_kinds import KINDS, TEXTS
from tiny import blank_stripping_tokenizer, byte_tokenizer

from jaxkv.text import Detokenizer

ALL = {**KINDS, "bytes only": byte_tokenizer(), "byte fallback only": blank_stripping_tokenizer()}
BYTE_LEVEL, FALLBACK, STRIPPED = (KINDS[k] for k in ("byte-level BPE", "byte fallback", "byte fallback, blank stripped"))


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token brought, and what was left at the end."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(t) for t in tokens), detokenizer.finish()]


def byte_ids(tokenizer: Any, content: bytes) -> list[int]:
    """One token a byte."""
    if tokenizer.convert_tokens_to_ids("<0x41>") not in (None, tokenizer.unk_token_id):
        return tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in content])
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
    return tokenizer.convert_tokens_to_ids([names[b] for b in content])


def mixed_tokens(tokenizer: Any, rng: random.Random) -> list[int]:
    """Any tokens: random ones, texts as tokens and as bytes, parts of characters, invalid bytes, special tokens in between."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 9)):
        kind, text = rng.randrange(6), rng.choice(TEXTS)
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randrange(1, 5)]
        if kind == 0:
            tokens += [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 6))]
        elif kind == 1:
            tokens += tokenizer(piece, add_special_tokens=False)["input_ids"]
        elif kind == 2:
            tokens += rng.choices(tokenizer.all_special_ids, k=rng.randrange(1, 3))
        elif tokenizer in (KINDS["metaspace"], KINDS["WordPiece"]):
            tokens.append(rng.randrange(len(tokenizer)))
        else:
            content = bytes(rng.randrange(256) for _ in range(3)) if kind == 3 else piece.encode()
            tokens += byte_ids(tokenizer, content[: rng.randrange(1, len(content) + 1)] if kind == 4 else content)
    return tokens


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_the_stream_is_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    assert "".join(streamed(tokenizer, tokens)) == decoded(tokenizer, tokens)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ALL)
def test_the_stream_is_the_text_of_mixed_tokens(kind: str, count: int) -> None:
    tokenizer, rng = ALL[kind], random.Random(count)
    for _ in range(count):
        tokens = mixed_tokens(tokenizer, rng)
        assert "".join(streamed(tokenizer, tokens)) == decoded(tokenizer, tokens), tokens


COMPLETIONS = [bytes(x) for n in (1, 2, 3) for first in (0x80, 0x90, 0xA0) for x in [(first, *[0x80] * (n - 1))]]


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback", "byte fallback, blank stripped"])
def test_text_is_out_as_soon_as_no_later_token_changes_it(kind: str, count: int) -> None:
    tokenizer, rng = ALL[kind], random.Random(count)
    continuations = [byte_ids(tokenizer, c) for c in [*COMPLETIONS, b"\xff", b"A"]] + [[t] for t in range(256, len(tokenizer))]
    for _ in range(count):
        tokens, detokenizer, out = mixed_tokens(tokenizer, rng), Detokenizer(tokenizer), ""
        for n, token in enumerate(tokens, 1):
            out += detokenizer.add(token)
            certain = decoded(tokenizer, tokens[:n])
            for later in continuations:
                whole = decoded(tokenizer, [*tokens[:n], *later])
                certain = certain[: next((i for i, (a, b) in enumerate(zip(certain, whole)) if a != b), len(whole))]
            assert out == certain, tokens[:n]


def test_characters_of_byte_fallback_in_a_row() -> None:
    text = "한국어 🙂🙂"
    pieces = streamed(FALLBACK, [*byte_ids(FALLBACK, text.encode()), FALLBACK.convert_tokens_to_ids("b")])
    assert "".join(pieces) == text + "b"
    assert pieces[-2] == text + "b", "until the run of bytes ends, one invalid byte would turn all of it into U+FFFD"


def test_an_invalid_run_of_bytes_is_certain_at_once() -> None:
    assert streamed(FALLBACK, byte_ids(FALLBACK, b"\xffab")) == ["\ufffd"] * 3 + [""]


def test_byte_level_characters_come_with_their_last_byte() -> None:
    assert streamed(BYTE_LEVEL, byte_ids(BYTE_LEVEL, "a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]
    assert streamed(BYTE_LEVEL, byte_ids(BYTE_LEVEL, b"\xffa\xe4\xbd")) == ["\ufffd", "a", "", "", "\ufffd"]


def test_a_blank_is_stripped_once_and_special_tokens_are_no_beginning() -> None:
    start, blank = STRIPPED.bos_token_id, STRIPPED.convert_tokens_to_ids("\u2581")
    assert "".join(streamed(STRIPPED, [start, blank, start, blank, blank])) == "  "


def test_a_tokenizer_that_has_nothing_but_decode() -> None:
    class Bare:
        def decode(self, tokens: list[int], **options: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    content = "é🙂\ufffdx".encode() + b"\xf0\x9f"
    assert "".join(streamed(Bare(), list(content))) == content.decode(errors="replace")
    assert any(streamed(Bare(), [0xFF] * 8)[:-1]), "invalid bytes do not hold text back for ever"


@pytest.mark.parametrize("kind", ALL)
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str) -> None:
    tokenizer = ALL[kind]
    letter = next(t for t in range(len(tokenizer) - 1, -1, -1) if decoded(tokenizer, [t]).strip(" \ufffd"))
    detokenizer, longest = Detokenizer(tokenizer), 0
    plain = detokenizer.decode

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return plain(tokens)

    detokenizer.decode = decode  # type: ignore[method-assign]
    for _ in range(300):
        assert detokenizer.add(letter)
    assert longest < 10


@pytest.mark.slow
def test_the_default_models_tokenizer() -> None:
    from jaxkv.weights.loading import open_model

    tokenizer, rng = open_model("default").tokenizer, random.Random(0)
    for _ in range(2000):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 20))]
        assert "".join(streamed(tokenizer, tokens)) == decoded(tokenizer, tokens), tokens
