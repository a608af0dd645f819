"""What people pass to `CausalLM`: numbers of every library, zeros, padding ids that are none, and what transformers alone has."""

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.hf.refused import CALL, FROM_PRETRAINED, GENERATE

HAS_TORCH = pytest.mark.torch


@pytest.fixture(scope="module")
def model() -> jaxkv.CausalLM:
    return jaxkv.CausalLM(decoders.decoder(eos_token_ids=(7, 8)))


LIBRARIES = [np.array, jnp.array, pytest.param("torch", marks=HAS_TORCH)]


@pytest.mark.parametrize("array", LIBRARIES)
def test_numbers_of_every_library_are_numbers(model, array) -> None:
    """Regression: an array of end tokens failed on its truth value."""
    if array == "torch":
        import torch

        array = torch.tensor
    options = {"max_new_tokens": 3, "num_return_sequences": 2, "top_k": 5, "seed": 1, "pad_token_id": 0, "temperature": 0.5}
    expected = model.generate([[3, 4]], do_sample=True, eos_token_id=[1, 2], **options)
    of_library = {name: array(value) for name, value in options.items()}
    got = model.generate(array([[3, 4]]), do_sample=array(True), eos_token_id=array([1, 2]), **of_library)
    np.testing.assert_array_equal(np.where(got < 0, 0, got)[:, :4], expected[:, :4])
    assert got.shape == expected.shape


WRONG = {
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
    "no results": ({"num_return_sequences": 0}, "num_return_sequences must be an integer >= 1, got 0"),
    "no beams": ({"num_beams": 0}, "num_beams must be an integer >= 1, got 0"),
    "no length": ({"max_length": 0}, "max_length must be an integer >= 1, got 0"),
    "a length of words": ({"max_length": "9"}, "max_length must be an integer >= 1, got '9'"),
    "too long": ({"max_length": 500}, "max_length is 500, but a prompt of 2 tokens and 498 new ones are more than the model"),
    "too many": ({"max_new_tokens": np.int64(500)}, "max_new_tokens is 500, but a prompt of 2 tokens and 500 new ones"),
    "greedy sampling": ({"do_sample": True, "temperature": 0}, r"temperature must be > 0 .* do_sample=False is greedy"),
    "top-p beyond": ({"do_sample": True, "top_p": 2}, r"top_p must be in \(0, 1\]"),
    "top-k in part": ({"do_sample": True, "top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
    "neither": ({"do_sample": "yes"}, "do_sample must be True or False, got 'yes'"),
    "a padding id of -1": ({"pad_token_id": -1}, "pad_token_id must be an integer >= 0, got -1"),
    "end of words": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
    "end of parts": ({"eos_token_id": [1.5]}, "eos_token_id must be a token id or a list of them"),
    "more results than beams": (
        {"num_beams": 2, "num_return_sequences": 3},
        "num_return_sequences=3 are more than num_beams=2",
    ),
    "one list": ({"input_ids": [3, 4]}, r"one list of 2 ids: write \[ids\]"),
    "text": ({"input_ids": "Hi"}, "input_ids is text"),
    "texts": ({"input_ids": ["Hi"]}, "input_ids is text"),
    "ragged": ({"input_ids": [[3, 4], [5]]}, r"rows of different lengths: pad them, with tokenizer\(texts, padding=True\)"),
    "all of the tokenizer's": ({"input_ids": {"input_ids": [[3]]}}, r"model.generate\(\*\*inputs\)"),
    "ids beyond 32 bits": ({"input_ids": np.array([[3, 2**32 + 4]])}, "input_ids holds 4294967300, which is outside"),
    "holes": ({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 0, 1]]}, "take the masked tokens out of input_ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument_that_was_given(model, name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as raised:
        model.generate(**({"input_ids": [[3, 4]]} | change))
    assert "\n" not in str(raised.value)


def test_a_padding_id_of_minus_one_never_appears() -> None:
    """Regression: old Llama configurations name -1, which no tokenizer decodes."""
    plain = decoders.decoder()
    text = jaxkv.generate(plain, [[3, 4], [5, 6]], max_new_tokens=4).tokens[:, 0]
    end = int(text[0, 0])  # the first ends at once
    model = jaxkv.CausalLM(decoders.decoder(pad_token_id=-1, eos_token_ids=(9,)))
    got = model.generate([[3, 4], [5, 6]], max_new_tokens=4, eos_token_id=end)
    assert got[0].tolist() == [3, 4, end, *[end] * (got.shape[1] - 3)]
    assert (got >= 0).all()


def test_without_a_limit_there_are_20_new_tokens_as_in_transformers(model) -> None:
    assert model.generate([[3, 4]], eos_token_id=[]).shape == (1, 22)


ASKING = {
    "use_safetensors": False,
    "num_beam_groups": 2,
    "repetition_penalty": 1.2,
    "attention_mask": None,
    "token_type_ids": [[0, 1]],
}


@pytest.mark.parametrize("name", GENERATE)
def test_what_transformers_alone_has_is_refused_by_name_with_what_to_use_instead(model, name: str) -> None:
    for call in (model.generate, model) if name in CALL else (model.generate,):
        with pytest.raises(ValueError, match=f"{name} is not supported: ") as raised:
            call([[3, 4]], **{name: ASKING.get(name, [5])})
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FROM_PRETRAINED)
def test_from_pretrained_refuses_by_name(name: str) -> None:
    if name in ("use_safetensors", "low_cpu_mem_usage"):
        return
    with pytest.raises(ValueError, match=f"{name} is not supported: "):
        jaxkv.AutoModelForCausalLM.from_pretrained("/nowhere", **{name: "auto"})


def test_what_asks_for_nothing_is_let_through(model) -> None:
    nothing = {"streamer": None, "output_scores": False, "repetition_penalty": 1.0, "token_type_ids": np.zeros((1, 2), int)}
    expected = model.generate([[3, 4]], max_new_tokens=3, eos_token_id=())
    got = model.generate([[3, 4]], max_new_tokens=3, eos_token_id=np.array([]), stop_strings=[], num_beam_groups=1, **nothing)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(FileNotFoundError):
        jaxkv.AutoModelForCausalLM.from_pretrained("/nowhere", use_safetensors=True, device_map=None, torch_dtype="auto")
    with pytest.raises(TypeError, match="unexpected arguments nonsense"):
        jaxkv.AutoModelForCausalLM.from_pretrained("/nowhere", nonsense=1)


def test_its_repr_is_a_few_lines(model) -> None:
    """Regression: an address."""
    text = repr(model)
    assert text.startswith("CausalLM(tiny, 2 layers, hidden_size 32, vocab_size 61, float32, ")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_logits_that_are_not_finite_are_said_with_the_way_out(options: dict) -> None:
    broken = jax.tree.map(lambda x: (x * 60).astype(jnp.float16), decoders.decoder())
    with pytest.warns(RuntimeWarning, match=r'overflow in float16: load the model with dtype="bfloat16" or "float32"'):
        jaxkv.CausalLM(broken).generate([[3, 4]], max_new_tokens=3, eos_token_id=(), **options)
