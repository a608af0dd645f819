"""Which implementation runs is decided when a program is lowered, for the platform it is lowered for; and jax's transformations work."""

import functools
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P
from kernel_calls import NATIVE
from kernel_oracle import make_case

import pallas_kernels
from pallas_kernels.cpu import library
from pallas_kernels.tools.targets import TARGETS, target_mesh

TRITON = "__gpu$xla.gpu.triton"
NATIVE_CALLS = {"paged_attention": "jaxkv_attention", "write_pages": "jaxkv_write_pages", "product": "jaxkv_product"}
MODERN = jax.__version_info__ >= (0, 11)


def operands(dtype: str = "float32") -> dict[str, tuple[jax.Array, ...]]:
    """Arguments of the three operations."""
    pages = jnp.ones((5, 2, 8, 32), dtype)
    tables, lengths = jnp.array([[1, 2], [3, 4], [2, 1]], jnp.int32), jnp.array([9, 1, 16], jnp.int32)
    new = jnp.ones((3, 2, 32), dtype)
    return {
        "paged_attention": (jnp.ones((3, 4, 32), dtype), pages, pages, tables, lengths),
        "write_pages": (pages, pages, new, new, lengths % 5, lengths % 8),
        "product": (jnp.ones((3, 16), dtype), jnp.ones((2, 5, 16), dtype)),
    }


def lowered(operation: str, platforms: tuple[str, ...], dtype: str = "float32", **options) -> str:
    """The program's text, for platforms that need not be here."""
    call = jax.jit(functools.partial(getattr(pallas_kernels, operation), **options))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        return call.trace(*operands(dtype)[operation]).lower(lowering_platforms=platforms).as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r"custom_call @(\S+?)\(", text)


class TestChoice:
    @pytest.mark.parametrize(("operation", "calls"), [("paged_attention", 2), ("write_pages", 1), ("product", 0)])
    def test_the_best_is_triton_for_cuda_native_for_cpu_and_plain_xla_elsewhere(self, operation: str, calls: int):
        assert kernels(lowered(operation, ("cuda",))) == calls * [TRITON]
        native = library.available()
        assert [name.rpartition("_")[0] for name in kernels(lowered(operation, ("cpu",)))] == native * [NATIVE_CALLS[operation]]
        for platform in ("tpu", "rocm"):
            assert kernels(lowered(operation, (platform,))) == []

    @pytest.mark.parametrize("operation", ["paged_attention", "write_pages"])
    @pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
    def test_xla_asked_for_by_name_has_no_kernel_on_any_platform(self, operation: str, platform: str):
        """Regression: on a GPU, attention by "xla" had its pages written by Triton."""
        assert kernels(lowered(operation, (platform,), implementation="xla")) == []

    @pytest.mark.parametrize("operation", ["paged_attention", "write_pages"])
    @pytest.mark.parametrize("name", ["triton", "mosaic"])
    def test_a_gpu_kernel_raises_elsewhere_before_anything_runs(self, operation: str, name: str):
        old = operation == "paged_attention" and name == "mosaic" and not MODERN
        refused = functools.partial(
            pytest.raises, NotImplementedError, match=f"'{name}' cannot run.*{'jax 0.11' if old else 'lowered for'}"
        )
        for platform in ("cpu", "tpu"):
            with refused():
                lowered(operation, (platform,), "bfloat16", implementation=name)
        if jax.default_backend() == "cpu":
            call = functools.partial(getattr(pallas_kernels, operation), implementation=name)
            given = operands("bfloat16")[operation]
            with refused():
                call(*given)
            with refused():
                jax.jit(call, donate_argnums=(0, 1) if operation == "write_pages" else 0)(*given)
            assert not any(x.is_deleted() for x in given)

    @pytest.mark.parametrize(
        ("name", "writer"),
        [
            ("xla", "xla"),
            ("triton", "triton"),
            ("mosaic", "triton"),
            *((f"{x}_interpret", "interpreter") for x in ("triton", "mosaic")),
        ],
    )
    def test_the_writer_that_goes_with_each_name(self, name: str, writer: str):
        text = lowered("write_pages", ("cuda",), "bfloat16", implementation=name)
        loop = "stablehlo.while" in text  # over the kernel's programs, which only the interpreter has
        ran = {"xla": not loop and "stablehlo.scatter" in text, "triton": kernels(text) == [TRITON], "interpreter": loop}
        assert [key for key, value in ran.items() if value] == [writer]

    @pytest.mark.skipif(not MODERN, reason="Mosaic's kernel needs jax 0.11")
    def test_the_gpu_that_the_mesh_names_is_the_one_lowered_for(self):
        with jax.sharding.use_abstract_mesh(target_mesh(TARGETS["sm_90a"])):
            assert kernels(lowered("paged_attention", ("cuda",), "bfloat16", implementation="mosaic")) == ["mosaic_gpu_v2"]
        refused = pytest.raises(NotImplementedError, match="8 tokens")
        with jax.sharding.use_abstract_mesh(target_mesh(TARGETS["sm_80"])), refused:
            lowered("paged_attention", ("cuda",), "bfloat16", implementation="mosaic")

    def test_best_is_xla_where_triton_cannot_take_the_pages(self):
        pages, scales = jnp.ones((5, 2, 8, 32), jnp.float8_e4m3fn), jnp.ones((5, 2, 8))
        q, _, _, tables, lengths = operands()["paged_attention"]
        call = lambda *a: pallas_kernels.paged_attention(*a[:5], k_scales=a[5], v_scales=a[5])
        for arch, calls in (("sm_80", 0), ("sm_90a", 2)):
            with jax.sharding.use_abstract_mesh(target_mesh(TARGETS[arch])), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
                traced = jax.jit(call).trace(q, pages, pages, tables, lengths, scales)
                assert kernels(traced.lower(lowering_platforms=("cuda",)).as_text()) == calls * [TRITON]

    def test_one_export_for_several_platforms_holds_the_best_of_each(self):
        given = operands()["paged_attention"]
        unstable = [export.DisabledSafetyCheck.custom_call(name) for name in (TRITON, "triton_kernel_call")]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
            made = export.export(
                jax.jit(pallas_kernels.paged_attention), platforms=("cpu", "cuda", "tpu"), disabled_checks=unstable
            )(*given)
        assert kernels(made.mlir_module()) == 2 * [TRITON]
        if jax.default_backend() == "cpu":
            np.testing.assert_allclose(made.call(*given), pallas_kernels.paged_attention(*given), atol=1e-6)


