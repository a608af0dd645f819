import io

import pytest
from tiny import byte_tokenizer

from jaxkv.text import Answers, TextStream

BYTES = byte_tokenizer()


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


def test_what_is_left_of_a_text_comes_at_its_end() -> None:
    """Once the bytes of an unfinished character were dropped from the stream and from --json."""
    out = io.StringIO()
    answers = Answers(BYTES, 1, [256], TextStream(out, ["A"]))
    for token in [*BYTES("a😀")["input_ids"][:-1], 256]:
        answers.token(0, token)
    answers.finish()
    assert answers.texts == ["a\ufffd"]
    assert out.getvalue() == "a\ufffd\n"
