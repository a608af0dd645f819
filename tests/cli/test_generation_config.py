"""`jaxkv generate` does what the model's `generation_config.json` says where nothing is typed; and several samples of a prompt."""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import byte_tokenizer, save_model

import jaxkv
from jaxkv.cli.main import main
from jaxkv.cli.prompts import new_token_budget
from jaxkv.cli.sampling import chosen_samples, chosen_sampling
from jaxkv.weights import GenerationDefaults


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.cli.generate.keep_programs", lambda: None)


def typed(**given) -> argparse.Namespace:
    return argparse.Namespace(
        **{"temperature": None, "top_k": None, "top_p": None, "min_p": None, "num_samples": None, **given}
    )


def test_what_was_typed_counts_before_the_file_and_the_file_before_the_default() -> None:
    said = GenerationDefaults(do_sample=True, temperature=0.7, top_k=20, num_return_sequences=3)
    assert chosen_sampling(typed(), GenerationDefaults()) == jaxkv.Sampling()
    assert chosen_sampling(typed(), said) == jaxkv.Sampling(0.7, 20)
    assert chosen_sampling(typed(temperature=0.0), said).always_greedy
    assert chosen_sampling(typed(temperature=0.3, top_k=0), said) == jaxkv.Sampling(0.3, 0)
    assert chosen_sampling(typed(), GenerationDefaults(do_sample=False, temperature=0.7)) == jaxkv.Sampling()
    assert chosen_sampling(typed(), GenerationDefaults(do_sample=True)) == jaxkv.Sampling(1.0)
    assert chosen_samples(typed(), said, jaxkv.Sampling(0.7)) == 3
    assert chosen_samples(typed(), said, jaxkv.Sampling()) == 1
    assert chosen_samples(typed(num_samples=2), said, jaxkv.Sampling(0.7)) == 2


def test_how_many_new_tokens() -> None:
    assert new_token_budget([5, 9], None, 1000, GenerationDefaults()) == 256
    assert new_token_budget([5, 9], None, 100, GenerationDefaults()) == 91
    assert new_token_budget([5, 9], None, 100, GenerationDefaults(max_new_tokens=7, max_length=50)) == 7
    assert new_token_budget([5, 9], None, 100, GenerationDefaults(max_length=50)) == 41
    assert new_token_budget([5, 9], 3, 100, GenerationDefaults(max_length=5)) == 3
    with pytest.raises(
        ValueError, match=r"prompt 2 has 9 tokens, and max_length of .*generation_config.json is 5: give --max-new"
    ):
        new_token_budget([5, 9], None, 100, GenerationDefaults(max_length=5))


def test_the_command_follows_the_file_and_names_what_it_lacks(capsys, tmp_path: Path) -> None:
    save_model(tmp_path)
    said = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2, "max_new_tokens": 6, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"num_beams": 4}))
    assert main(["generate", "Hello", "a", "--model", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)["results"]
    assert [(r["prompt"], r["sample"]) for r in results] == [("Hello", 0), ("Hello", 1), ("a", 0), ("a", 1)]
    assert results[0]["token_ids"] != results[1]["token_ids"]
    tokenizer = byte_tokenizer()
    assert all(r["text"] == tokenizer.decode(r["token_ids"], skip_special_tokens=True) for r in results)
    note, _ = captured.err.splitlines()
    assert note.startswith("jaxkv generate: generation_config.json asks for repetition_penalty=1.1, num_beams=4, which is not")


def test_several_samples_stand_below_their_titles(capsys, tmp_path: Path) -> None:
    save_model(tmp_path)
    options = ["--model", str(tmp_path), "--num-samples", "2", "--max-new-tokens", "6"]
    assert main(["generate", "Hello", "a", *options, "--temperature", "2"]) == 0
    out = capsys.readouterr().out
    assert [x for x in out.splitlines() if x.startswith("[")] == ["[1/4] Hello", "[2/4] Hello", "[3/4] a", "[4/4] a"]
    assert main(["generate", "Hello", *options]) == 2
    assert "--num-samples 2 greedy answers would all be the same: give a --temperature" in capsys.readouterr().err


def test_an_overflow_is_said_once_with_the_way_out(capsys, tmp_path: Path) -> None:
    save_model(tmp_path)
    model, tokenizer = jaxkv.load(tmp_path)
    jaxkv.save(jax.tree.map(lambda x: (x * 4000).astype(jnp.float16), model), tmp_path, tokenizer=tokenizer)
    assert main(["generate", "Hello", "--model", str(tmp_path), "--max-new-tokens", "3", "--json"]) == 0
    captured = capsys.readouterr()
    note, _ = captured.err.splitlines()
    assert 'overflow in float16: load the model with dtype="bfloat16" or "float32"' in note
    report = json.loads(captured.out, parse_constant=pytest.fail)  # NaN is no JSON
    assert report["stats"]["nonfinite"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing"], "'sing': there is no such command. The commands are generate, chat, bench, inspect"),
        (["serve"], "'serve': there is no server yet. The commands are"),
        ([], "a command is missing: generate, chat, bench, inspect"),
    ],
)
def test_an_unknown_command_says_what_exists(capsys, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
