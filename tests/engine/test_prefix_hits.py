"""What the prefix cache saves, counted in tokens that were computed, and whom it does not serve."""

import pytest
from engine.engines import engine, generated, greedy, prompts, run

PREFIX = prompts(1, 1, seed=4)[0] * 3 + list(range(13))  # four pages of 4


def _second(e, prompt, **more):
    """Tokens computed for a prompt that comes after `PREFIX` has been answered."""
    e.add_request("first", PREFIX, greedy(2, ignore_eos=True))
    run(e)
    before = e.scheduler.prefilled
    e.add_request("second", prompt, greedy(4), **more)
    out = run(e)["second"]
    assert out.outputs[0].token_ids == generated(prompt, 4)[0]
    return e.scheduler.prefilled - before, out.num_cached_tokens


@pytest.mark.parametrize(("kept", "more", "cached"), [(16, 5, 16), (15, 5, 12), (17, 5, 16), (3, 5, 0), (4, 5, 4), (0, 5, 0)])
def test_whole_pages_are_found(kept, more, cached):
    prompt = (PREFIX + [9])[:kept] + [60] * more
    assert _second(engine(), prompt) == (len(prompt) - cached, cached)


def test_a_full_hit_computes_the_last_page_again_for_its_logits():
    assert _second(engine(), list(PREFIX)) == (4, 12)


def test_answers_are_prefixes_too():
    e = engine()
    e.add_request("first", PREFIX, greedy(9, ignore_eos=True))
    answer = run(e)["first"].outputs[0].token_ids
    before = e.scheduler.prefilled
    e.add_request("second", [*PREFIX, *answer, 1, 2], greedy(3))
    out = run(e)["second"]
    assert out.num_cached_tokens == 24
    assert e.scheduler.prefilled - before == 3
    assert out.outputs[0].token_ids == generated([*PREFIX, *answer, 1, 2], 3)[0]


def test_nobody_else_is_served():
    assert _second(engine(enable_prefix_caching=False), list(PREFIX)) == (16, 0)
    assert _second(engine(), list(PREFIX), cache_salt="other") == (16, 0)
    e = engine()
    e.add_request("salted", PREFIX, greedy(2), cache_salt="other")
    run(e)
    assert _second(e, list(PREFIX), cache_salt="other") == (4, 12)


def test_other_weights_find_nothing():
    e = engine()
    e.add_request("first", PREFIX, greedy(2))
    run(e)
    e.replace_weights(e.runner.leaves, restart=False)
    before = e.scheduler.prefilled
    e.add_request("second", PREFIX, greedy(2))
    assert run(e)["second"].num_cached_tokens == 0
    assert e.scheduler.prefilled - before == 16


def test_evicted_pages_come_back():
    e = engine(num_gpu_blocks_override=12)
    assert _second(e, [*PREFIX, 1])[1] == 16
    for i, other in enumerate(prompts(6, 30, seed=50)):
        e.add_request(f"other {i}", [60, *other], greedy(2))
    run(e)
    e.add_request("again", [*PREFIX, 1], greedy(4))
    out = run(e)["again"]
    assert out.num_cached_tokens < 16
    assert out.outputs[0].token_ids == generated([*PREFIX, 1], 4)[0]
    e.add_request("and again", [*PREFIX, 1], greedy(4))
    assert run(e)["and again"].num_cached_tokens == 16


def test_equal_prompts_that_come_together_are_computed_once():
    e = engine()
    for i in range(8):
        e.add_request(str(i), [*PREFIX, i, i], greedy(3))
    done = run(e)
    assert e.scheduler.prefilled == 18 + 7 * 2
    assert [done[str(i)].outputs[0].token_ids for i in range(8)] == [generated([*PREFIX, i, i], 3)[0] for i in range(8)]


def test_whoever_waits_for_a_prefix_goes_on_when_it_does_not_come():
    e = engine()
    e.add_request("computes", PREFIX * 3, greedy(3))
    e.add_request("waits", [*PREFIX * 3, 1], greedy(3))
    e.step()
    assert len(e.scheduler.running) == 1
    e.abort("computes")
    assert run(e)["waits"].outputs[0].token_ids == generated([*PREFIX * 3, 1], 3)[0]
