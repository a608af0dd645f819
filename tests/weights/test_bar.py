"""What takes long gets a bar where somebody watches; what is quick, or read by a program, gets none."""

import io

import pytest

from jaxkv.weights import bar as module


def drawn(monkeypatch: pytest.MonkeyPatch, *, progress: str, seconds: float) -> str:
    monkeypatch.setenv("JAXKV_PROGRESS", progress)
    monkeypatch.setattr("sys.stderr", out := io.StringIO())
    monkeypatch.setattr(module, "SHORT", 1.0 - seconds)  # as if so much time had passed
    with module.bar("loading", 1000) as shown:
        for _ in range(4):
            shown.update(250)
    return out.getvalue()


def test_it_is_drawn_and_then_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, progress="1", seconds=1.0)
    assert "loading:" in text
    assert text.endswith("\r")


@pytest.mark.parametrize(("progress", "seconds"), [("0", 1.0), ("1", 0.0)])
def test_it_is_not_drawn(monkeypatch: pytest.MonkeyPatch, progress: str, seconds: float) -> None:
    assert drawn(monkeypatch, progress=progress, seconds=seconds) == ""
