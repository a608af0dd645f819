"""`generation_config.json`: what the makers of a model say applies where the caller says nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import save_model

import jaxkv
from jaxkv.weights import GenerationDefaults, GenerationWarning

PROMPT = [[72, 101, 108]]


def with_file(folder: Path, **fields) -> Path:
    save_model(folder)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def loaded(folder: Path, **fields) -> jaxkv.CausalLM:
    return jaxkv.AutoModelForCausalLM.from_pretrained(with_file(folder, **fields))


def test_it_applies_where_the_caller_says_nothing(tmp_path: Path) -> None:
    model = loaded(tmp_path, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=6, transformers_version="4.2")
    said = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": 6}
    bare = jaxkv.CausalLM(model.decoder)
    np.testing.assert_array_equal(model.generate(PROMPT, seed=3), bare.generate(PROMPT, seed=3, **said))
    greedy = model.generate(PROMPT, do_sample=False, max_length=5)
    np.testing.assert_array_equal(greedy, bare.generate(PROMPT, max_new_tokens=2))
    assert model.generation_config.temperature == 0.7
    assert "generation_config: do_sample=True, temperature=0.7" in repr(model)


def test_a_length_of_the_file_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"max_length \(of generation_config.json\) is 3, but the prompts have 3 tokens already"
    ):
        loaded(tmp_path, max_length=3).generate(PROMPT)


def test_more_new_tokens_than_there_is_room_for_are_cut_if_only_the_file_wants_them(tmp_path: Path) -> None:
    model = loaded(tmp_path, max_new_tokens=4096)
    assert model.generate(PROMPT, eos_token_id=[]).shape == (1, 128)


def test_what_has_no_counterpart_is_named_once_and_written_back(tmp_path: Path) -> None:
    folder = with_file(tmp_path / "a", repetition_penalty=1.1, no_repeat_ngram_size=0, do_sample=True, eos_token_id=5)
    with pytest.warns(GenerationWarning, match=r"generation_config.json asks for repetition_penalty=1.1, which") as said:
        model = jaxkv.AutoModelForCausalLM.from_pretrained(folder)
    assert len(said) == 1
    model.generate(PROMPT, max_new_tokens=2)  # says nothing more
    model.save_pretrained(tmp_path / "b")
    written = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert written == {"eos_token_id": 5, "do_sample": True, "repetition_penalty": 1.1}


def test_save_pretrained_takes_a_tokenizer(tmp_path: Path) -> None:
    model = loaded(tmp_path / "a")
    _, tokenizer = jaxkv.load(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", tokenizer=tokenizer)
    assert jaxkv.load(tmp_path / "b")[1] is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number >= 0, got 'hot'"),
        ({"top_p": 1.5}, "top_p must be a number > 0 and <= 1, got 1.5"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"do_sample": 1}, "do_sample must be true or false, got 1"),
        ({"early_stopping": "soon"}, "early_stopping must be true, false or"),
    ],
)
def test_a_broken_field_is_named_with_its_file(tmp_path: Path, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
        loaded(tmp_path, **fields)
    jaxkv.load(tmp_path)  # does not read it


def test_null_false_and_neutral_values_ask_for_nothing() -> None:
    quiet = {"repetition_penalty": 1.0, "stop_strings": None, "token_healing": False, "bad_words_ids": [], "min_length": 0}
    assert GenerationDefaults.of(quiet | {"output_scores": True, "top_k": None}) == GenerationDefaults()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("fields", [{"max_length": 9}, {"max_new_tokens": 4}, {}])
def test_the_lengths_are_transformers(tmp_path: Path, fields: dict) -> None:
    import torch
    import transformers

    ours = loaded(tmp_path, pad_token_id=0, **fields)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = ours.generate(PROMPT)
    np.testing.assert_array_equal(got, theirs.generate(torch.tensor(PROMPT)).numpy())
