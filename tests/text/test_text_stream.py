import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import blank_stripping_tokenizer, byte_tokenizer

from jaxkv.text import Answers, Detokenizer, TextStream

BYTES, BLANKS = byte_tokenizer(), blank_stripping_tokenizer()


def streamed(tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(t) for t in tokens]


@given(st.text(st.characters(blacklist_characters="\ufffd", blacklist_categories=["Cs"]), max_size=30))
def test_pieces_are_the_text_and_never_half_a_character(text: str) -> None:
    pieces = streamed(BYTES, BYTES(text)["input_ids"])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_tokens_become_their_text_but_for_broken_bytes(tokens: list[int]) -> None:
    text = "".join(streamed(BYTES, tokens)).replace("\ufffd", "")
    assert text == BYTES.decode(tokens, skip_special_tokens=True).replace("\ufffd", "")


@given(st.lists(st.integers(256, 281), max_size=40))
def test_blanks_between_words_stay(tokens: list[int]) -> None:
    assert "".join(streamed(BLANKS, tokens)) == BLANKS.decode(tokens)


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokens = BYTES("a😀b")["input_ids"]
    assert streamed(BYTES, tokens) == ["a", "", "", "", "😀", "b"]


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    assert "".join(streamed(BYTES, BYTES("a😀")["input_ids"][:-1])) == "a"


def test_broken_bytes_do_not_hold_text_back_for_ever() -> None:
    broken = BYTES("😀")["input_ids"][0]
    detokenizer = Detokenizer(BYTES)
    assert any(detokenizer.add(broken) for _ in range(8))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_several_texts_stand_below_their_titles_in_order(order: list[int]) -> None:
    out = io.StringIO()
    stream = TextStream(out, ["A", "B", "C"])
    for letter in "xyz":
        for i in order:
            stream.write(i, letter)
    for i in order:
        stream.end(i)
    assert out.getvalue() == "[1/3] A\nxyz\n\n[2/3] B\nxyz\n\n[3/3] C\nxyz\n"


def test_the_first_unfinished_text_shows_at_once_and_the_next_when_it_ends() -> None:
    out = io.StringIO()
    stream = TextStream(out, ["A", "B"])
    stream.write(1, "later")
    assert out.getvalue() == ""
    stream.write(0, "now")
    assert out.getvalue() == "[1/2] A\nnow"
    stream.end(0)
    assert out.getvalue() == "[1/2] A\nnow\n\n[2/2] B\nlater"


def test_one_text_has_no_title() -> None:
    out = io.StringIO()
    stream = TextStream(out, ["A"])
    stream.write(0, "text")
    stream.end(0)
    assert out.getvalue() == "text\n"


def test_an_empty_text_still_has_its_title() -> None:
    out = io.StringIO()
    stream = TextStream(out, ["A", "B"])
    stream.end(0)
    stream.end(1)
    assert out.getvalue() == "[1/2] A\n\n\n[2/2] B\n\n"


def test_control_characters_do_not_reach_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, expected in ((Terminal(), "a[31mb\tc\n\n"), (io.StringIO(), "a\x1b[31mb\tc\n\n")):
        stream = TextStream(out, ["A"])
        stream.write(0, "a\x1b[31mb\tc\n")
        stream.end(0)
        assert out.getvalue() == expected


def test_an_end_token_ends_its_text_and_is_no_part_of_it() -> None:
    answers = Answers(BYTES, 2, [256], None)
    for token in BYTES("hi")["input_ids"]:
        answers.token(1, token)
    answers.token(1, 256)
    answers.finish()
    assert answers.texts == ["", "hi"]
