"""`jaxkv.kernels()` says what runs here, and why not something else."""

import jax
import pytest

import jaxkv
from pallas_kernels.cpu import library


def test_it_names_the_native_kernels_or_the_reason_why_not() -> None:
    found, loaded = jaxkv.kernels(), library.load()
    assert found.platform == jax.default_backend()
    if isinstance(loaded, library.Library) and found.platform == "cpu":
        assert (found.implementation, found.target, found.targets) == ("cpu", loaded.target, loaded.targets)
        assert found.reason is None and str(found) == f"cpu ({loaded.target})"
    else:
        assert found.implementation != "cpu" and found.reason


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a CPU without the library")
def test_a_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: "there was no compiler")
    found = jaxkv.kernels()
    assert (found.implementation, found.target, found.reason) == ("xla", None, "there was no compiler")
    assert str(found) == "xla"
