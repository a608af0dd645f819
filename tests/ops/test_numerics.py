"""One value says how numbers are computed, and it is checked when it is made."""

import jax
import pytest
from decoders import decoder, random_prompts

import jaxkv
from jaxkv.ops.numerics import Numerics


def test_it_is_a_static_argument():
    assert Numerics(None, True) == Numerics(deterministic=True)
    assert hash(Numerics("xla")) == hash(Numerics("xla"))


@pytest.mark.parametrize("call", ["generate", "score", "extend", "beam_search"])
def test_an_unknown_implementation_is_named_before_any_work(call: str):
    model, prompts = decoder(), random_prompts(0, [3])
    calls = {
        "generate": lambda: jaxkv.generate(model, prompts, max_new_tokens=2, implementation="tritn"),
        "score": lambda: jaxkv.score(model, jax.numpy.asarray(prompts), deterministic=True, implementation="tritn"),
        "extend": lambda: jaxkv.extend(
            model,
            jaxkv.PagedKVCache.create(model.config, num_pages=4, max_seqs=1, max_seq_len=16),
            jax.numpy.asarray(prompts),
            jax.numpy.asarray([3]),
            implementation="tritn",
        ),
        "beam_search": lambda: jaxkv.beam_search(model, prompts, num_beams=2, max_new_tokens=2, implementation="tritn"),
    }
    with pytest.raises(ValueError, match="implementation must be None or one of .* got 'tritn'"):
        calls[call]()
