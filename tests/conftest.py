"""The strict set-up every test runs under.

Set before anything imports jax: CPU unless JAX_PLATFORMS says otherwise, strict dtype promotion, no rank promotion, no network.
Every annotation of `jaxkv` and `pallas_kernels` is checked at run time, shapes included.
"""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # LLVM's, not XLA's: a third of a test's time; see `optimized`
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the command line turns it on, and would write to the user's folder

import gc
import time
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(["jaxkv", "pallas_kernels"], "typecheck.check")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

HAS_TORCH = importlib.util.find_spec("torch") is not None


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def few_compiled_programs():
    """Forget compiled programs before there are too many: each one maps memory. XLA's compiler crashed the process after some
    900 tests; the kernel's limit of 65,530 maps is the presumed cause. Reading 10,000 of them takes 10 ms, so a test that was
    too quick to compile much is not asked."""
    begin = time.perf_counter()
    yield
    if time.perf_counter() - begin > 1 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def optimized():
    """Compile as users do, for tests of bits. (XLA's own passes always run: the optimised HLO is the same.)"""
    disabled = jax.config.read("jax_disable_most_optimizations")

    def compile_without(value: bool) -> None:
        if disabled:
            jax.config.update("jax_disable_most_optimizations", value)
            jax.clear_caches()

    compile_without(False)
    yield
    compile_without(True)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With `-n 2` all tests of a file run in one process, in the order of collection: its fixtures are made once, and a later test
    finds the programs that an earlier one has compiled."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")  # the longest first, so that two workers end together
    if not config.getoption("--slow") and "slow" not in config.getoption("-m"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
            config.hook.pytest_deselected(items=slow)
    if not HAS_TORCH:
        skip = pytest.mark.skip(reason="needs torch, the oracle")
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(skip)
