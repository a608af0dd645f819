"""`warm_up`: what it has compiled is not compiled again, and nothing is generated."""

import decoders
import jax
import pytest
from compilations import compilations

import jaxkv


def test_calls_of_the_sizes_named_compile_nothing_afterwards() -> None:
    model, key = decoders.decoder(num_layers=1), jax.random.key(1)
    assert jaxkv.warm_up(model, prompts=(1, 2), prompt_tokens=(5, 12), max_new_tokens=4) == 4, "two rows, greedy and sampled"
    with compilations() as programs:
        jaxkv.generate(model, [[1, 2, 3]], max_new_tokens=30)
        out = jaxkv.generate(model, [[4], [1] * 16], max_new_tokens=2, sampling=jaxkv.Sampling(0.7), key=key)
        assert len(list(jaxkv.stream(model, [[4]], max_new_tokens=3, eos_token_id=()))) == 3
        jax.device_get(out)
    assert programs == []


def test_a_longer_prompt_than_the_model_allows_is_its_longest() -> None:
    assert jaxkv.warm_up(decoders.decoder(num_layers=1), prompt_tokens=(9, 10**6), sampled=False) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": 0}, "prompts"),
        ({"prompt_tokens": [3, -1]}, "prompt_tokens"),
        ({"sampled": "yes"}, "sampled must be True, False or both, got 'yes'"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_nonsense_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxkv.warm_up(decoders.decoder(num_layers=1), **arguments)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"warm_up\(\) got unknown arguments \['temperature'\]"):
        jaxkv.warm_up(decoders.decoder(num_layers=1), temperature=1.0)
