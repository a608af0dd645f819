"""Prompts in a chat template, and where an answer ends."""

import pytest
from tiny import END, TEMPLATE, byte_tokenizer

from jaxkv.text import encode, end_tokens


def chat_tokenizer(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_an_instruct_model_gets_its_template_unless_raw() -> None:
    chat = byte_tokenizer(chat=True)
    assert chat.decode(encode(chat, "Hi")) == f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert chat.decode(encode(chat, "Hi", raw=True)) == "Hi"
    assert chat.decode(encode(byte_tokenizer(), "Hi")) == "Hi"


ENDS_WITH_A_QUESTION = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('ask') }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize("template", [TEMPLATE, ENDS_WITH_A_QUESTION], ids=["any chat", "a chat that ends with a question"])
def test_a_chat_ends_where_its_template_ends_an_answer(template: str) -> None:
    chat = chat_tokenizer(template)
    end = chat.convert_tokens_to_ids(END)
    assert end_tokens(chat, []) == tuple(sorted({end, chat.eos_token_id}))
    assert end_tokens(chat, [7], raw=True) == (7, chat.eos_token_id)


def test_tokens_beyond_the_models_vocabulary_end_nothing() -> None:
    """A tokenizer may have more tokens than the model, and a model's file may name such a token, too."""
    chat = chat_tokenizer(TEMPLATE)
    end = chat.convert_tokens_to_ids(END)
    assert end_tokens(chat, [7, end + 5], vocab_size=end) == tuple(t for t in end_tokens(chat, [7]) if t < end)
    assert end in end_tokens(chat, [7], vocab_size=end + 1)
    assert end_tokens(None, [3, 9], vocab_size=9) == (3,)


def test_a_template_that_takes_no_answers_has_no_end_of_its_own() -> None:
    chat = chat_tokenizer(
        "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}"
    )
    assert end_tokens(chat, [7]) == (7, chat.eos_token_id)
    assert chat.decode(encode(chat, "Hi")) == "Hi"


def test_a_template_without_messages_in_it() -> None:
    assert end_tokens(chat_tokenizer("hello"), [7]) == (7, byte_tokenizer().eos_token_id)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('a system\nmessage') }}", "TemplateError: a system message"), ("{{ 1 + 'a' }}", "TypeError")],
)
def test_a_template_that_fails_is_an_error_of_one_line(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"chat template fails for user \({message}.*\(raw\)$"):
        encode(chat_tokenizer(template), "Hi")
