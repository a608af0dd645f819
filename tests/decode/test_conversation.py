"""Conversations against the model without any cache, and by counting: steps of the model, and programs of the compiler."""

import decoders
import jax
import jax.numpy as jnp
import pytest
from compilations import compilations

import jaxkv
from jaxkv.decode import conversation as module

ROOM, CHUNK, NEW = 96, 16, 5


def new(name: str = "gqa", **options) -> jaxkv.Conversation:
    options = {"max_seq_len": ROOM, "page_size": 4, "prefill_chunk": CHUNK, "eos_token_id": (), **options}
    return jaxkv.Conversation(decoders.decoder(name), **options)


def answer(conversation: jaxkv.Conversation, history: list[int], count: int = NEW, **options) -> list[int]:
    return [token.token for token in conversation.answer(history, max_new_tokens=count, **options)]


def ids(seed: int, length: int) -> list[int]:
    return decoders.random_prompts(seed, [length])[0]


def histories(first: list[int]) -> list[list[int]]:
    """Further histories of a conversation that began with `first`, and what each of them does to the cache."""
    return [
        [*first, *ids(1, 7)],  # a turn more
        [*first, *ids(1, 7), *ids(2, 30)],  # a longer one
        [*first[:9], *ids(3, 25)],  # an earlier turn is another now
        ids(4, 3),  # begins anew
        [*ids(4, 3), *ids(5, 70)],
        [*ids(4, 3), *ids(5, 70)],  # all of it is there already
        ids(5, 70)[10:],  # the oldest are gone
    ]


@pytest.mark.parametrize("name", ["gqa", "learned", "window", "dynamic"])
def test_answers_are_those_of_the_model_without_a_cache(name: str) -> None:
    conversation, first = new(name), ids(0, 20)
    for history in [first, *histories(first)]:
        assert answer(conversation, history) == decoders.naive_greedy(conversation.model, history, NEW), len(history)
        conversation.cache.check()


