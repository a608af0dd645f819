"""Gradients of paged_attention against jax.grad of dense attention written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import NATIVE
from kernel_oracle import make_case

import pallas_kernels


def dense(q, k_pages, v_pages, sinks, case, options):
    """(out, lse) in float32: every row's pages one behind the other, and of them what each query sees; 0 for dead queries."""
    page_size, kv_heads = case.k_pages.shape[2], case.k_pages.shape[1]
    group, window = q.shape[2] // kv_heads, options.get("sliding_window") or 10**9
    position, index = np.arange(case.block_tables.shape[1] * page_size), np.arange(q.shape[1])
    own = (case.lengths - case.num_queries)[:, None] + index
    live = index < case.num_queries[:, None]
    seen = live[..., None] & (position <= own[..., None]) & (position > own[..., None] - window)
    held = np.arange(case.block_tables.shape[1]) * page_size < case.lengths[:, None]

    def tokens(pages):  # [rows, heads, tokens, head_dim]
        rows = jnp.moveaxis(pages[np.where(held, case.block_tables, 0)], 2, 1)
        return jnp.repeat(rows.reshape(*rows.shape[:2], -1, rows.shape[-1]), group, axis=1)

    s = jnp.einsum("rqhd,rhtd->rqht", q, tokens(k_pages)) * q.shape[-1] ** -0.5
    if options.get("logits_soft_cap"):
        s = options["logits_soft_cap"] * jnp.tanh(s / options["logits_soft_cap"])
    s = jnp.where(seen[:, :, None] | ~live[..., None, None], s, -jnp.inf)
    every = s if sinks is None else jnp.concatenate([s, jnp.broadcast_to(sinks[:, None], (*s.shape[:3], 1))], axis=3)
    total = jax.nn.logsumexp(every, axis=3)
    out = jnp.einsum("rqht,rhtd->rqhd", jnp.exp(s - total[..., None]), tokens(v_pages))
    return jnp.where(live[..., None, None], out, 0.0), jnp.where(live[..., None], total, 0.0)


@pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 7, "logits_soft_cap": 2.0}, {"sinks": True}], ids=["plain", "window-cap", "sinks"]
)
def test_against_dense(implementation, options):
    case = make_case(lengths=(0, 1, 20, 37), queries=3, head_dim=32, kv_heads=2, q_per_kv=2, **options)
    static = {k: v for k, v in case.options.items() if not isinstance(v, np.ndarray)}
    sinks = jnp.asarray(case.options["sinks"]) if "sinks" in case.options else None
    weights = jax.random.normal(jax.random.key(0), case.q.shape)
    arrays = [jnp.asarray(x) for x in (case.q, case.k_pages, case.v_pages)]
    live = jnp.isfinite(arrays[1])
    tables, lengths, counts = (jnp.asarray(x) for x in (case.block_tables, case.lengths, case.num_queries))

    def loss(run, q, k, v, sinks):
        out, lse = run(q, k, v, sinks)
        return jnp.sum(out * weights) + 0.3 * jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    def paged(q, k, v, sinks):
        return pallas_kernels.paged_attention(
            q, k, v, tables, lengths, num_queries=counts, sinks=sinks, return_lse=True, implementation=implementation, **static
        )

    which = (0, 1, 2, 3) if sinks is not None else (0, 1, 2)
    got = jax.jit(jax.grad(lambda *a: loss(paged, *a), which))(*arrays, sinks)
    clean = [jnp.where(jnp.isfinite(x), x, 0.0) for x in arrays]
    want = jax.jit(jax.grad(lambda *a: loss(lambda *b: dense(*b, case, static), *a), which))(*clean, sinks)
    for name, a, b in zip(("q", "k_pages", "v_pages", "sinks"), got, want):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
    assert (got[1][~live] == 0).all(), "dead slots have gradient exactly 0"


def test_pages_only_and_q_only():
    case = make_case(lengths=(20,), dead=0.0)
    q, k, v = (jnp.asarray(x) for x in (case.q[:, 0], case.k_pages, case.v_pages))
    tables, lengths = jnp.asarray(case.block_tables), jnp.asarray(case.lengths)
    run = lambda q, k: jnp.sum(pallas_kernels.paged_attention(q, k, v, tables, lengths) ** 2)
    both = jax.grad(run, (0, 1))(q, k)
    np.testing.assert_array_equal(jax.grad(run, 0)(q, k), both[0])
    np.testing.assert_array_equal(jax.grad(run, 1)(q, k), both[1])


def test_quantized_pages():
    """q has a gradient over quantized pages; the pages and scales have none, and that is said, not assumed."""
    case = make_case(lengths=(20,), page_dtype="int8", dead=0.0)
    scales = [jnp.asarray(case.options[name]) for name in ("k_scales", "v_scales")]
    q, k, v = (jnp.asarray(x) for x in (case.q[:, 0], case.k_pages, case.v_pages))
    tables, lengths = jnp.asarray(case.block_tables), jnp.asarray(case.lengths)
    run = lambda q, k, v, **kw: jnp.sum(pallas_kernels.paged_attention(q, k, v, tables, lengths, **kw) ** 2)
    got = jax.grad(lambda q: run(q, k, v, k_scales=scales[0], v_scales=scales[1]))(q)
    wide = [x.astype(jnp.float32) * s[..., None] for x, s in zip((k, v), scales)]
    np.testing.assert_allclose(got, jax.grad(lambda q: run(q, *wide))(q), atol=1e-5)
    with pytest.raises(ValueError, match="dequantize"):
        jax.grad(lambda s: run(q, k, v, k_scales=s, v_scales=scales[1]))(scales[0])