def test_no_pallas_is_imported_on_a_cpu_unless_asked_for():
    """All three operations, in a fresh process; Pallas's import takes longer than ours."""
    code = """
import sys, jax, jax.numpy as jnp, pallas_kernels as p
def loaded():
    ours = {"pallas_kernels.write_pages_triton", "pallas_kernels.paged_attention_triton", "pallas_kernels.paged_attention_mosaic"}
    return sorted(m for m in sys.modules if m.startswith("jax.experimental.pallas") or m in ours)
x, pages, n = jnp.ones((3, 4, 16)), jnp.ones((5, 2, 8, 16)), jnp.ones(3, jnp.int32)
def run(**options):
    pools = p.write_pages(pages, pages, x[:, :2], x[:, :2], n, n, **options)
    return p.paged_attention(x, *pools, n[:, None], n, **options)
jax.jit(run)(), p.product(x[0], x[1]), p.product(x[0], x[1], deterministic=True)
assert loaded() == [], loaded()
jax.jit(run, static_argnames="implementation")(implementation="triton_interpret")
assert "jax.experimental.pallas" in loaded() and "pallas_kernels.paged_attention_mosaic" not in loaded(), loaded()
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def attention_call(**options):
    case = make_case(lengths=(0, 5, 20), queries=2, kv_heads=2, q_per_kv=2, head_dim=16, page_size=8, dead=0.0)
    fields = (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)
    run = lambda q, k, v, t, n, m: pallas_kernels.paged_attention(q, k, v, t, n, num_queries=m, return_lse=True, **options)
    return run, [jnp.asarray(x) for x in fields]


class TestTransformations:
    @pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
    @pytest.mark.parametrize(
        "axes",
        [
            (0, None, None, None, None, None),
            (0, None, None, 1, 0, 0),
            (1, 0, None, None, None, None),
            (None, 0, 1, 0, None, None),
        ],
        ids=["rows", "tables", "one pool", "pools"],
    )
    def test_vmap_of_attention(self, axes: tuple, implementation: str):
        run, arrays = attention_call(implementation=implementation)
        twice = [x if axis is None else jnp.stack([x, x[::-1]], axis) for x, axis in zip(arrays, axes)]
        out, lse = jax.jit(jax.vmap(run, in_axes=axes))(*twice)
        for i in range(2):
            want = run(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(twice, axes)))
            np.testing.assert_array_equal(out[i], want[0])
            np.testing.assert_array_equal(lse[i], want[1])

    def test_vmap_over_sinks(self):
        run = lambda sinks: attention_call(sinks=sinks)[0](*attention_call()[1])
        sinks = jnp.arange(8.0).reshape(2, 4)
        out, _ = jax.vmap(run)(sinks)
        for i in range(2):
            np.testing.assert_array_equal(out[i], run(sinks[i])[0])

    def test_gradients_under_vmap_checkpoint_and_loops(self):
        """All in one program, most of whose time is XLA's compiling."""
        run, (q, *rest) = attention_call()
        loss = lambda q: jnp.sum(jnp.sin(run(q, *rest)[0]))
        looped = lambda q: lax.scan(lambda total, _: (total + jax.checkpoint(loss)(q), None), 0.0, None, length=2)[0]
        taken = lambda q: lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, run(s[1], *rest)[0]), (0, q))[1]
        every = jax.jit(lambda q: (jax.grad(loss)(q), jax.vmap(jax.grad(loss))(q[None])[0], jax.grad(looped)(q), taken(q)))
        plain, batched, twice, once = every(q)
        np.testing.assert_allclose(batched, plain, atol=1e-6)
        np.testing.assert_allclose(twice, 2 * plain, atol=1e-5)
        np.testing.assert_allclose(once, run(q, *rest)[0], atol=1e-6)

    @pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
    @pytest.mark.parametrize("axes", [(None, 0, 0, None), (0, 0, None, 1)], ids=["new", "pools"])
    def test_vmap_of_writing(self, axes: tuple, implementation: str):
        pool, *_ = operands()["write_pages"]
        new = jnp.arange(3 * 2 * 32.0).reshape(3, 2, 32)
        pages, offsets = jnp.array([1, 4, 0], jnp.int32), jnp.array([7, 0, 3], jnp.int32)
        run = lambda pool, new, pages, offsets: pallas_kernels.write_pages(
            pool, pool, new, -new, pages, offsets, implementation=implementation
        )
        arrays = (pool, new, pages, offsets)
        twice = [x if axis is None else jnp.stack([x, x[::-1]], axis) for x, axis in zip(arrays, axes)]
        got = jax.jit(jax.vmap(run, in_axes=axes))(*twice)
        for i in range(2):
            want = run(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(twice, axes)))
            for a, b in zip(got, want):
                np.testing.assert_array_equal(a[i, 1:], b[1:])  # the null page may hold anything

    @pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradient_of_writing(self, dtype: str, implementation: str):
        """Regression: on CPU with jax 0.10.2 bfloat16 pages are scattered as bits, through which no derivative goes."""
        pool, _, new, _, pages, offsets = operands(dtype)["write_pages"]
        weights = jnp.arange(float(pool.size)).reshape(pool.shape).astype(dtype)

        def loss(pool: jax.Array, new: jax.Array) -> jax.Array:
            k, _ = pallas_kernels.write_pages(pool, pool, new, new, pages, offsets, implementation=implementation)
            return jnp.sum((k * weights).astype(jnp.float32))

        d_pool, d_new = jax.jit(jax.grad(loss, (0, 1)))(pool, new)
        live = pages > 0
        np.testing.assert_array_equal(d_new, jnp.where(live[:, None, None], weights[pages, :, offsets], 0))
        np.testing.assert_array_equal(d_pool, weights.at[jnp.where(live, pages, 9), :, offsets].set(0, mode="drop"))

    @pytest.mark.parametrize("check_vma", [False, True])
    def test_shard_map(self, check_vma: bool):
        mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        given = operands()
        heads = P(None, "tensor")
        specs = {
            "paged_attention": ((heads, heads, heads, P(), P()), heads),
            "write_pages": ((heads, heads, heads, heads, P(), P()), (heads, heads)),
            "product": ((P(), P("tensor")), heads),
        }
        for name, (inside, outside) in specs.items():
            call = getattr(pallas_kernels, name)
            sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=check_vma))
            for a, b in zip(jax.tree.leaves(sharded(*given[name])), jax.tree.leaves(call(*given[name]))):
                np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


def test_on_a_mesh_of_two_nothing_is_gathered():
    """A weight divided along its second output axis, and pages and heads along the heads, stay where they are."""
    code = """
import jax, jax.numpy as jnp, pallas_kernels as p
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
weight, x = put(jnp.ones((3, 4, 16)), None, "tensor"), put(jnp.ones((8, 16)))
pages, q = put(jnp.ones((5, 2, 8, 16)), None, "tensor"), put(jnp.ones((3, 4, 16)), None, "tensor")
n, heads = put(jnp.ones(3, jnp.int32)), P(None, "tensor")
inside = dict(mesh=mesh, in_specs=(heads, heads, heads, P(), P()), out_specs=heads, check_vma=False)
attend = jax.shard_map(lambda *a: p.paged_attention(*a), **inside)
times = lambda x, w: p.product(x, w, implementation="weight_right")
for call, given in ((times, (x, weight)), (attend, (q, pages, pages, n[:, None], n))):
    text = jax.jit(call).lower(*given).compile().as_text()
    assert not [word for word in ("all-gather", "all-to-all", "all-reduce") if word in text], text
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
