"""Weights and pages on a mesh of two simulated devices: in halves, with the tokens of one device, and without gathering the pool."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import decoders
import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxkv
from jaxkv.sharding import BY_HEAD, automatic, pages_sharding

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
    import jax, jax.numpy as jnp, numpy as np, decoders, jaxkv
    from flax import nnx
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
    one = decoders.decoder("sandwich")
    two = jaxkv.Decoder(one.config, rngs=None, mesh=mesh)
    assert two.mesh == mesh
    values = dict(nnx.to_flat_state(nnx.state(one)))
    state = [(path, v.replace(jax.device_put(values[path][...], v[...].sharding))) for path, v in nnx.to_flat_state(nnx.state(two))]
    nnx.update(two, nnx.from_flat_state(state))
    half = lambda x: x.addressable_shards[0].data.nbytes * 2 == x.nbytes
    assert half(two.layers[0].attention.qkv[...]) and half(two.layers[0].mlp.down[...])

    prompts = decoders.random_prompts(0, [9, 3, 17])
    for options in ({"deterministic": True}, {"speculative": jaxkv.NGram(2)}):
        same = [jaxkv.generate(m, prompts, max_new_tokens=6, max_seqs=2, page_size=4, **options).tokens for m in (one, two)]
        np.testing.assert_array_equal(*same)
    out = jaxkv.generate(two, prompts, max_new_tokens=6, deterministic=True)
    tokens = jnp.array([[*prompts[0], *out.tokens[0, 0].tolist()]])
    scored = jaxkv.score(two, tokens, deterministic=True)
    np.testing.assert_array_equal(scored[0, 9:], out.logprobs[0, 0])

    sizes = dict(num_pages=1237, page_size=4, max_seqs=3, max_seq_len=64)
    cache = jaxkv.PagedKVCache.create(two.config, mesh=mesh, **sizes)
    assert all(half(x) for x in jax.tree.leaves(cache.pages))
    run = jax.jit(jaxkv.extend, donate_argnums=1)
    arguments = (two, cache, jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))
    text = run.lower(*arguments).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather" in line and "1237" in line]
    assert not gathers, gathers
    _, cache = run(*arguments)
    assert all(half(x) for x in jax.tree.leaves(cache.pages))
    print("ok")
"""


def test_two_devices_give_the_tokens_of_one_and_hold_half_of_weights_and_pages() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "ok"


def test_pages_are_split_by_kv_head() -> None:
    config = decoders.config()
    assert PartitionSpec(None, "tensor") == BY_HEAD
    assert pages_sharding(config, None) is None
    assert pages_sharding(config, AbstractMesh((2,), ("tensor",))).spec == BY_HEAD
    with pytest.raises(ValueError, match="2 kv heads cannot be split over 4 devices"):
        pages_sharding(config, AbstractMesh((4,), ("tensor",)))


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match=r"the mesh needs an axis 'tensor', got \('data',\)"):
        jaxkv.PagedKVCache.create(
            decoders.config(), num_pages=4, max_seqs=1, max_seq_len=16, mesh=jax.make_mesh((1,), ("data",))
        )


def test_what_is_no_mesh_is_refused_by_name() -> None:
    """It was an AttributeError about axis_types."""
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh with an axis 'tensor'.*got {'tensor': 2}"):
        automatic({"tensor": 2})
