"""Texts, stop texts, end tokens and log-probabilities of answers."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from engine.engines import engine, greedy, model, prompts, run
from flax import nnx
from tiny import byte_tokenizer

import jaxkv
from jaxkv.engine import RequestOutputKind, SamplingParams
from jaxkv.engine.text import AnswerText, StopTexts

TOKENIZER = byte_tokenizer()


def _texts_of(tokens, stops, *, included=False, min_tokens=0):
    """Text after each token, and the whole; the token that a stop text ends with is the last."""
    text = AnswerText(TOKENIZER, StopTexts(stops, included), min_tokens=min_tokens, skip_special_tokens=True)
    certain = []
    for token in tokens:
        text.add(token)
        certain.append(text.text[: text.certain])
        if text.stop is not None:
            break
    text.finish()
    return certain, text.text, text.stop, len(certain)


@hypothesis.given(
    st.text("abé🙂", max_size=12),
    st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_texts_are_found_as_in_the_whole_text(text, stops, included, min_tokens):
    """Wherever tokens end; and what was given out before never has to be taken back."""
    tokens = TOKENIZER(text)["input_ids"]
    certain, got, stop, count = _texts_of(tokens, stops, included=included, min_tokens=min_tokens)
    for earlier, later in zip(certain, [*certain[1:], got]):
        assert later.startswith(earlier)
    want = None  # of the first token at whose end a stop text is there that it has changed
    for n in range(min_tokens + 1, len(tokens) + 1):
        before = TOKENIZER.decode(tokens[: n - 1]).rstrip("\ufffd")
        now = TOKENIZER.decode(tokens[:n])
        now = now.rstrip("\ufffd") if n < len(tokens) else now
        ends = [(now.find(s, max(len(before) - len(s) + 1, 0)), i) for i, s in enumerate(stops)]
        ends = [(place, i) for place, i in ends if place >= 0 and len(now) > len(before)]
        if ends:
            place, i = min(ends)
            want = (now[: place + len(stops[i]) * included], stops[i], n)
            break
    if want is None:
        assert (got, stop) == (text, None)
    else:
        assert (got, stop, count) == want


def test_half_a_stop_text_is_held_back():
    certain, text, stop, _ = _texts_of(TOKENIZER("one st two stop three")["input_ids"], ["stop"])
    assert stop == "stop"
    assert text == "one st two "
    assert "one s" not in certain
    assert "one st " in certain


def _text_llm(**options):
    config = dataclasses.replace(model().config, vocab_size=len(TOKENIZER))
    decoder = jaxkv.Decoder(config, rngs=nnx.Rngs(3))
    return jaxkv.LLM(
        decoder, tokenizer=TOKENIZER, max_num_seqs=4, max_num_batched_tokens=20, num_gpu_blocks_override=60, **options
    )


def test_texts_of_requests():
    llm = _text_llm()
    free = llm.generate("hello", greedy(12, ignore_eos=True), use_tqdm=False)[0]
    assert free.prompt == "hello"
    assert free.outputs[0].text == TOKENIZER.decode(free.outputs[0].token_ids, skip_special_tokens=True)
    ids = free.outputs[0].token_ids
    by_token = llm.generate("hello", greedy(12, ignore_eos=True, stop_token_ids=[ids[3]]), use_tqdm=False)[0].outputs[0]
    first = ids.index(ids[3]) + 1
    assert (by_token.token_ids, by_token.finish_reason, by_token.stop_reason) == (ids[:first], "stop", ids[3])
    assert by_token.text == TOKENIZER.decode(ids[: first - 1], skip_special_tokens=True)
    kept = llm.generate(
        "hello", greedy(12, ignore_eos=True, stop_token_ids=[ids[3]], include_stop_str_in_output=True), use_tqdm=False
    )
    assert kept[0].outputs[0].text == TOKENIZER.decode(ids[:first], skip_special_tokens=True)
    silent = llm.generate("hello", greedy(12, ignore_eos=True, detokenize=False), use_tqdm=False)[0].outputs[0]
    assert (silent.text, silent.token_ids) == ("", ids)


def test_deltas_add_up_and_cumulative_outputs_grow():
    llm, kinds = _text_llm(), RequestOutputKind
    said, grown = {0: "", 1: ""}, {0: "", 1: ""}
    tokens = {0: [], 1: []}
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 30, "n": 2, "ignore_eos": True}
    llm.engine.add_request("delta", "hello", SamplingParams(output_kind=kinds.DELTA, **sampled))
    llm.engine.add_request("all", "hello", SamplingParams(**sampled))
    llm.engine.add_request("end", "hello", SamplingParams(output_kind=kinds.FINAL_ONLY, **sampled))
    last = {}
    while llm.engine.has_unfinished():
        for out in llm.engine.step():
            last[out.request_id] = out
            for sample in out.outputs:
                if out.request_id == "delta":
                    said[sample.index] += sample.text
                    tokens[sample.index] += sample.token_ids
                if out.request_id == "all":
                    assert sample.text.startswith(grown[sample.index])
                    grown[sample.index] = sample.text
    want = {sample.index: sample.text for sample in last["end"].outputs}
    assert said == grown == want
    assert tokens == {sample.index: sample.token_ids for sample in last["end"].outputs}


def test_min_tokens_and_ends():
    llm = _text_llm()
    free = llm.generate("hello", greedy(12, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[0]
    early = llm.generate("hello", greedy(12, ignore_eos=True, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    late = llm.generate("hello", greedy(12, ignore_eos=True, stop_token_ids=[stop], min_tokens=5), use_tqdm=False)[0].outputs[0]
    assert early.token_ids == [stop]
    assert stop not in late.token_ids[:5]
    assert len(late.token_ids) >= 5
    text = llm.generate("hello", greedy(12, ignore_eos=True, stop=free.text[:1], min_tokens=3), use_tqdm=False)[0].outputs[0]
    assert len(text.token_ids) > 3


@pytest.mark.parametrize("prompt_length", [1, 2, 4, 5, 16, 17, 18, 33])
def test_log_probabilities_are_those_of_the_model(prompt_length):
    e = engine()
    prompt = prompts(1, 1, seed=prompt_length)[0] + prompts(1, 60, seed=1)[0] * 9
    prompt = prompt[:prompt_length]
    e.add_request("before", prompt, greedy(2))  # leaves its pages in the prefix cache
    run(e)
    e.add_request("a", prompt, greedy(5, logprobs=3, prompt_logprobs=2, ignore_eos=True, n=2))
    out = run(e)["a"]
    tokens = prompt + out.outputs[0].token_ids
    logits = np.asarray(model()(np.asarray([tokens])), np.float64)[0]
    all_logprobs = (
        logits - np.log(np.sum(np.exp(logits - logits.max(1, keepdims=True)), 1, keepdims=True)) - logits.max(1, keepdims=True)
    )
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == prompt_length
    given = [*out.prompt_logprobs[1:], *(out.outputs[0].logprobs or [])]
    assert len(given) == len(tokens) - 1
    for position, entry in enumerate(given):
        want, token = all_logprobs[position], tokens[position + 1]
        count = 2 if position < prompt_length - 1 else 3
        best = np.argsort(-want, kind="stable")[:count]
        assert set(entry) == {token, *best.tolist()}
        for some, about in entry.items():
            assert about.logprob == pytest.approx(want[some], abs=1e-4)
            assert about.rank == 1 + np.sum(want > want[some] + 1e-9)
    assert out.outputs[1].token_ids == out.outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be an integer from 1"),
        ({"temperature": -1.0}, "temperature must be a number from 0"),
        ({"temperature": float("nan")}, "temperature must be a number from 0"),
        ({"top_p": 0.0}, "take temperature=0"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1, got 1.5"),
        ({"top_k": -2}, "top_k must be"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, which is more than max_tokens=4"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
        ({"stop": ""}, "stop must be a text or a list of texts"),
        ({"stop": ["a", ""]}, "stop must be a text or a list of texts"),
        ({"stop": "a", "detokenize": False}, "need detokenize=True"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported yet"),
        ({"logit_bias": {1: 2.0}}, "logit_bias=.* is not supported yet"),
        ({"structured_outputs": "x"}, "structured_outputs='x' is not supported yet"),
    ],
)
def test_parameters_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_parameters_of_vllm_that_change_nothing_are_taken():
    params = SamplingParams(presence_penalty=0, repetition_penalty=1, bad_words=[], logit_bias=None, top_k=-1, seed=2**63)
    assert params.top_k == 0
    assert params.clone() == params
