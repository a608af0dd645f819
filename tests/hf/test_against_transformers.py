"""The transformers-shaped interface, against transformers itself."""

import numpy as np
import pytest
from families.tiny_models import save_tiny

import jaxkv

pytestmark = pytest.mark.torch

LEFT = np.array([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11], [0, 12, 13, 14, 15]])
MASK = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
NAMES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "gemma2"))]


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """(ours, transformers') with the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_tiny(request.param, folder)
    return jaxkv.AutoModelForCausalLM.from_pretrained(str(folder)), oracle


def torch_of(array):
    import torch

    return torch.tensor(array)


def theirs(oracle, ids, mask, **options):
    out = oracle.generate(
        torch_of(ids),
        attention_mask=torch_of(mask),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=options.pop("eos", None),
        **options,
    )
    return out.numpy()


def test_greedy_with_left_padding_is_transformers(pair):
    ours, oracle = pair
    inputs = {"input_ids": LEFT, "attention_mask": MASK}
    got = ours.generate(**inputs, max_length=30, do_sample=False, use_cache=True, eos_token_id=[], pad_token_id=0)
    np.testing.assert_array_equal(got, theirs(oracle, LEFT, MASK, max_length=30))


def test_without_cache_the_tokens_are_the_same(pair):
    ours, _ = pair
    options = {"attention_mask": MASK, "max_new_tokens": 12}
    np.testing.assert_array_equal(ours.generate(LEFT, **options), ours.generate(LEFT, **options, use_cache=False))


def test_torch_tensors_and_lists_are_taken(pair):
    ours, _ = pair
    expected = ours.generate(LEFT[1:2], max_new_tokens=3)
    np.testing.assert_array_equal(ours.generate(torch_of(LEFT[1:2]), max_new_tokens=3), expected)
    np.testing.assert_array_equal(ours.generate(LEFT[1:2].tolist(), max_new_tokens=3), expected)


def test_beams_are_transformers(pair):
    ours, oracle = pair
    got = ours.generate(LEFT, MASK, max_new_tokens=8, num_beams=3, num_return_sequences=2, eos_token_id=[], pad_token_id=0)
    np.testing.assert_array_equal(got, theirs(oracle, LEFT, MASK, max_new_tokens=8, num_beams=3, num_return_sequences=2))


def test_sampling_gives_every_return_sequence_its_own_randomness(pair):
    ours, _ = pair
    got = ours.generate(LEFT, MASK, max_new_tokens=8, do_sample=True, num_return_sequences=4, seed=3, eos_token_id=[])
    assert got.shape == (12, 13)
    assert len({tuple(row) for row in got[:4]}) > 1
    again = ours.generate(LEFT, MASK, max_new_tokens=8, do_sample=True, num_return_sequences=4, seed=3, eos_token_id=[])
    np.testing.assert_array_equal(got, again)


def test_past_key_values_go_into_the_next_call(pair):
    ours, oracle = pair
    import torch

    rng = np.random.default_rng(0)
    ids = rng.integers(3, 97, (2, 40))
    with torch.no_grad():
        expected = oracle(torch_of(ids)).logits.numpy()
    past, parts = None, []
    for start, stop in ((0, 7), (7, 8), (8, 30), (30, 40)):  # outgrows the first cache
        out = ours(ids[:, start:stop], past_key_values=past, use_cache=True)
        past = out.past_key_values
        past.check()
        parts.append(np.asarray(out.logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=2e-4)
    plain = ours(ids, use_cache=False)
    assert plain.past_key_values is None
    np.testing.assert_allclose(plain.logits, expected, atol=2e-4)


def test_a_mask_moves_logits_back_to_their_places(pair):
    ours, oracle = pair
    import torch

    with torch.no_grad():
        alone = oracle(torch_of(LEFT[:1, 3:])).logits.numpy()
    logits = np.asarray(ours(LEFT, MASK).logits)
    np.testing.assert_allclose(logits[0, 3:], alone[0], atol=2e-4)
    assert (logits[0, :3] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 5}, "max_length is 5, but the prompts have 5 tokens"),
        ({"attention_mask": MASK[:, :4]}, r"attention_mask has shape \[3, 4\]"),
        ({"attention_mask": np.array([[1, 0, 1, 1, 1]] * 3)}, "one side only"),
        ({"attention_mask": np.zeros((3, 5), int)}, "all padding"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"input_ids": [[]]}, "at least 1"),
        ({"num_beams": 2, "do_sample": True}, "num_beams > 1"),
    ],
)
def test_impossible_requests_are_named(pair, change, message):
    ours, _ = pair
    with pytest.raises(ValueError, match=message):
        ours.generate(**({"input_ids": LEFT} | change))


def test_unknown_arguments_are_refused(pair):
    ours, _ = pair
    with pytest.raises(TypeError, match="renormalize_logits"):
        ours.generate(LEFT, renormalize_logits=True)
