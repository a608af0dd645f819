import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compilations import compilations
from tiny import byte_tokenizer, save_model

import jaxkv
from jaxkv.cli.main import main
from jaxkv.cli.progress import Clock

NEW = 8
FIGURES = re.compile(
    r"prompt: \d+ tokens.* \| decode: \d+ tokens.* \| pages: \d+ of \d+ tokens \| compile: \d+\.\d s \| kernels: \w+.*$"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.cli.generate.keep_programs", lambda: None)


def generate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main(["generate", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def generate_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    return json.loads(generate(capsys, *arguments, "--json")[0])


def test_text_on_stdout_and_figures_as_the_last_line_of_stderr(capsys, folder) -> None:
    out, err = generate(capsys, "Hello", "--model", folder, "--max-new-tokens", NEW)
    assert out.endswith("\n")
    assert "\ufffd" not in out
    assert FIGURES.match(err.splitlines()[-1])


def test_json_is_all_of_stdout(capsys, folder) -> None:
    report = generate_json(capsys, "Hello", "Good bye", "--model", folder, "--max-new-tokens", NEW)
    assert [r["prompt"] for r in report["results"]] == ["Hello", "Good bye"]
    tokenizer = byte_tokenizer()
    for result in report["results"]:
        assert result["finish_reason"] in ("stop", "length")
        assert len(result["token_ids"]) == len(result["logprobs"]) <= NEW
        assert (len(result["token_ids"]) == NEW) or result["finish_reason"] == "stop"
        assert max(result["logprobs"]) <= 0
        assert result["prompt_token_ids"] == tokenizer(result["prompt"])["input_ids"]
        decoded = tokenizer.decode(result["token_ids"], skip_special_tokens=True)
        assert result["text"] == decoded
    stats = report["stats"]
    assert stats["prompt_tokens"] == 13
    assert stats["generated_tokens"] == sum(len(r["token_ids"]) for r in report["results"])
    assert stats["page_size"] == 16
    assert stats["pages_used"] == 2
    assert stats["kernels"] == str(jaxkv.kernels())


def test_several_prompts_stand_below_their_titles_and_equal_those_alone(capsys, folder) -> None:
    options = ("--model", folder, "--max-new-tokens", NEW)
    alone = [generate(capsys, prompt, *options)[0] for prompt in ("one", "number two")]
    together, _ = generate(capsys, "one", "number two", *options)
    assert together == f"[1/2] one\n{alone[0]}\n[2/2] number two\n{alone[1]}"


def test_stdin_is_a_prompt(capsys, folder, monkeypatch) -> None:
    options = ("--model", folder, "--max-new-tokens", NEW)
    expected = generate_json(capsys, "two\nlines", *options)["results"]
    for arguments in (["-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
        assert generate_json(capsys, *arguments, *options)["results"] == expected


def test_the_seed_decides_what_is_sampled(capsys, folder) -> None:
    options = ("Hello", "--model", folder, "--max-new-tokens", NEW, "--temperature", 2, "--top-k", 50, "--top-p", 0.9)
    first, again, other = (generate_json(capsys, *options, "--seed", seed)["results"][0]["token_ids"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_another_prompt_and_another_limit_compile_nothing(capsys, folder) -> None:
    """A new process would find the same programs in the cache on disk (tests/programs/test_kept.py)."""
    generate(capsys, "One prompt", "--model", folder, "--max-new-tokens", NEW)
    with compilations() as programs:
        generate(capsys, "Another", "--model", folder, "--max-new-tokens", NEW + 3, "--seed", 5)
    assert [name for name in programs if "_start" in name or "take_steps" in name] == []


def test_the_clock_tells_prefill_and_decode_apart(monkeypatch) -> None:
    times = iter([0.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    monkeypatch.setattr("jaxkv.cli.progress.time.perf_counter", lambda: next(times))
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", lambda listener: None)
    clock = Clock()
    clock.ready = 5.0
    for prompt in (0, 0, 1, 0, 1):
        clock.token(prompt)
    figures = clock.figures(prompt_tokens=30)
    assert figures["compile_seconds"] == 5.0
    assert figures["prompt_tokens_per_second"] == 10.0  # 30 tokens until prompt 1 has its first, at 8.0
    assert figures["decode_tokens_per_second"] == 1.0  # two more tokens until 10.0


def unknown_family(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    return folder


def truncated_gguf(folder: Path) -> Path:
    (folder / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x01\x00")
    return folder / "short.gguf"


BAD_INPUT = {
    "missing file": (["Hi", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
    "unknown family": (["Hi", "--model", unknown_family], "nonsense"),
    "truncated gguf": (["Hi", "--model", truncated_gguf], "short.gguf"),
    "empty prompt": (["Hi", ""], "prompt 2 is empty"),
    "blank prompt": ([" \n"], "prompt 1 is empty"),
    "stdin twice": (["-", "-"], "more than once"),
    "negative temperature": (["Hi", "--temperature", "-1"], "temperature must be >= 0 and finite, got -1.0"),
    "temperature not a number": (["Hi", "--temperature", "nan"], "got nan"),
    "temperature not a word": (["Hi", "--temperature", "hot"], "'hot'"),
    "negative top-k": (["Hi", "--top-k", "-1"], "--top-k: must be an integer >= 0, got '-1'"),
    "top-p zero": (["Hi", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
    "top-p above one": (["Hi", "--top-p", "1.5"], "got 1.5"),
    "min-p above one": (["Hi", "--min-p", "2"], "got 2.0"),
    "page size zero": (["Hi", "--page-size", "0"], "--page-size: must be an integer >= 1, got '0'"),
    "pool of none": (["Hi", "--num-pages", "0"], "--num-pages: must be an integer >= 1, got '0'"),
    "no new tokens": (["Hi", "--max-new-tokens", "0"], "got '0'"),
    "unknown dtype": (["Hi", "--dtype", "int3"], "int3"),
    "unknown flag": (["Hi", "--colour"], "--colour"),
}


def failed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Runs a command that must end with status 2, nothing on stdout and one line on stderr; returns the line."""
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("jaxkv")
    return captured.err


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_that_names_it(capsys, tmp_path, name: str) -> None:
    arguments, message = BAD_INPUT[name]
    line = failed(capsys, ["generate", *[str(a(tmp_path)) if callable(a) else a for a in arguments]])
    assert "error: " in line
    assert message in line


def test_a_pool_too_small_says_how_many_pages_it_needs(capsys, folder) -> None:
    arguments = ["Hello", "--model", str(folder), "--max-new-tokens", str(NEW), "--page-size", "4"]
    for pages in (1, 2, 4):  # 5 + 8 tokens need 4, and the null page
        line = failed(capsys, ["generate", *arguments, "--num-pages", str(pages)])
        assert re.search(rf"\b{pages}\b.*\b5\b", line), line
    assert generate(capsys, *arguments, "--num-pages", 5)


def test_a_prompt_longer_than_the_model_allows(capsys, folder) -> None:
    line = failed(capsys, ["generate", "x" * 128, "--model", str(folder)])
    assert "128 tokens" in line
    assert "prompt 1" in line


def test_more_new_tokens_than_the_model_has_room_for(capsys, folder) -> None:
    line = failed(capsys, ["generate", "a", "Hello", "--model", str(folder), "--max-new-tokens", "124"])
    assert "124" in line
    assert "prompt 2 has 5 tokens" in line


def test_no_prompt_at_a_terminal(capsys, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert "no prompt given" in failed(capsys, ["generate"])


@pytest.mark.parametrize("arguments", [[], ["sing"], ["bench"], ["bench", "decode", "--batch-sizes", "1,zero"]])
def test_bad_commands(capsys, arguments: list[str]) -> None:
    assert "error: " in failed(capsys, arguments)


@pytest.fixture
def started(tmp_path: Path):
    """`jaxkv generate` in a process of its own, in the middle of a long answer."""
    folder = save_model(tmp_path / "long", max_seq_len=100_000, eos_token_ids=())
    environment = {**os.environ, "JAXKV_CACHE_DIR": str(tmp_path / "cache")}
    # A shell's background job ignores Ctrl-C, and its children would too: heed it, wherever the tests run.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jaxkv.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", start, "generate", "Hello", "--model", str(folder), "--max-new-tokens", "90000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1)
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_at_once_and_cleanly(started: subprocess.Popen) -> None:
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=30)
    assert started.returncode == 130
    assert err.decode().splitlines()[-1] == "jaxkv generate: stopped"
    assert b"Traceback" not in err


def test_a_closed_pipe_ends_it_without_a_word(started: subprocess.Popen) -> None:
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    assert started.wait(timeout=30) == 141
    assert b"Traceback" not in started.stderr.read()
