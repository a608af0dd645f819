"""The native kernels inside programs: under jax's transformations, on several devices, on one thread, and where they cannot run."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import run
from kernel_oracle import make_case
from needs import needs_library

import pallas_kernels

pytestmark = needs_library


def test_int32_indices_under_x64():
    case = make_case(lengths=(0, 1, 70), sinks=True)
    want = run(case, "cpu")
    with jax.enable_x64(True):
        got = run(case, "cpu", scale=0.125)  # a new program
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def in_new_process(code: str, **environment: str) -> str:
    """What the code prints, run where this file's imports and helpers are."""
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parent), *sys.path])
    every = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=every)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BITS = """
import os
if {one}: os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import hashlib, jax
from kernel_oracle import make_case
from native_calls import native
found = hashlib.sha256()
for options in ({{"lengths": (5000,)}}, {{"lengths": (3000, 0, 7), "q_per_kv": 1}}, {{"lengths": (900,), "queries": 300}}):
    for x in native(make_case(**options)): found.update(x.tobytes())
print(found.hexdigest())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's way to choose processors")
def test_threads_leave_no_trace():
    """Long rows are cut among threads: one thread gives the same bits."""
    one, all_of_them = (in_new_process(BITS.format(one=one)) for one in (True, False))
    assert one == all_of_them


EIGHT_DEVICES = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
import pallas_kernels
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, pages = 16, 8 * 65
q = jax.device_put(jnp.ones((rows, 6, 64)), NamedSharding(mesh, P("data")))
pool = jax.device_put(jax.random.normal(jax.random.key(0), (pages, 2, 16, 64)), NamedSharding(mesh, P("data")))
tables = jax.device_put(jnp.tile(jnp.arange(1, 65, dtype=jnp.int32), (rows, 1)), NamedSharding(mesh, P("data")))
lengths = jax.device_put(jnp.full(rows, 1000, jnp.int32), NamedSharding(mesh, P("data")))
def step(q, k, v, tables, lengths):
    def once(_, state):
        q, k, v = state
        new = q[:, :2]
        k, v = pallas_kernels.write_pages(k, v, new, new, tables[:, 0], lengths % 16, implementation="cpu")
        return pallas_kernels.paged_attention(q, k, v, tables, lengths, implementation="cpu"), k, v
    return jax.lax.fori_loop(0, 50, once, (q, k, v))[0]
over = P("data")
call = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=over, out_specs=over, check_vma=False))
out = np.asarray(call(q, pool, pool, tables, lengths))
assert np.isfinite(out).all()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's way to choose processors")
def test_eight_devices_on_one_thread_do_not_wait_for_each_other():
    """Every thread of the pool is inside a handler then: one that waited for a task that has not begun would wait for ever."""
    assert in_new_process(EIGHT_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=8") == "done\n"


DIVIDED = """
import jax, jax.numpy as jnp, pallas_kernels as p
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
pages, q = put(jnp.ones((5, 2, 8, 16)), None, "tensor"), put(jnp.ones((3, 4, 16)), None, "tensor")
n, heads = put(jnp.ones(3, jnp.int32)), P(None, "tensor")
given = (q, pages, pages, n[:, None], n)
text = lambda call: jax.jit(call).lower(*given).as_text()
inside = lambda call: jax.shard_map(call, mesh=mesh, in_specs=(heads, heads, heads, P(), P()), out_specs=heads, check_vma=False)
assert "jaxkv_attention" in text(inside(p.paged_attention))
assert "jaxkv_attention" not in text(p.paged_attention)
named = lambda *a: p.paged_attention(*a, implementation="cpu")
assert "jaxkv_attention" in text(inside(named))
try:
    text(named)
except NotImplementedError as error:
    print(error)
"""


def test_where_xla_divides_arrays_its_own_form_runs():
    """And a native one that is asked for by name says why not, and what to do."""
    said = in_new_process(DIVIDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert "'cpu' cannot run" in said and "jax.shard_map" in said


def test_control_flow_around_native_calls():
    """In branches, loops, checkpoints and under vmap the operation gives what it gives alone."""
    case = make_case(lengths=(0, 5, 70), queries=2, dead=0.0)
    fields = [jnp.asarray(x) for x in (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)]
    call = lambda q: pallas_kernels.paged_attention(q, *fields[1:5], num_queries=fields[5], implementation="cpu")
    q, want = fields[0], np.asarray(call(fields[0]))
    every = jax.jit(
        lambda q, yes: (
            jax.lax.cond(yes, call, lambda q: q, q),
            jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, call(s[1])), (0, q))[1],
            jax.checkpoint(call)(q),
            jax.lax.scan(lambda c, x: (c, call(x)), 0, q[None])[1][0],
            jax.vmap(call)(q[None])[0],
        )
    )
    for name, got in zip(("cond", "while_loop", "checkpoint", "scan", "vmap"), every(q, True)):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_a_name_for_another_platform_is_refused():
    case = make_case(lengths=(5,))
    fields = [jnp.asarray(x) for x in (case.q[:, 0], case.k_pages, case.v_pages, case.block_tables, case.lengths)]
    traced = jax.jit(functools.partial(pallas_kernels.paged_attention, implementation="cpu")).trace(*fields)
    with pytest.raises(NotImplementedError, match="'cpu' cannot run.*needs a CPU.*'tpu'"):
        traced.lower(lowering_platforms=("tpu",))
