"""The examples of docs/branching.md: right, short, runnable, and printed there as they are."""

import importlib.util
import itertools
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder, naive_greedy
from tiny import save_model

import jaxkv

DOCS = Path(__file__).resolve().parent.parent / "docs"
EXAMPLES = [DOCS / "examples" / f"{name}.py" for name in ("best_of_n", "tree_search", "speculative_verify")]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_best_of_n_shares_the_prompt_and_returns_the_one_judged_best() -> None:
    module, model = example("best_of_n"), decoder()
    prompt = jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])
    seen = {}

    def judge(tokens, logprobs):
        jax.debug.callback(lambda t, p: seen.update(tokens=np.asarray(t), logprobs=np.asarray(p)), tokens, logprobs)
        return jnp.sum(tokens, axis=1).astype(jnp.float32)

    best, judged, cache = module.best_of_n(model, prompt, jax.random.key(1), n=5, new_tokens=6, judge=judge)
    jax.effects_barrier()
    assert len(np.unique(seen["tokens"], axis=0)) > 1
    np.testing.assert_array_equal(best, seen["tokens"][np.argmax(judged)])
    whole = jnp.concatenate([jnp.tile(prompt, (5, 1)), seen["tokens"]], axis=1)
    np.testing.assert_allclose(seen["logprobs"], jaxkv.score(model, whole)[:, 20:], atol=1e-4)
    cache.check()
    assert cache.stats().pages_used == 1 + 5, "one full page of the prompt for all, and one more for each"


def test_tree_search_finds_the_most_probable_sequence() -> None:
    module, model, depth = example("tree_search"), decoder(scale=4.0, vocab_size=4), 3
    prompt = jnp.array([3, 1, 2])
    every = jnp.array(list(itertools.product(range(4), repeat=depth)))
    whole = jnp.concatenate([jnp.tile(prompt, (len(every), 1)), every], axis=1)
    sums = np.asarray(jnp.sum(jaxkv.score(model, whole)[:, 3:], axis=1))
    tokens, score, made = module.tree_search(model, prompt, depth=depth, branch=4, num_nodes=85)
    np.testing.assert_array_equal(tokens, every[np.argmax(sums)])
    np.testing.assert_allclose(score, sums.max(), rtol=1e-4)
    assert 13 <= int(made) < 85, "not all of the tree was needed"


@pytest.mark.slow
def test_tree_search_says_when_nodes_ran_out() -> None:
    tokens, _, made = example("tree_search").tree_search(decoder(), jnp.array([3, 1]), depth=4, branch=2, num_nodes=5)
    np.testing.assert_array_equal(tokens, -1)
    assert int(made) == 5


@pytest.mark.parametrize("good", [pytest.param(True, marks=pytest.mark.slow), False], ids=["good draft", "bad draft"])
def test_speculation_changes_nothing_but_the_number_of_calls(good: bool) -> None:
    model, new = decoder(), 19
    draft = model if good else decoder(seed=9, num_layers=1)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]
    tokens, calls = example("speculative_verify").speculate(model, draft, jnp.array(prompts), new_tokens=new, k=3)
    assert tokens.tolist() == [naive_greedy(model, p, new) for p in prompts]
    assert int(calls) == 5 if good else 5 < int(calls) <= new


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_it_runs_is_short_and_stands_in_the_documentation(path: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert f"```python\n{text}```" in (DOCS / "branching.md").read_text()
    monkeypatch.setattr(sys, "argv", [str(path), str(save_model(tmp_path / "model"))])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_documentation_prints_nothing_else() -> None:
    assert re.findall(r"^```python\n", (DOCS / "branching.md").read_text(), re.MULTILINE) == ["```python\n"] * len(EXAMPLES)
