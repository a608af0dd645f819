"""The shared library: found or missed with a reason, checked before it is registered, forced to other processors, used where it may be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import SOURCES, needs_compiler, needs_library, targets

import pallas_kernels.cpu
from pallas_kernels.cpu import library

ROOT = Path(__file__).resolve().parents[3]


def python(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_newer_interface_than_the_runtimes_is_refused():
    """Registered, it would keep the runtime's whole CPU platform from starting."""
    assert library.version_refusal((0, 3), (0, 3)) is None
    assert library.version_refusal((0, 3), (0, 5)) is None
    for newer in ((0, 6), (1, 0)):
        assert f"{newer[0]}.{newer[1]} of XLA's interface" in (library.version_refusal(newer, (0, 5)) or "")


def test_the_runtimes_version_is_read_from_its_headers():
    major, minor = library._version_of_jaxlib()
    assert major == 0 and minor >= 3


def test_a_missing_library_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pallas_kernels.cpu, "__path__", [str(tmp_path)])
    monkeypatch.setattr(library, "_installed_folder", lambda: None)
    assert "needs a C++ compiler" in library._find()


def test_a_file_that_is_no_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / library.FILE).write_bytes(b"no library")
    monkeypatch.setattr(pallas_kernels.cpu, "__path__", [str(tmp_path)])
    monkeypatch.setattr(library, "_installed_folder", lambda: None)
    assert f"{tmp_path / library.FILE} cannot be loaded" in library._find()


@needs_library
def test_the_installations_library_is_found_where_the_packages_path_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As with an editable installation under jaxtyping's import hook, which looks at folders alone."""
    loaded = library.load()
    assert isinstance(loaded, library.Library)
    monkeypatch.setattr(library, "_installed_folder", lambda: loaded.path.parent)
    monkeypatch.setattr(pallas_kernels.cpu, "__path__", [str(tmp_path)])
    found = library._find()
    assert not isinstance(found, str) and found[0] == loaded.path


@needs_compiler
@pytest.mark.skipif(not os.environ.get("CI"), reason="without CI nobody may have built it")
def test_where_there_is_a_compiler_the_installation_has_the_library():
    """Or else everything native would be skipped without a word."""
    assert library.why_not() is None


@needs_library
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_of_the_sources", lambda folder: "0" * 12)
    assert "built from other sources than there are now; run `python -m pallas_kernels.cpu.build`" in library._find()


@needs_library
@pytest.mark.parametrize("name", ["vax", "AVX2"])
def test_an_unknown_target_is_named_with_those_there_are(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(library.VARIABLE, name)
    with pytest.raises(ValueError, match=f"JAXKV_CPU_TARGET must be one of .*'baseline'.*got '{name}'"):
        library.load()


@needs_library
def test_the_environment_names_the_target_and_loading_starts_no_backend():
    code = (
        "import jax, jaxkv; from pallas_kernels.cpu import library; print(library.load().target);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    for target in (targets()[0], targets()[-1]):
        assert python(code, JAXKV_CPU_TARGET=target) == target


ON_A_MESH = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import pallas_kernels

mesh = Mesh(np.array(jax.devices()), ("i",))
rng = np.random.default_rng(0)
x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 576), (960, 576)))
sharded = jax.device_put(w, NamedSharding(mesh, P("i")))
x = jax.device_put(x, NamedSharding(mesh, P()))
call = lambda x, w: pallas_kernels.product(x, w)
local = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(None, "i")))
divided = jax.jit(call)
assert "jaxkv_product" in local.lower(x, sharded).as_text()
text = divided.lower(x, sharded).compile().as_text()
assert "jaxkv_product" not in text and "all-gather" not in text
want = np.float64(x) @ np.float64(w).T
for run in (local, divided):
    for _ in range(20):
        got = run(x, sharded)
    np.testing.assert_allclose(np.float64(got), want, rtol=1e-5, atol=1e-3)
alone = jax.jit(call)(jnp.asarray(np.asarray(x)), jnp.asarray(np.asarray(w)))
np.testing.assert_array_equal(local(x, sharded), alone)
try:
    jax.jit(lambda x, w: pallas_kernels.product(x, w, implementation="cpu"))(x, sharded)
except NotImplementedError as error:
    print(error)
"""


@needs_library
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot bind a process to one processor here")
def test_eight_devices_on_one_processor_run_products_of_their_own_and_divided_ones_are_xlas():
    """No handler waits for a task that has not begun: with every thread in a handler, none would ever begin."""
    message = python(ON_A_MESH, XLA_FLAGS="--xla_force_host_platform_device_count=8", NPROC="1")
    assert "'cpu' cannot run" in message and "shard_map" in message


@needs_compiler
@pytest.mark.parametrize("source", sorted(path.name for path in SOURCES.glob("*_kernels.cc")))
def test_kernels_share_no_function_between_targets(source: str, tmp_path: Path):
    """A function of weak linkage would be kept once, perhaps as it was compiled for a processor that this one is not."""
    made = tmp_path / "kernels.o"
    flags = ["-std=c++17", "-O0", "-fno-exceptions", "-DJAXKV_TARGET=baseline", f"-I{SOURCES}"]
    subprocess.run(["c++", *flags, "-c", str(SOURCES / source), "-o", str(made)], check=True, capture_output=True)
    symbols = subprocess.run(["nm", "-C", str(made)], check=True, capture_output=True, text=True).stdout.splitlines()
    defined = [line.split(maxsplit=2)[1:] for line in symbols if line.split()[0] != "U"]
    assert any(kind == "T" for kind, _ in defined)
    assert not [name for kind, name in defined if kind in "WVuw"]
