"""Requests that come and go: every answer is what `generate` gives for that prompt alone, and pages are conserved after every step."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from engine.engines import engine, generated, greedy, model, prompts, run
from hypothesis import stateful

from jaxkv.engine import SamplingParams


def test_answers_are_those_of_generate():
    e = engine()
    given = prompts(12, 30)
    for i, prompt in enumerate(given):
        e.add_request(str(i), prompt, greedy(12))
    done = run(e)
    for i, prompt in enumerate(given):
        tokens, logprobs = generated(prompt, 12)
        out = done[str(i)].outputs[0]
        assert out.token_ids == tokens
        assert out.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)
        assert out.finish_reason == ("stop" if tokens[-1] == 7 else "length")
        assert done[str(i)].prompt_token_ids == prompt
    assert e.scheduler.prefilled == sum(map(len, given)) - e.scheduler.cache.hits - _single_tokens(given)


def _single_tokens(given):
    """Prompts of one token decode from the beginning."""
    return sum(len(prompt) == 1 for prompt in given)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17])
def test_prompts_around_the_ends_of_pages_and_pieces(length):
    e = engine()
    prompt = prompts(1, 1, seed=length)[0] * length
    e.add_request("a", prompt, greedy(6))
    e.add_request("b", prompt, greedy(6))  # finds what the first one has computed
    done = run(e)
    assert done["a"].outputs[0].token_ids == done["b"].outputs[0].token_ids == generated(prompt, 6)[0]
    assert done["b"].num_cached_tokens == (length - 1) // 4 * 4


def test_a_small_pool_preempts_and_changes_nothing():
    e = engine(num_gpu_blocks_override=13)
    given = prompts(8, 12, seed=3)
    for i, prompt in enumerate(given):
        e.add_request(str(i), prompt, greedy(20))
    done = run(e)
    assert [done[str(i)].outputs[0].token_ids for i in range(8)] == [generated(p, 20)[0] for p in given]
    assert e.scheduler.preemptions > 0
    assert sum(out.metrics.preemptions for out in done.values()) == e.scheduler.preemptions
    assert done["0"].metrics.preemptions == 0  # the oldest


def test_deterministic_bits_do_not_depend_on_the_rest(optimized):
    e = engine(deterministic=True, num_gpu_blocks_override=16)
    given = prompts(6, 25, seed=5)
    for i, prompt in enumerate(given):
        e.add_request(str(i), prompt, greedy(10, logprobs=0))
    done = run(e)
    for i, prompt in enumerate(given):
        tokens, logprobs = generated(prompt, 10, deterministic=True)
        out = done[str(i)].outputs[0]
        assert out.token_ids == tokens
        assert [at[token].logprob for at, token in zip(out.logprobs, tokens)] == logprobs


def test_priority_goes_before_arrival():
    e = engine(max_num_seqs=1)
    for name, priority in (("first", 0), ("late", 5), ("urgent", -1)):
        e.add_request(name, [1, 2, 3], greedy(4, ignore_eos=True), priority=priority)
    done = run(e)
    assert sorted(done, key=lambda name: done[name].metrics.first_scheduled_time) == ["urgent", "first", "late"]


def test_what_can_never_fit_is_refused_with_the_numbers():
    e = engine(num_gpu_blocks_override=5)
    with pytest.raises(ValueError, match="13 tokens and 5 new ones need 5 pages of 4 tokens, and the pool has 4"):
        e.add_request("a", [1] * 13, greedy(5))
    e.add_request("b", [1] * 13, greedy(4))  # the last token is not computed
    with pytest.raises(ValueError, match="unfinished request 'b' already"):
        e.add_request("b", [1], greedy(4))
    assert len(run(e)) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "prompt is empty"),
        ([61], None, "61 in the prompt is no token of the model: ids go from 0 to 60"),
        ([-1], None, "-1 in the prompt"),
        ([True], None, "True in the prompt"),
        ([1] * 128, None, "has 128 tokens and leaves no room"),
        ("a text", None, "needs a tokenizer"),
        ([1], SamplingParams(stop="x"), "stop texts need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=[99]), r"\[99\] go beyond the vocabulary of 61"),
        ([1], {"n": 2}, "must be a jaxkv.SamplingParams"),
    ],
)
def test_requests_that_are_refused(prompt, params, message):
    e = engine()
    with pytest.raises(ValueError, match=message):
        e.add_request("a", prompt, params)
    assert not e.has_unfinished()


def test_abort_at_any_time_frees_pages_within_a_step():
    e = engine(max_num_seqs=2, num_gpu_blocks_override=20)
    given = prompts(1, 30, seed=8)[0] * 2
    for name in ("running", "shares", "waiting", "stays"):
        e.add_request(name, given[:25], greedy(20, ignore_eos=True, n=2 if name == "shares" else 1))
    e.step()  # in the middle of the first prompt
    e.abort("waiting")
    e.step()
    e.abort(["running", "unknown"])
    e.check()
    outputs = {out.request_id: out for out in e.step()}
    assert outputs["running"].outputs[0].finish_reason == "abort"
    for _ in range(8):
        e.step()
    e.abort("shares")
    e.check()
    done = run(e)
    assert done["stays"].outputs[0].finish_reason == "length"
    assert len(done["stays"].outputs[0].token_ids) == 20


def test_samples_share_their_prompt_and_differ():
    for caching in (True, False):
        e = engine(enable_prefix_caching=caching)
        e.add_request("a", list(range(1, 18)), SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True))
        done = run(e)["a"]
        texts = {tuple(out.token_ids) for out in done.outputs}
        assert [out.index for out in done.outputs] == [0, 1, 2, 3]
        assert len(texts) > 1
        assert e.scheduler.prefilled < 2 * 17 + 3


def test_seeds():
    """Equal seeds agree whatever else runs, and are `generate`'s keys; no seeds differ."""
    import jax

    import jaxkv

    e = engine()
    prompt, hot = [5, 6, 7, 8, 9], {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    e.add_request("seeded", prompt, SamplingParams(seed=11, **hot))
    e.add_request("other", prompts(1, 9)[0], greedy(9))
    e.add_request("free", prompt, SamplingParams(**hot))
    e.add_request("also free", prompt, SamplingParams(**hot))
    e.add_request("again", prompt, SamplingParams(seed=11 - 2**32, **hot))
    done = {name: out.outputs[0].token_ids for name, out in run(e).items()}
    key = jax.random.key(11)[None]
    want = jaxkv.generate(
        model(), [prompt], max_new_tokens=12, sampling=jaxkv.Sampling(temperature=1.5), key=key, eos_token_id=()
    )
    assert done["seeded"] == done["again"] == np.asarray(want.tokens)[0, 0].tolist()
    assert len({tuple(done[name]) for name in ("seeded", "free", "also free")}) == 3


def _mixed_workload(rng, caching, chunk, pages, count, longest):
    """Requests with random prompts, limits, priorities, samples; some are aborted; they arrive while others run."""
    e = engine(max_num_batched_tokens=4 + chunk, num_gpu_blocks_override=pages, enable_prefix_caching=caching)
    shared = prompts(3, longest, seed=99)
    todo, aborted, done = {}, set(), {}
    for i in range(count):
        prompt = (shared[i % 3][: rng.integers(0, longest)] if rng.random() < 0.5 else []) + prompts(1, longest // 2, seed=i)[0]
        todo[str(i)] = (prompt[:longest], int(rng.integers(1, 30)), int(rng.integers(-1, 2)), int(rng.choice([1, 1, 2])))
    waiting = list(todo.items())
    while waiting or e.has_unfinished():
        while waiting and rng.random() < 0.4:
            name, (prompt, limit, priority, n) = waiting.pop(0)
            e.add_request(name, prompt, greedy(limit, n=n), priority=priority)
        if rng.random() < 0.03 and e._requests:
            name = str(rng.choice(sorted(e._requests)))
            aborted.add(name)
            e.abort(name)
            e.check()
        for out in e.step():
            done[out.request_id] = out
        e.check()
    for name, (prompt, limit, _, n) in todo.items():
        tokens = generated(prompt, limit)[0]
        for out in done[name].outputs:
            assert out.token_ids == (tokens[: len(out.token_ids)] if name in aborted else tokens), name
        assert len(done[name].outputs) == n
    return e


def test_mixed_workload():
    e = _mixed_workload(np.random.default_rng(1), True, 16, 26, 24, 24)
    assert e.scheduler.preemptions > 0
    assert e.scheduler.cache.hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_long_mixed_workload(caching, chunk):
    _mixed_workload(np.random.default_rng(chunk), caching, chunk, 60, 200, 90)


class EngineMachine(stateful.RuleBasedStateMachine):
    """Whatever is done in whatever order: the engine's own check holds after it, and answers are `generate`'s."""

    def __init__(self):
        super().__init__()
        self.engine, self.number, self.asked = engine(num_gpu_blocks_override=14), 0, {}

    @stateful.rule(
        length=st.integers(1, 14),
        shared=st.booleans(),
        limit=st.integers(1, 12),
        n=st.integers(1, 2),
        priority=st.integers(0, 1),
    )
    def add(self, length, shared, limit, n, priority):
        prompt = [3 if shared else self.number % 61] * length
        name = str(self.number)
        self.number += 1
        self.engine.add_request(name, prompt, greedy(limit, n=n), priority=priority)
        self.asked[name] = (prompt, limit)

    @stateful.rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self._look(self.engine.step())
            self.engine.check()

    @stateful.rule(pick=st.integers(0, 100))
    def abort(self, pick):
        if self.asked:
            name = sorted(self.asked)[pick % len(self.asked)]
            self.engine.abort(name)

    @stateful.rule(restart=st.booleans())
    def same_weights_again(self, restart):
        self.engine.replace_weights(self.engine.runner.leaves, restart=restart)

    @stateful.rule()
    def sleep_and_wake_up(self):
        self.engine.sleep()
        self.engine.wake_up()

    @stateful.rule()
    def recover(self):
        self.engine.recover()

    @stateful.invariant()
    def holds(self):
        self.engine.check()

    def _look(self, outputs):
        for out in outputs:
            if out.finished:
                prompt, limit = self.asked.pop(out.request_id)
                for sample in out.outputs:
                    want = generated(prompt, limit)[0]
                    assert sample.token_ids == (want[: len(sample.token_ids)] if sample.finish_reason == "abort" else want)

    def teardown(self):
        for _ in range(2_000):
            if not self.engine.has_unfinished():
                break
            self._look(self.engine.step())
        assert not self.engine.has_unfinished()
        assert not self.asked
        self.engine.check()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis.settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.slow
def test_ten_thousand_steps_of_the_machine():
    settings = hypothesis.settings(max_examples=100, stateful_step_count=100, deadline=None)
    stateful.run_state_machine_as_test(EngineMachine, settings=settings)
