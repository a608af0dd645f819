"""Meshes as users bring them, on two simulated devices: `jax.make_mesh`'s explicit axes, and `jax.shard_map` with its checks.

Before, the first raised ShardingTypeError, the second TypeError: the states of loops began as constants, which vary over no mesh axis.
Most programs are only traced, where both are decided; one of each kind runs, and all of them with `--slow`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMMON = """
import sys, tempfile
import jax, jax.numpy as jnp, numpy as np, decoders, jaxkv
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

RUN_ALL = len(sys.argv) > 1
one, draft = decoders.decoder(num_layers=1), decoders.decoder(num_layers=1, seed=3)
prompts, lengths = decoders.random_tokens(0, 4, 7), jnp.array([7, 5, 6, 3], jnp.int32)
keys = jax.random.split(jax.random.key(5), 4)  # one a prompt: a device's first prompt is not the first of all
SAMPLING = jaxkv.Sampling(0.8, 10, 0.9, 0.01)

def generate(**options):
    def run(m, p, n, k):
        speculative = jaxkv.Draft(m, 2) if options.get("speculative") == "draft" else options.get("speculative")
        chosen = {**options, "speculative": speculative, **({"key": k} if "sampling" in options else {})}
        out = jaxkv.generate(m, p, n, max_new_tokens=3, page_size=4, max_seqs=2, **chosen)
        return out.tokens, out.lengths, out.logprobs
    return run

def extend(m, p, n, k):
    cache = jaxkv.PagedKVCache.create(m.config, num_pages=20, page_size=4, max_seqs=p.shape[0], max_seq_len=20, mesh=m.mesh)
    first, cache = jaxkv.extend(m, cache, p, n)
    second, cache = jaxkv.extend(m, cache, p[:, :1], jnp.ones_like(n))
    return first, second, cache.lengths

def grad_of(f):
    return lambda m, p, n, k: jax.grad(lambda m: jnp.sum(jnp.sin(f(m, p, n, k))))(m)

score = lambda m, p, n, k: jaxkv.score(m, p, n)
PROGRAMS = {
    "greedy": generate(),
    "sampled": generate(sampling=SAMPLING, num_samples=2, num_pages=8),
    "deterministic": generate(deterministic=True),
    "ngram": generate(speculative=jaxkv.NGram(2)),
    "draft": generate(speculative="draft"),
    "quantized": generate(cache_dtype="int8"),
    "beams": lambda m, p, n, k: jaxkv.beam_search(m, p, n, num_beams=2, max_new_tokens=3, eos_token_id=3).tokens,
    "extend": extend,
    "naive": lambda m, p, n, k: jaxkv.generate_naive(m, p, n, max_new_tokens=2, sampling=SAMPLING, key=k),
    "model": lambda m, p, n, k: m(p),
    "score": score,
}
GRADIENTS = {
    "model": grad_of(PROGRAMS["model"]),
    "score": grad_of(score),
    "sampled": grad_of(lambda m, p, n, k: jnp.maximum(jaxkv.score(m, p, n, sampling=SAMPLING), -1.0)),
    "deterministic": grad_of(lambda m, p, n, k: jaxkv.score(m, p, n, deterministic=True, remat=True)),
}

def check(name, got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5, err_msg=name)
"""

SHARD_MAP = """
mesh = Mesh(np.array(jax.devices()), ("data",))
given = (one, prompts, lengths, keys)
for kind, programs, out, quick in (("", PROGRAMS, P("data"), ("greedy",)), ("gradient of ", GRADIENTS, P(), ("score",))):
    for name, f in programs.items():
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=out)
        if RUN_ALL or name in quick:
            check(kind + name, mapped(*given), f(*given))
        else:
            jax.eval_shape(mapped, *given)
print("ok")
"""

EXPLICIT = """
tensor, data = jax.make_mesh((2,), ("tensor",)), jax.make_mesh((2,), ("data",))
assert set(tensor.axis_types) == {AxisType.Explicit}
split = lambda mesh, x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

empty = jaxkv.Decoder(one.config, rngs=None, mesh=tensor)
assert set(empty.mesh.axis_types) == {AxisType.Auto}
half = lambda x: x.addressable_shards[0].data.nbytes * 2 == x.nbytes
assert half(empty.layers[0].attention.qkv[...]) and half(empty.layers[0].mlp.down[...])
leaves = [jax.device_put(x, y.sharding) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(empty))]
two = jax.tree.unflatten(jax.tree.structure(empty), leaves)
by_rows = [split(data, x, "data") for x in (prompts, lengths, keys)]
# As a trainer splits parameters over the data axis.
spread = jax.tree.map(lambda x: split(data, x, *(("data",) if x.ndim > 1 and x.shape[0] % 2 == 0 else ())), one)

plain = (one, prompts, lengths, keys)
cases = {"split model": (tensor, two, *plain[1:]), "split prompts": (data, one, *by_rows), "split both": (data, spread, *by_rows)}
RUN = {"split model": ("greedy",), "split prompts": ("score",), "split both": ()}
for case, (mesh, *given) in cases.items():
    for kind, programs in (("", PROGRAMS), ("gradient of ", GRADIENTS)):
        for name, f in programs.items():
            what = f"{case}, {kind}{name}"
            want = f(*plain) if RUN_ALL or (not kind and name in RUN[case]) else None
            if want is not None:
                check(what, jax.jit(f)(*given), want)
                # Outside of jit jax itself differentiates nothing that is divided over explicit axes, unless a mesh is set.
                if name == "score" and not kind or RUN_ALL and (not kind or case == "split model"):
                    check(what, f(*given), want)
            else:
                jax.eval_shape(f, *given)
            with jax.set_mesh(mesh):
                traced = jax.jit(f).trace(*given)
            types = [x.sharding for x in jax.tree.leaves(traced.out_info)]
            if kind and case == "split both":
                assert [t.spec for t in types] == [jax.typeof(x).sharding.spec for x in jax.tree.leaves(spread)], what
tokens = [(t.prompt, t.position, t.token) for t in jaxkv.stream(two, prompts, lengths, max_new_tokens=3, page_size=4, max_seqs=2)]
out = jaxkv.generate(one, prompts, lengths, max_new_tokens=3)
assert sorted(tokens) == [(i, int(lengths[i]) + j, int(out.tokens[i, 0, j])) for i in range(4) for j in range(3)], tokens
scored = jax.jit(jaxkv.score)(one, by_rows[0])
assert scored.sharding == NamedSharding(data, P("data", None)), scored.sharding
print("ok")
"""


@pytest.mark.parametrize("more", [(), pytest.param(("all",), marks=pytest.mark.slow)], ids=["quick", "all"])
@pytest.mark.parametrize("script", [SHARD_MAP, EXPLICIT], ids=["shard_map", "explicit"])
def test_the_tokens_of_one_device(script: str, more: tuple[str, ...]) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", COMMON + script, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "ok"
