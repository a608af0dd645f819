"""Steps that fail, weights that change, memory that is given back: nothing hangs, nobody else is harmed."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
from compilations import compilations
from decoders import decoder
from engine.engines import engine, generated, greedy, llm, model, prompts, run

import jaxkv
from jaxkv.engine.runner import Runner

GIVEN = prompts(6, 20, seed=21)


def _add_all(e, limit=8):
    for i, prompt in enumerate(GIVEN):
        e.add_request(str(i), prompt, greedy(limit))


@pytest.mark.parametrize("where", ["dispatch", "read"])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("nth", [0, 3])
def test_a_step_that_fails_ends_its_requests_and_no_others(monkeypatch, where, lost, nth):
    e, calls, original = engine(), [], getattr(Runner, where)
    in_step = set()

    def fails(self, given):
        calls.append(given)
        if len(calls) == nth + 1:
            batch = given if where == "dispatch" else given.batch
            in_step.update(s.request.request_id for s in batch.sequences)
            if where == "read" and e._dispatched is not None:  # the step behind it cannot be right, either
                in_step.update(s.request.request_id for s in e._dispatched.batch.sequences)
            if lost:
                for x in jax.tree.leaves(self._pages):
                    x.delete()
            raise MemoryError("no room on the device")
        return original(self, given)

    monkeypatch.setattr(Runner, where, fails)
    _add_all(e)
    done = run(e)
    for i, prompt in enumerate(GIVEN):
        out = done[str(i)]
        if str(i) in in_step:
            assert out.outputs[0].finish_reason == "error"
            assert isinstance(out.error, MemoryError)
        else:
            assert out.outputs[0].token_ids == generated(prompt, 8)[0]
    assert in_step
    e.add_request("after", GIVEN[0], greedy(8))
    assert run(e)["after"].outputs[0].token_ids == generated(GIVEN[0], 8)[0]


def test_a_program_that_cannot_be_compiled_says_why_and_is_tried_again():
    e, tried = engine(), []
    original = e.runner.programs._compile

    def fails(shape):
        tried.append(shape)
        if len(tried) == 1:
            raise RuntimeError("the compiler is ill")
        return original(shape)

    e.runner.programs._compile = fails
    e.add_request("a", GIVEN[0], greedy(4))
    assert "the compiler is ill" in str(run(e)["a"].error)
    e.add_request("b", GIVEN[0], greedy(4))
    assert run(e)["b"].outputs[0].token_ids == generated(GIVEN[0], 4)[0]


def test_ctrl_c_leaves_an_engine_that_works(monkeypatch):
    made, calls, original = llm(), [], Runner.dispatch

    def interrupted(self, batch):
        calls.append(batch)
        out = original(self, batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(Runner, "dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate(GIVEN, greedy(8), use_tqdm=False)
    made.engine.check()
    assert not made.engine.has_unfinished()
    assert made.engine.scheduler.cache.pool.held == 0
    outs = made.generate(GIVEN, greedy(8), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == [generated(p, 8)[0] for p in GIVEN]


def test_an_error_of_a_request_is_raised_and_leaves_an_engine_that_works(monkeypatch):
    made = llm()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "dispatch", lambda self, batch: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(RuntimeError, match="failed: no room"):
            made.generate(GIVEN[:2], greedy(4), use_tqdm=False)
    assert made.generate(GIVEN[0], greedy(8), use_tqdm=False)[0].outputs[0].token_ids == generated(GIVEN[0], 8)[0]
    with pytest.raises(ValueError, match="no token of the model"):
        made.generate([GIVEN[0], [999]], greedy(4), use_tqdm=False)
    assert not made.engine.has_unfinished()


@pytest.mark.parametrize("running", ["continue", "restart"])
def test_weights_change_between_steps(running):
    other, made = decoder(seed=5), llm()
    want = lambda prompt, n: jaxkv.generate(other, [prompt], max_new_tokens=n).tokens[0, 0].tolist()
    e, prompt = made.engine, GIVEN[0]
    e.add_request("running", prompt, greedy(12, ignore_eos=True))
    for _ in range(6):
        e.step()
    e.add_request("waiting", GIVEN[1], greedy(6, ignore_eos=True))
    made.update_params(other, running=running)
    done = run(e)
    assert done["waiting"].outputs[0].token_ids[:1] == want(GIVEN[1], 6)[:1]
    assert done["waiting"].weights_versions == (1,)
    out, old = done["running"], jaxkv.generate(model(), [prompt], max_new_tokens=12, eos_token_id=()).tokens[0, 0].tolist()
    if running == "restart":
        assert (out.weights_versions, out.restarts) == ((1,), 1)
        fresh = jaxkv.generate(other, [prompt], max_new_tokens=12, eos_token_id=()).tokens[0, 0].tolist()
        assert out.outputs[0].token_ids == fresh
    else:
        assert (out.weights_versions, out.restarts) == ((0, 1), 0)
        assert out.outputs[0].token_ids[:4] == old[:4]
        assert out.outputs[0].token_ids != old
    assert made.engine.runner.leaves[0] is jax.tree.leaves(other)[0]  # no copy
    e.add_request("same prompt", prompt, greedy(4))
    assert run(e)["same prompt"].num_cached_tokens <= (12 if running == "restart" else 0)


def test_weights_that_do_not_fit_are_refused():
    made = llm()
    for wrong in (jax.tree.map(lambda x: x.astype(jnp.bfloat16), model()), jax.tree.leaves(model())[1:], "weights"):
        with pytest.raises(ValueError, match="params must be those of the model"):
            made.update_params(wrong)
    with pytest.raises(ValueError, match='running must be "continue" or "restart", got'):
        made.update_params(model(), running="stop")
    assert made.engine.weights_version == 0


def test_sleep_gives_pages_back_and_answers_go_on():
    made = llm()
    e = made.engine
    _add_all(e)
    for _ in range(5):
        e.step()
    pages = e.runner._pages
    assert pages is not None
    made.sleep()
    assert all(x.is_deleted() for x in jax.tree.leaves(pages))
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        e.step()
    made.wake_up(tags=["weights"])
    assert e.asleep
    made.wake_up()
    done = run(e)
    assert [done[str(i)].outputs[0].token_ids for i in range(6)] == [generated(p, 8)[0] for p in GIVEN]
    with pytest.raises(ValueError, match="level must be 1"):
        made.sleep(level=2)


def test_del_gives_everything_back():
    made = llm()
    made.generate(GIVEN[:2], greedy(3), use_tqdm=False)
    pages = [weakref.ref(x) for x in jax.tree.leaves(made.engine.runner._pages)]
    del made
    gc.collect()
    assert not any(page() for page in pages)


def test_no_compilation_after_warm_up():
    made = llm()
    made.warm_up()
    made.generate(GIVEN, greedy(4), use_tqdm=False)
    with compilations() as found:
        made.generate(prompts(9, 40, seed=77), greedy(9), use_tqdm=False)
        made.generate(GIVEN[:1], jaxkv.SamplingParams(temperature=0.5, top_p=0.9, seed=1), use_tqdm=False)
    assert not found


def test_a_larger_program_stands_in_for_one_that_is_not_compiled():
    made = llm()
    programs, original, running = made.engine.runner.programs, made.engine.runner.programs._compile, []
    hold = threading.Event()

    def slow(shape):
        running.append(shape)
        if len(running) > 1:  # all but the first, in the thread
            assert hold.wait(60)
        return original(shape)

    programs._compile = slow
    chunk = made.engine.runner.shapes(sampled=False)[0]
    outs = made.generate(GIVEN, greedy(8), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == [generated(p, 8)[0] for p in GIVEN]
    assert (running[0], programs.compilations) == (chunk, 1)
    hold.set()
    programs.wait()
    assert programs.compilations == len(running) > 1
