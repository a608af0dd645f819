"""The decoder without a cache: causality, positions, memory of the backward pass, training. Families have tests of their own."""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkv
from jaxkv.model.decoder import Layer, parameters_nbytes

ARCHITECTURES = sorted(decoders.ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_sees_no_later_one_and_no_other_row(architecture: str):
    model, tokens = decoders.decoder(architecture), decoders.random_tokens(0, 2, 16)
    full = decoders.plain_logits(model, tokens)
    assert full.shape == (2, 16, decoders.VOCAB)
    assert full.dtype == np.float32
    changed = decoders.plain_logits(model, tokens.at[0, 9:].add(1).at[1].set(0) % decoders.VOCAB)
    np.testing.assert_array_equal(changed[0, :9], full[0, :9])
    assert not np.allclose(changed[0, 9:], full[0, 9:], atol=1e-3)


def test_a_window_hides_what_is_behind_it():
    model = decoders.decoder("window", windows=(5, 5), num_layers=2)
    tokens = decoders.random_tokens(1, 1, 16)
    full, changed = decoders.plain_logits(model, tokens), decoders.plain_logits(model, tokens.at[0, 0].add(1) % decoders.VOCAB)
    np.testing.assert_array_equal(changed[0, 9:], full[0, 9:])  # two layers of 5: 8 tokens back
    assert not np.allclose(changed[0, 8], full[0, 8], atol=1e-6)


def test_soft_cap_bounds_the_logits():
    logits = decoders.plain_logits(decoders.decoder("sandwich"), decoders.random_tokens(2, 1, 16))
    assert np.abs(logits).max() < 4.0
    assert np.abs(logits).max() > 0.5


def test_too_long_is_refused():
    with pytest.raises(ValueError, match=r"129 tokens are more than the model allows \(128\)"):
        decoders.decoder()(jnp.zeros((1, 129), jnp.int32))


def test_bytes_of_all_parameters():
    model = decoders.decoder("mha")
    assert parameters_nbytes(model) == sum(x.size * 4 for x in jax.tree.leaves(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_narrow_and_give_float32_logits(dtype: str):
    model, tokens = decoders.decoder(dtype=dtype), decoders.random_tokens(3, 1, 16)
    assert {x.dtype.name for x in jax.tree.leaves(model)} == {dtype}
    logits = decoders.plain_logits(model, tokens)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model)
    np.testing.assert_allclose(logits, decoders.plain_logits(wide, tokens), atol=0.1)


def loss(model: jaxkv.Decoder, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def test_gradients_are_the_finite_differences():
    model, tokens = decoders.decoder("mqa"), decoders.random_tokens(4, 2, 16)
    grads = jax.jit(jax.grad(loss))(model, tokens)
    leaves, tree = jax.tree.flatten(model)
    value = jax.jit(loss)
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        direction = jax.random.normal(jax.random.key(i), leaf.shape)
        direction = direction / jnp.linalg.norm(direction)
        moved = [jax.tree.unflatten(tree, [*leaves[:i], leaf + s * direction, *leaves[i + 1 :]]) for s in (1e-2, -1e-2)]
        numeric = (value(moved[0], tokens) - value(moved[1], tokens)) / 2e-2
        np.testing.assert_allclose(jnp.sum(grad * direction), numeric, rtol=0.02, atol=1e-3)


def test_trains_with_optax_as_it_is():
    model, tokens = decoders.decoder(), decoders.random_tokens(5, 4, 16)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(model: jaxkv.Decoder, state: Any) -> tuple[jaxkv.Decoder, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(model, tokens)
        with jax.numpy_dtype_promotion("standard"):  # optax's adam mixes integers and floats
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(model, updates), state, value

    state, values = optimizer.init(model), []
    for _ in range(30):
        model, state, value = train(model, state)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert isinstance(model, jaxkv.Decoder)
    assert train._cache_size() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({"rope": None}, "rotary needs one, learned takes none"),
        ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
        ({"windows": (4, 0)}, "windows must be an integer >= 1, got 0"),
        ({"rope": jaxkv.Rope(rotary_dim=16)}, "rotary_dim 16 is larger than head_dim 8"),
    ],
)
def test_impossible_configurations_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        decoders.config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta": 1.0}, "rope theta must be > 1, got 1.0"),
        ({"rotary_dim": 7}, "rotary_dim must be even and positive, got 7"),
        ({"factor": 0.5}, "rope factor must be >= 1, got 0.5"),
    ],
)
def test_impossible_rotary_values_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jaxkv.Rope(**changes)


def test_layers_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch):
    """Tracing every layer anew took 3 of the 7 seconds of a start from the compilation cache."""
    traced = []
    call = Layer.__call__
    monkeypatch.setattr(Layer, "__call__", lambda self, *args: traced.append(self) or call(self, *args))
    model = decoders.decoder("window", num_layers=6, windows=(None, 4) * 3)
    jax.jit(model).lower(decoders.random_tokens(0, 1, 9))
    assert len(model.layers) == 6
    assert len(traced) == 2
