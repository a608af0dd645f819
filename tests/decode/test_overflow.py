"""Logits that are not finite are counted, and change no token."""

import decoders
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv


def test_tokens_from_logits_that_are_not_finite_are_counted_inside_jit_too() -> None:
    model, prompts = decoders.decoder(), decoders.random_prompts(0, [3, 3])

    @jax.jit
    def run(model, prompts):
        return jaxkv.generate(model, prompts, max_new_tokens=4, eos_token_id=())

    prompts = jnp.asarray(prompts, jnp.int32)
    broken = jax.tree.map(lambda x: x * jnp.asarray(jnp.nan, x.dtype), model)
    sound, out = run(model, prompts), run(broken, prompts)
    assert int(sound.stats.nonfinite) == 0
    assert int(out.stats.nonfinite) == 8
    assert np.isnan(out.logprobs).all()


def test_a_float16_overflow_is_counted() -> None:
    model = jax.tree.map(lambda x: (x * 60).astype(jnp.float16), decoders.decoder())
    out = jaxkv.generate(model, decoders.random_prompts(0, [3, 3]), max_new_tokens=4, eos_token_id=())
    assert int(out.stats.nonfinite) == 8
