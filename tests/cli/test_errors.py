"""Whatever comes in, what goes out is one line and an exit status, never a traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import byte_tokenizer, save_model

import jaxkv
from jaxkv.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.cli.generate.keep_programs", lambda: None)
    monkeypatch.setattr("jaxkv.cli.inspect.keep_programs", lambda: None)


def failed(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    """Runs a command that must fail with nothing on stdout and one line on stderr; returns the line."""
    try:
        found = main([*map(str, arguments)])
    except SystemExit as exit_:
        found = exit_.code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert found == status, captured.err
    return captured.err


TEMPLATES = {
    "raises": ("{{ raise_exception('a system message is required') }}", "TemplateError: a system message is required"),
    "is no template": ("{% for %}", "TemplateSyntaxError"),
    "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "adds what cannot be added": ("{{ 1 + 'a' }}", "TypeError"),
    "uses what is not there": ("{{ messages[0]['text'].strip() }}", "UndefinedError"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_fails(capsys, folder: Path, name: str) -> None:
    template, message = TEMPLATES[name]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    line = failed(capsys, "generate", "Hi", "--model", folder)
    assert "the model's chat template fails for user" in line
    assert message in line
    assert "raw" in line


def test_a_model_without_a_tokenizer(capsys, folder: Path) -> None:
    """As `save` writes it when no tokenizer is given; once an attribute of None was asked for."""
    for path in folder.glob("*token*"):
        path.unlink()
    for command in ("generate", "inspect"):
        line = failed(capsys, command, "Hi", "--model", folder)
        assert f"{folder} holds no tokenizer: save one along, with jaxkv.save(model, folder, tokenizer=tokenizer)" in line


BROKEN = {
    "tokenizer cut off": ("tokenizer.json", b'{"version', "tokenizer.json is not valid JSON"),
    "tokenizer of bytes": ("tokenizer.json", b"\xff\xfe\x00", "tokenizer.json is not valid JSON"),
    "configuration empty": ("config.json", b"", "config.json is not valid JSON"),
    "configuration nested without end": ("config.json", b"[" * 100_000, "config.json is not valid JSON"),
    "configuration with a number of 5,000 digits": (
        "config.json",
        b'{"a": ' + b"1" * 5000 + b"}",
        "config.json is not valid JSON",
    ),
    "configuration of null": ("config.json", b"null", "config.json holds NoneType, expected an object"),
    "generation configuration cut off": ("generation_config.json", b'{"eos', "generation_config.json is not valid JSON"),
    "weights cut off": ("model.safetensors", b"\x00" * 20, "model.safetensors is not a whole safetensors file"),
    "weights of JSON": ("model.safetensors", b"{}", "model.safetensors is not a whole safetensors file"),
    "index of a list": ("model.safetensors.index.json", b"[]", "model.safetensors.index.json holds list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(capsys, folder: Path, name: str) -> None:
    file, content, message = BROKEN[name]
    if "index" in file:
        (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content)
    assert message in failed(capsys, "generate", "Hi", "--model", folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_where_a_file_should_be(capsys, folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert str(folder) in failed(capsys, "generate", "Hi", "--model", folder)


def test_a_folder_named_like_the_generation_configuration_is_none(folder: Path) -> None:
    before = jaxkv.load(folder)[0].config
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").mkdir()
    assert jaxkv.load(folder)[0].config == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": "x"}, "generation_config.json: eos_token_id must be a token id"),
        ({"pad_token_id": [1, 2]}, "generation_config.json: pad_token_id must be a token id"),
    ],
)
def test_a_broken_field_of_the_generation_configuration(capsys, folder: Path, fields: dict, message: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert message in failed(capsys, "generate", "Hi", "--model", folder)


ARGUMENTS = {
    "a seed beyond 64 bits": (["Hi", "--seed", 2**63], "--seed: must be an integer <= 9223372036854775807"),
    "a top-k beyond 32 bits": (["Hi", "--top-k", 2**40], "--top-k: must be an integer <= 2147483647"),
    "a page of too many tokens": (["Hi", "--page-size", 10**12], "--page-size: must be an integer <= 2147483647"),
    "a number of too many digits": (["Hi", "--top-k", "9" * 5000], "--top-k: must be an integer"),
    "bytes that are no UTF-8": (["H\udcff"], "prompt 1 is not UTF-8: 'H\\udcff'"),
    "a model of nothing": (["Hi", "--model", ""], "must be a hub id, a folder or a .gguf file, got ''"),
    "a model that is a device": (["Hi", "--model", "/dev/null"], "/dev/null"),
    "a name of too many characters": (["Hi", "--model", "x" * 5000], "x"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_out_of_range(capsys, name: str) -> None:
    arguments, message = ARGUMENTS[name]
    assert message in failed(capsys, "generate", *arguments)


@pytest.mark.parametrize("options", [{"--page-size": 2**31 - 1, "--num-pages": 2**31 - 1}, {"--page-size": 2**31 - 1}])
def test_a_pool_that_no_memory_holds(capsys, folder: Path, options: dict[str, int]) -> None:
    """Of a pool whose bytes it cannot count XLA ends the whole process."""
    for command in ("generate", "inspect"):
        given = [x for pair in options.items() for x in pair]
        assert "(--page-size) need" in failed(capsys, command, "Hi", "--model", folder, *given)


def test_a_picture_is_refused_before_any_work(capsys, tmp_path: Path) -> None:
    line = failed(capsys, "inspect", "Hi", "--model", "no-such-model/at-all", "--html", tmp_path / "none" / "a.html")
    assert "there is no folder" in line


def test_what_nobody_foresaw_is_one_line_and_status_1(capsys, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*_: object) -> None:
        raise KeyError("odd\nthing")

    monkeypatch.setattr("jaxkv.cli.generate.open_with_tokenizer", fail)
    line = failed(capsys, "generate", "Hi", "--model", folder, status=1)
    assert "error: KeyError: " in line
    assert "JAXKV_TRACEBACK=1 shows where" in line
    monkeypatch.setenv("JAXKV_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["generate", "Hi", "--model", str(folder)])


def run_in_shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "JAXKV_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    line = line.replace("jaxkv", f"{sys.executable} -m jaxkv", 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", ["", *(pytest.param(x, marks=pytest.mark.slow) for x in ("--json", "'two prompts'"))])
def test_a_full_disk(more: str, model: Path, tmp_path: Path) -> None:
    done = run_in_shell(f"jaxkv generate Hi {more} --max-new-tokens 2 --model {model} > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1] == "jaxkv generate: error: [Errno 28] No space left on device"
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("line", "status"),
    [
        pytest.param("jaxkv --help > /dev/full", None, marks=pytest.mark.slow),  # argparse says nothing about it
        pytest.param("jaxkv --version | true; exit ${PIPESTATUS[0]}", None, marks=pytest.mark.slow),
        ("jaxkv generate >&- 2>&- <&-", 2),
        pytest.param("jaxkv generate Hi --model /nowhere 2> /dev/full", 2, marks=pytest.mark.slow),
        ("printf '\\377' | PYTHONUTF8=1 jaxkv generate", 2),
    ],
)
def test_streams_that_are_closed_full_or_odd(line: str, status: int | None, tmp_path: Path) -> None:
    done = run_in_shell(line, tmp_path)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1
    assert status is None or done.returncode == status, done
    assert done.returncode in (0, 2, 141)


@pytest.mark.slow
def test_letters_the_terminal_cannot_show(model: Path, tmp_path: Path) -> None:
    done = run_in_shell(f"PYTHONIOENCODING=ascii jaxkv generate é 世界 --max-new-tokens 2 --model {model}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"[1/2] ?\n" in done.stdout
