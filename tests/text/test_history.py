import pytest
from tiny import byte_tokenizer

from jaxkv.text import ChatHistory


def texts(history: ChatHistory) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in history.messages]


def rendered(tokenizer, *messages: tuple[str, str]) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_turns_are_as_the_template_writes_them() -> None:
    tokenizer = byte_tokenizer(chat=True)
    history = ChatHistory(tokenizer)
    assert history.ask("one?", 1000) == (rendered(tokenizer, ("user", "one?")), 0)
    history.answered("1")
    said = (("user", "one?"), ("assistant", "1"), ("user", "two?"))
    assert history.ask("two?", 1000) == (rendered(tokenizer, *said), 0)
    assert texts(history) == list(said)
    history.take_back()
    assert texts(history) == list(said[:2])
    history.clear()
    assert texts(history) == []


def test_the_oldest_turns_go_and_the_system_message_stays() -> None:
    tokenizer = byte_tokenizer(chat=True)
    history = ChatHistory(tokenizer, system="be brief")
    for number in range(3):
        history.ask(f"question {number}", 10_000)
        history.answered(f"answer {number}")
    kept = (("system", "be brief"), ("user", "question 2"), ("assistant", "answer 2"), ("user", "last"))
    room = len(rendered(tokenizer, *kept))
    assert history.ask("last", room) == (rendered(tokenizer, *kept), 2)
    assert texts(history) == list(kept)
    history.clear()
    assert texts(history) == [kept[0]]


def test_a_question_without_room_is_refused_and_not_added() -> None:
    tokenizer = byte_tokenizer(chat=True)
    history = ChatHistory(tokenizer)
    history.ask("a", 1000)
    history.answered("b")
    before, need = texts(history), len(rendered(tokenizer, ("user", "x" * 50)))
    with pytest.raises(ValueError, match=f"has {need} tokens in the model's template, and there is room for {need - 1}"):
        history.ask("x" * 50, need - 1)
    assert texts(history) == before
    assert history.ask("x" * 50, need)[1] == 1


def test_a_model_without_a_template_does_not_converse() -> None:
    with pytest.raises(ValueError, match=r"no chat template.*jaxkv generate"):
        ChatHistory(byte_tokenizer())
    with pytest.raises(ValueError, match="there is no tokenizer"):
        ChatHistory(None)


def test_a_template_that_takes_no_system_message_is_named_with_the_way_out() -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    with pytest.raises(ValueError, match=r"fails for system and user.*no system.*do without it"):
        ChatHistory(tokenizer, system="be brief")
    ChatHistory(tokenizer)
