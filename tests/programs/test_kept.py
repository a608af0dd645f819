import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

import jaxkv
from jaxkv.programs import kept

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import collections, json, sys
import jax, jax.numpy as jnp
from flax import nnx
import jaxkv
jnp.ones(3) + 1                      # something is compiled before, as in a notebook
folder = jaxkv.keep_programs()
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **about: counts.update([event.rpartition("/")[2]]))
config = jaxkv.ModelConfig(family="llama", vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
                           intermediate_size=32, max_seq_len=64, rope=jaxkv.Rope(rotary_dim=8))
model = jaxkv.Decoder(config, rngs=nnx.Rngs(0))
out = jaxkv.generate(model, jnp.ones((1, 4), jnp.int32), max_new_tokens=3, eos_token_id=())
print(json.dumps({"folder": str(folder), "tokens": out.tokens.tolist(), **counts}))
"""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """jax's options as in a fresh process, and back again."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path))
    for name in OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(kept, "_complained", set())
    for name, value in zip(OPTIONS, (None, True, 1.0, 0)):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    kept.compilation_cache.reset_cache()


def now(name: str) -> object:
    return getattr(jax.config, f"jax_{name}")


def run_in_a_process(folder: Path) -> dict:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_ENABLE", "JAX_PERSISTENT"))}
    environment |= {"JAXKV_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = run_in_a_process(tmp_path), run_in_a_process(tmp_path)
    assert first["folder"] == second["folder"] == str(tmp_path / "xla")
    assert first["cache_misses"] >= 1
    assert "cache_misses" not in second
    assert second["cache_hits"] == second["compile_requests_use_cache"] >= first["cache_misses"]
    assert first["tokens"] == second["tokens"]


@pytest.mark.usefixtures("options")
class TestWhere:
    def test_in_the_users_folder(self, tmp_path: Path) -> None:
        assert jaxkv.keep_programs() == tmp_path / "xla"
        assert now("compilation_cache_dir") == str(tmp_path / "xla")
        assert now("persistent_cache_min_compile_time_secs") == 0
        assert now("persistent_cache_min_entry_size_bytes") == -1

    def test_where_jax_was_told_to(self, tmp_path: Path) -> None:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert jaxkv.keep_programs() == tmp_path / "mine"
        assert now("persistent_cache_min_compile_time_secs") == 0

    def test_in_a_folder_given(self, tmp_path: Path) -> None:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert jaxkv.keep_programs(tmp_path / "given") == tmp_path / "given"
        assert now("compilation_cache_dir") == str(tmp_path / "given")

    def test_in_a_bucket_that_jax_reaches_by_itself(self) -> None:
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
        jaxkv.keep_programs()
        assert now("compilation_cache_dir") == "gs://bucket/programs"

    def test_nowhere_where_jax_was_told_so(self) -> None:
        jax.config.update("jax_enable_compilation_cache", False)
        assert jaxkv.keep_programs() is None
        assert now("compilation_cache_dir") is None

    def test_a_threshold_of_the_users_stays(self, monkeypatch) -> None:
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
        jaxkv.keep_programs()
        assert now("persistent_cache_min_compile_time_secs") == 1

    def test_what_is_no_path_is_refused(self) -> None:
        with pytest.raises(ValueError, match="folder must be a path or None, got ''"):
            jaxkv.keep_programs("")

    @pytest.mark.parametrize("chosen", [False, True])
    def test_a_folder_that_cannot_be_made_is_said_once(self, tmp_path: Path, capsys, chosen: bool) -> None:
        (tmp_path / "xla").write_text("a file in the folder's place")
        if chosen:
            jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
        assert [jaxkv.keep_programs(), jaxkv.keep_programs(tmp_path / "xla")] == [None, None]
        assert now("compilation_cache_dir") is None
        (line,) = capsys.readouterr().err.splitlines()
        assert str(tmp_path / "xla") in line
        assert "JAXKV_CACHE_DIR" in line

    def test_a_folder_that_can_only_be_read_is_read(self, tmp_path: Path, capsys, monkeypatch) -> None:
        def refuse(**where: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        assert jaxkv.keep_programs() == tmp_path / "xla"
        assert now("compilation_cache_dir") == str(tmp_path / "xla")
        assert now("persistent_cache_min_compile_time_secs") == float("inf")
        (line,) = capsys.readouterr().err.splitlines()
        assert "Permission denied" in line
        assert "are used" in line