def test_only_new_tokens_are_computed() -> None:
    conversation, first = new(), ids(0, 40)
    made = answer(conversation, first)
    assert conversation.steps == -(-40 // CHUNK) + NEW - 1
    assert conversation.reused == 0
    assert conversation.held == [*first, *made[:-1]]  # the last one was never put through the model
    history = [*first, *made, *ids(1, 9)]
    answer(conversation, history)
    assert conversation.reused == 40 + NEW - 1
    assert conversation.steps == 1 + NEW - 1  # its ten new tokens are one chunk
    rewritten = [*history[:30], *ids(2, 20)]
    answer(conversation, rewritten)
    assert conversation.reused == 30 + (history[30] == rewritten[30])
    assert conversation.steps == 2 + NEW - 1
    answer(conversation, rewritten)
    assert conversation.reused == len(rewritten) - 1
    assert conversation.steps == NEW


def test_what_is_kept_is_really_read() -> None:
    """Other weights for the second turn: an answer that recomputed its history would be theirs."""
    conversation, first = new(), ids(0, 40)
    made = answer(conversation, first)
    other = decoders.decoder(seed=1)
    conversation.model = other
    history = [*first, *made, *ids(1, 3)]
    assert answer(conversation, history) != decoders.naive_greedy(other, history, NEW)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_answers_share_one_program(temperature: float) -> None:
    conversation, first = new(sampling=jaxkv.Sampling(temperature)), ids(0, 20)
    keys = list(jax.random.split(jax.random.key(0), 20))
    answer(conversation, first, key=keys.pop())
    with compilations() as names:
        for number, history in enumerate(histories(first)):
            answer(conversation, history, 1 + number, key=keys.pop())
            stopped = conversation.answer([*history, 1, 2], max_new_tokens=9, key=keys.pop())
            next(stopped)
            stopped.close()
    assert names == []
    with compilations() as names:  # the count can be other than none
        answer(new(max_seq_len=ROOM - 1, sampling=jaxkv.Sampling(temperature)), first, key=keys.pop())
    assert len([name for name in names if "step" in name]) == 1


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_answer_stays_in_the_cache(after: int) -> None:
    conversation, first = new(), ids(0, 20)
    tokens = conversation.answer(first, max_new_tokens=30)
    made = [next(tokens).token for _ in range(after)]
    tokens.close()
    assert conversation.held == [*first, *made[:-1]]
    history = [*first, *made, *ids(1, 4)]
    assert answer(conversation, history) == decoders.naive_greedy(conversation.model, history, NEW)
    assert conversation.reused == 20 + after - 1
    conversation.cache.check()


def test_an_exception_in_the_middle_of_a_step_loses_the_cache_and_nothing_else(monkeypatch) -> None:
    conversation, first = new(), ids(0, 20)
    answer(conversation, first)
    step = module.take_steps

    def interrupted(*arguments) -> None:
        step(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "take_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(conversation, [*first, 1])
    monkeypatch.undo()
    assert answer(conversation, [*first, 1]) == decoders.naive_greedy(conversation.model, [*first, 1], NEW)
    assert conversation.reused == 0
    conversation.cache.check()


def test_an_end_token_ends_it_and_is_yielded() -> None:
    history = ids(0, 20)
    greedy = answer(new(), history)
    end = greedy[2]
    conversation = new(eos_token_id=end)
    assert answer(conversation, history) == greedy[: greedy.index(end) + 1]
    assert conversation.finished
    assert answer(new(eos_token_id=()), history, 2) == greedy[:2]
    assert not new().finished


def test_tokens_say_where_they_stand_and_how_probable_they_are() -> None:
    conversation, history = new(), ids(0, 20)
    tokens = list(conversation.answer(history, max_new_tokens=NEW))
    assert [token.position for token in tokens] == [20, 21, 22, 23, 24]
    out = jaxkv.generate(conversation.model, [history], max_new_tokens=NEW, eos_token_id=())
    assert [token.logprob for token in tokens] == pytest.approx(out.logprobs[0, 0].tolist(), abs=1e-5)


def test_sampled_answers_are_those_of_generate() -> None:
    conversation, history, key = new(sampling=jaxkv.Sampling(1.0, top_k=20)), ids(0, 20), jax.random.key(7)
    answer(conversation, history[:11], key=jax.random.key(1))
    out = jaxkv.generate(
        conversation.model, [history], max_new_tokens=NEW, eos_token_id=(), sampling=jaxkv.Sampling(1.0, top_k=20), key=key
    )
    assert answer(conversation, history, key=key) == out.tokens[0, 0].tolist()


def test_an_answer_fills_all_the_room_there_is() -> None:
    conversation, history = new(), ids(0, ROOM - 3)
    assert len(answer(conversation, history, 3)) == 3
    assert len(list(conversation.answer(history))) == 3
    assert len(list(conversation.answer(ids(1, ROOM - 1)))) == 1


def test_a_later_answer_ends_an_earlier_one() -> None:
    conversation = new()
    earlier = conversation.answer(ids(0, 9))
    next(earlier)
    answer(conversation, ids(1, 9))
    with pytest.raises(ValueError, match="given up"):
        next(earlier)
    assert answer(conversation, ids(2, 9)) == decoders.naive_greedy(conversation.model, ids(2, 9), NEW)


def test_mistakes_are_named_before_anything_is_computed() -> None:
    conversation = new()
    held = answer(conversation, [1, 2, 3]) and list(conversation.held)
    sampled = new(sampling=jaxkv.Sampling(1.0))
    for call, message in (
        (lambda: conversation.answer(ids(0, ROOM)), f"{ROOM} tokens and leaves no room for an answer in {ROOM}"),
        (lambda: conversation.answer([1, 2], max_new_tokens=ROOM), "more than max_seq_len"),
        (lambda: conversation.answer([1, 2], max_new_tokens=0), "max_new_tokens must be an integer >= 1"),
        (lambda: conversation.answer([decoders.VOCAB]), "outside the vocabulary"),
        (lambda: conversation.answer([]), "at least one token"),
        (lambda: conversation.answer([[1, 2]]), "a flat list of ids"),
        (lambda: conversation.answer(jnp.ones((1, 2), jnp.int32)), "a flat list of ids"),
        (lambda: conversation.answer("Hello"), "one history's ids, got 'Hello'.*apply_chat_template"),
        (lambda: conversation.answer({"input_ids": [1]}), "apply_chat_template"),
        (lambda: sampled.answer([1]), "sampling needs a key"),
        (lambda: new(max_seq_len=10**6), "the model allows"),
        (lambda: new(max_seq_len=1), "max_seq_len must be an integer >= 2"),
        (lambda: new(page_size=0), "page_size"),
        (lambda: new(prefill_chunk=0), "prefill_chunk"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert conversation.held == held
    assert repr(conversation) == f"Conversation({len(held)} tokens held of up to {ROOM})"
