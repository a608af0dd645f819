"""Configurations with a field missing, null or of a wrong kind: read as transformers does, or one line that names the field.

Once null in a rotary parameter was a KeyError, and a wrong value an error about something else.
"""

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families.tiny_models import CASES, tiny_config, tokens, torch_logits

from jaxkv.config import ModelConfig
from jaxkv.families import from_hf

WRONG = ["x", "", "7", -1, 0, 1.5, True, [], [1, 2], {}, {"a": 1}, 10**30, float("nan"), float("inf"), None]
# transformers reads these configurations, but their models do not run there either. Missing field -> what we say.
NOT_READ_HERE = {
    "num_key_value_heads": "no multiple of num_key_value_heads",  # the families' default number does not divide the heads
    "num_attention_heads": "no multiple of num_key_value_heads|rotate [01] dimensions",  # likewise; or heads 1 wide
    "use_sliding_window": "but no sliding_window",  # layer_types still name windowed layers, whose width transformers drops
}


def old_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters as transformers 4 wrote them."""
    out = copy.deepcopy(fields)
    parameters = out.pop("rope_parameters", None)
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        out["rope_theta"] = parameters.pop("rope_theta")
        if parameters.get("rope_type", "default") != "default":
            out["rope_scaling"] = {**parameters, "type": parameters.pop("rope_type")}
    return out


def spellings(case: str) -> list[dict[str, Any]]:
    fields = tiny_config(case).to_dict()
    return [fields, old_spelling(fields)] if "rope_parameters" in fields else [fields]


def broken(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path of the field, configuration), with each field of it and of the objects in it missing, null or wrong."""
    for name in sorted(fields.keys() - {"model_type"}):
        yield name, {k: v for k, v in fields.items() if k != name}
        for value in WRONG:
            yield name, fields | {name: value}
        if isinstance(fields[name], dict):
            for path, inner in broken(fields[name]):
                yield f"{name}.{path}", fields | {name: inner}


def check(path: str, fields: dict[str, Any]) -> None:
    before = copy.deepcopy(fields)
    try:
        assert isinstance(from_hf(fields), ModelConfig)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message, message
        named = any(part in message for part in path.split("."))
        assert named or "hidden size" in message.lower(), f"{path}: {message}"
    assert repr(fields) == repr(before), "what was given is as it was"


@pytest.mark.parametrize("case", CASES)
def test_a_broken_field_is_read_or_named(case: str) -> None:
    rng = random.Random(case)
    for fields in spellings(case):
        for path, changed in rng.sample(list(broken(fields)), 25):
            check(path, changed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_broken_field_is_read_or_named(case: str) -> None:
    for fields in spellings(case):
        for path, changed in broken(fields):
            check(path, changed)


def missing_one(case: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for fields in spellings(case):
        for name in sorted(fields.keys() - {"model_type", "transformers_version", "architectures", "dtype"}):
            yield name, {k: v for k, v in fields.items() if k != name}


def transformers_reads(fields: dict[str, Any]) -> bool:
    import transformers

    try:
        transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    except Exception:  # of whatever kind
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_reads_with_a_field_missing_is_read_here(case: str) -> None:
    for name, fields in missing_one(case):
        if not transformers_reads(fields):
            continue
        try:
            from_hf(fields)
        except ValueError as error:
            reason = NOT_READ_HERE.get(name)
            assert reason and re.search(reason, str(error)), (name, error)  # noqa: PT017


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_type'='linear': {'factor'}"),
        ({"rope_scaling": {"factor": 2.0}}, r"rope_scaling must say its rope_type .*, got \{'factor': 2\.0\}"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null, got 'linear'"),
        ({"rope_scaling": {"type": 7, "factor": 2.0}}, "rope_scaling has a rope_type that is no text: 7"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, "factor must be a number above 0, got '2'"),
        ({"rope_theta": "10000"}, "rope_theta must be a number above 1, got '10000'"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be an integer from 1 to 65536, got 1000"),
        ({"hidden_size": None}, "hidden_size must be an integer from 1 to 2147483647, got None"),
        ({"eos_token_id": ["</s>"]}, r"eos_token_id must be a token id or a list of them, or null, got \['</s>'\]"),
        ({"bos_token_id": True}, "bos_token_id must be a token id, or null, got True"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({"model_type": "gpt2", "num_attention_heads": 7}, "n_embd=64, which is no multiple of n_head=7"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4} | fields)


def test_null_is_transformers_default_where_it_is_no_value() -> None:
    base = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    nulls = dict.fromkeys(
        ["rope_theta", "rope_scaling", "rope_parameters", "head_dim", "num_key_value_heads", "attention_dropout"]
    )
    assert from_hf(base | nulls) == from_hf(base)
    inner = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    assert from_hf(base | inner) == from_hf(base)
    gemma = base | {"model_type": "gemma3_text"}
    assert from_hf(gemma | {"rope_local_base_freq": None}) == from_hf(gemma)


def test_null_stays_where_it_is_a_value() -> None:
    base = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "num_hidden_layers": 2}
    assert from_hf(base | {"model_type": "mistral"}).windows == (4096, 4096)
    assert from_hf(base | {"model_type": "mistral", "sliding_window": None}).windows == ()
    assert from_hf(base | {"model_type": "gemma2", "attn_logit_softcapping": None}).attn_soft_cap is None
    assert from_hf(base | {"model_type": "llama", "eos_token_id": None}).eos_token_ids == ()


LOGITS = 60


@pytest.mark.torch
@pytest.mark.parametrize("count", [4, pytest.param(LOGITS, marks=pytest.mark.slow)])
def test_logits_with_a_field_missing_are_those_of_transformers(count: int, tmp_path: Path) -> None:
    """Configurations in which something is missing that changes the model, small enough to build."""
    rng = random.Random(0)
    candidates = [(case, name, fields) for case in CASES for name, fields in missing_one(case)]
    rng.shuffle(candidates)
    checked = 0
    for case, name, fields in candidates:
        if checked == count:
            break
        checked += changes_the_model(case, name, fields) and same_logits(fields, tmp_path / f"{case}-{name}-{checked}")
    assert checked == count


def changes_the_model(case: str, name: str, fields: dict[str, Any]) -> bool:
    if not transformers_reads(fields) or name in NOT_READ_HERE:
        return False
    config = from_hf(fields)
    size = (config.vocab_size + config.max_seq_len) * config.hidden_size + config.num_layers * config.hidden_size * (
        3 * config.intermediate_size + 4 * config.hidden_size
    )
    return size < 12_000_000 and config != from_hf(tiny_config(case).to_dict())


def same_logits(fields: dict[str, Any], folder: Path) -> bool:
    import json

    import jax.numpy as jnp
    import torch
    import transformers

    from jaxkv.weights import load

    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    torch.manual_seed(0)
    try:
        oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    except AssertionError:  # a padding token beyond the vocabulary: torch has no such embedding
        return False
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5)
    oracle.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    ids = tokens(1, 12)
    np.testing.assert_allclose(load(folder)[0](jnp.asarray(ids)), torch_logits(oracle, ids), atol=5e-4, rtol=0)
    return True
