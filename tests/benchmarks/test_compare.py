"""`python -m benchmarks.compare`: real worker processes, whose engines are a few lines of Python, so that the command alone is tested."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import save_model

import jaxkv
from benchmarks import compare
from benchmarks.compare_report import plot
from benchmarks.engines import OURS, PEERS, Choice, Engine, EngineError, Missing, known, start
from benchmarks.limits import Speed

ADAPTER = """
import os, sys, time

class Engine:
    static, version = {static}, "1.0"

    def __init__(self, job):
        print("said by the engine")  # would break the protocol if it reached it
        self.seen = job.converted("copy", lambda path: open(path, "w").write(job.model))

    def run(self, prompts, new_tokens, rows, room):
        {body}
        return [[prompt[-1]] * count for prompt, count in zip(prompts, new_tokens)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def fake(path: Path, body: str = "pass", *, static: bool = False) -> Path:
    path.write_text(ADAPTER.format(static=static, body=body))
    return path


@pytest.fixture
def launch(tmp_path: Path):
    """Starts engines from the bodies of their `run`, loaded; ends them after the test."""
    engines = []

    def begin(name: str = "fake", body: str = "pass", *, static: bool = False, timeout: int = 30, load: bool = True) -> Engine:
        path = fake(tmp_path / f"{name}.py", body, static=static)
        engine = Engine(Choice.parse(f"{path}={sys.executable}"), threads=1, timeout=timeout)
        engines.append(engine)
        if load:
            job = {"model": "m", "dtype": "float32", "threads": 1, "rows": 4, "length": 64, "cache": str(tmp_path / "cache")}
            engine.ask("load", **job)
        return engine

    yield begin
    for engine in engines:
        engine.close()


def test_an_engine_answers_whatever_it_prints(launch) -> None:
    engine = launch(body="print('noise'); os.system('echo more noise')")
    reply = engine.ask("run", prompts=[[1, 2], [3]], new_tokens=[2, 1], rows=2, room=2)
    assert reply["tokens"] == [[2, 2], [3]]
    assert engine.version == "1.0"


def test_a_static_engine_gets_full_batches_as_long_as_their_longest_answer(launch) -> None:
    engine = launch(body="assert len(prompts) <= 2 and len(set(new_tokens)) == 1, new_tokens", static=True)
    reply = engine.ask("run", prompts=[[1], [2], [3]], new_tokens=[4, 1, 2], rows=2, room=4)
    assert reply["tokens"] == [[1] * 4, [2], [3] * 2]


def test_an_engine_out_of_turn_stands_still(launch, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    beat = f"[open({str(beats)!r}, 'a').write('x') and time.sleep(.01) for _ in range(10_000)]"
    begun = f"[time.sleep(.01) for _ in iter(lambda: os.path.exists({str(beats)!r}), True)]"
    body = f"import threading; threading.Thread(target=lambda: {beat}, daemon=True).start(); {begun}"
    launch(body=body).ask("run", prompts=[[1]], new_tokens=[1], rows=1, room=1)
    time.sleep(0.1)  # the signal that stops it is on its way
    before = beats.stat().st_size
    time.sleep(0.2)
    assert beats.stat().st_size == before > 0


def test_a_conversion_is_done_once_and_is_whole(launch, tmp_path: Path) -> None:
    launch()
    made = tmp_path / "cache" / "copy"
    assert made.read_text() == "m"
    made.write_text("kept")
    launch()
    assert made.read_text() == "kept"
    assert [path.name for path in made.parent.iterdir()] == ["copy"]


@pytest.mark.parametrize(
    "body, said",
    [
        ("raise ValueError('no such\\\\nthing')", "ValueError: no such"),
        ("os._exit(7)", "ended with status 7"),
        ("return [[1]] * len(prompts)", "made [1] tokens instead of [2]"),
    ],
)
def test_what_goes_wrong_in_an_engine_is_one_line(launch, body: str, said: str) -> None:
    with pytest.raises(EngineError) as caught:
        launch(body=body).ask("run", prompts=[[1]], new_tokens=[2], rows=1, room=2)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_that_hangs_is_ended(launch) -> None:
    engine = launch(body="time.sleep(60)", timeout=1)
    for said in ("no answer within 1 s", "ended with status -9"):
        with pytest.raises(EngineError, match=said):
            engine.ask("run", prompts=[[1]], new_tokens=[1], rows=1, room=1)


def test_one_that_is_not_installed_is_skipped_unless_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text("import no_such_package")
    choice = Choice.parse(str(tmp_path / "absent.py"))
    with pytest.raises(Missing, match="no_such_package"):
        Engine(choice, threads=1, timeout=30)
    engines, skipped = start([choice], asked=False, threads=1, timeout=30)
    assert (engines, list(skipped)) == ({}, ["absent"])
    with pytest.raises(ValueError, match=r"absent does not run in .*: ModuleNotFoundError"):
        start([choice], asked=True, threads=1, timeout=30)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "measure_speed", lambda dtype, before=None: Speed(1e9, 1e9))


def test_the_command_from_end_to_end(folder: Path, tmp_path: Path, quick, capsys) -> None:
    peer = fake(tmp_path / "echo.py")
    grid = ["--batch-sizes", "2", "--prompt-lengths", "5", "--ragged-rows", "", "--new-tokens", "4", "--repeats", "1"]
    where = ["--model", str(folder), "--cache", str(tmp_path / "cache"), "--plot", str(tmp_path / "plot.png")]
    assert compare.main([*where, *grid, "--dtypes", "float32", "--peer", str(peer), "--json"]) == 0
    (part,) = json.loads(capsys.readouterr().out)["dtypes"]
    (cell,) = part["cells"]
    assert set(cell["engines"]) == {OURS, "echo"}
    ours = cell["engines"][OURS]
    assert ours["decode_share"] == pytest.approx(cell["decode_limit"]["seconds"] / ours["step_seconds"])
    assert ours["same_tokens"] == 1.0
    assert part["engines"]["echo"]["version"] == "1.0"
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert [path.name for path in (tmp_path / "cache").glob("*/hf/*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("name", [OURS, pytest.param("transformers", marks=pytest.mark.torch)])
def test_an_adapter_gives_the_tokens_of_the_cacheless_oracle(name: str, folder: Path, tmp_path: Path) -> None:
    model, _ = jaxkv.load(folder)
    prompts, answers = [[5, 6, 7], [9] * 9, [30, 31]], [3, 2, 4]
    engine = Engine(Choice(name, PEERS / f"{name}.py", sys.executable), threads=1, timeout=120)
    try:
        job = {"dtype": "float32", "threads": 1, "rows": 2, "length": 16, "cache": str(tmp_path)}
        engine.ask("load", model=str(folder), **job)
        tokens = engine.ask("run", prompts=prompts, new_tokens=answers, rows=2, room=4)["tokens"]
    finally:
        engine.close()
    for prompt, count, found in zip(prompts, answers, tokens):
        naive, _ = jaxkv.generate_naive(model, [prompt], max_new_tokens=count)
        assert np.asarray(naive)[0].tolist() == found


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--peer", "nothing"], "no peer 'nothing'"),
        (["--peer", "no/such/file.py"], "no adapter at no/such/file.py"),
        (["--peer", "vllm=no/such/python"], "no interpreter 'no/such/python' for vllm"),
        (["--peer", "vllm", "--peer", "vllm"], "--peer vllm is there twice"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--threads", "1000"], "the processors of this process, got 1000"),
        (["--batch-sizes", "", "--ragged-rows", ""], "nothing to run"),
        (["--plot", "no/such/folder/x.png"], "no such folder"),
        (["--prompt-lengths", "128"], "768 tokens of prompt and answer, but the model allows 128"),
        (["--batch-sizes", "1,x"], "positive integers with commas between them, got '1,x'"),
        (["--dtypes", "int8"], "got 'int8'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_started(arguments, said, folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(compare, "start", lambda *_, **__: pytest.fail("an engine was started"))
    try:
        status = compare.main(["--model", str(folder), *arguments])
    except SystemExit as left:  # argparse's own
        status = left.code
    captured = capsys.readouterr()
    assert status == 2
    assert said in captured.err
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    assert compare.main(["--model", str(folder), "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*known(), OURS])
def test_every_adapter_says_how_it_is_installed(name: str) -> None:
    text = (PEERS / f"{name}.py").read_text()
    assert name == OURS or "\npip install " in text
    assert "static = " in text
    assert "version = " in text


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process of its parent's death")
    path = fake(tmp_path / "fake.py")
    code = (
        "import os, sys; from benchmarks.engines import *\n"
        f"engine = Engine(Choice.parse({str(path)!r}), threads=1, timeout=30)\n"
        "print(engine._process.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.05)
    pytest.fail("it lives on, stopped")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_plot_of_dtypes_with_different_workloads(tmp_path: Path) -> None:
    """Regression: figures whose ragged requests ran in one dtype could not be drawn."""
    report = json.loads((Path(__file__).parents[2] / "docs" / "compare.json").read_text())
    narrow = report["dtypes"][1]
    narrow["cells"] = [cell for cell in narrow["cells"] if cell["kind"] != "ragged"]
    assert [any(cell["kind"] == "ragged" for cell in part["cells"]) for part in report["dtypes"]] == [True, False]
    plot(report, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()  # a title is a comment beside its outlines
    assert "decode, bfloat16" in drawn and "ragged, float32" in drawn and "ragged, bfloat16" not in drawn
