"""`jaxkv chat` out of a pipe, and at a terminal (a pseudo-terminal, in a process of its own)."""

import io
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import END, save_model

import jaxkv
from jaxkv.cli.chat import longest_answer
from jaxkv.cli.main import main
from jaxkv.cli.worker import Worker
from jaxkv.weights.generation_defaults import GenerationDefaults

NEW = 6
LIMIT = f"jaxkv chat: stopped after {NEW} tokens (--max-new-tokens)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that hardly ever ends an answer by itself."""
    return save_model(tmp_path_factory.mktemp("chat"), chat=True, max_seq_len=256)


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.cli.chat.keep_programs", lambda: None)


@pytest.fixture
def talk(capsys, folder: Path, monkeypatch):
    def run(*lines: str, status: int = 0, options: tuple = ()) -> tuple[list[str], list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["chat", "--model", str(folder), "--max-new-tokens", str(NEW), *map(str, options)]
        assert main(arguments) == status
        captured = capsys.readouterr()
        return captured.out.split("\n")[:-1], captured.err.splitlines()

    return run


def expected(folder: Path, chat: list[tuple[str, str]], **options) -> str:
    """The answer to a history, by `generate`."""
    model, tokenizer = jaxkv.load(folder)
    messages = [{"role": role, "content": content} for role, content in chat]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END))
    out = jaxkv.generate(model, [tokens], max_new_tokens=NEW, eos_token_id=ends, **options)
    return tokenizer.decode(out.tokens[0, 0, : out.lengths[0, 0]], skip_special_tokens=True)


def test_each_line_is_a_turn_of_one_conversation(talk, folder: Path) -> None:
    out, err = talk("Hello", "", "And you?")
    text = "\n".join(out)
    first = expected(folder, [("user", "Hello")])
    second = expected(folder, [("user", "Hello"), ("assistant", first), ("user", "And you?")])
    assert text == f"{first}\n{second}"
    assert {*err} <= {LIMIT}


def test_an_answer_that_reached_its_limit_says_so(talk, folder: Path) -> None:
    out, err = talk("Hello")
    assert err == [LIMIT]


def test_reset_forgets_and_help_and_exit_do_what_they_say(talk) -> None:
    once, _ = talk("Hello")
    out, err = talk("Hello", "/reset", "Hello", "/help", "/sing", "/exit", "Hello")
    assert out == once * 2
    assert any(line.startswith("/reset") for line in err)
    assert sum("there is no /sing" in line for line in err) == 1


def test_a_message_may_begin_with_a_slash(talk, folder: Path) -> None:
    out, _ = talk("//etc")
    assert "\n".join(out) == expected(folder, [("user", "/etc")])


def test_the_system_message_is_part_of_every_turn(talk, folder: Path) -> None:
    out, _ = talk("Hello", options=("--system", "be brief"))
    assert "\n".join(out) == expected(folder, [("system", "be brief"), ("user", "Hello")])


def test_a_full_context_drops_the_oldest_turns_and_says_so(talk, folder: Path) -> None:
    lines = [f"message {i} " + "x" * 20 for i in range(4)]
    out, err = talk(*lines, options=("--context", 128))
    assert {*err} == {LIMIT, "jaxkv chat: the context is full: the oldest turn is forgotten"}
    assert len(out) >= len(lines)


def test_the_seed_decides_what_is_sampled_and_a_question_asked_again_is_answered_anew(talk) -> None:
    options = ("--temperature", 2, "--seed")
    once, (twice, again, other) = (
        talk("Hello", options=(*options, 1))[0],
        [talk("Hello", "/reset", "Hello", options=(*options, seed))[0] for seed in (1, 1, 2)],
    )
    assert twice == again
    assert twice != other
    assert twice[: len(once)] == once
    assert twice[len(once) :] != once


def failed(capsys, *arguments: object) -> str:
    try:
        status = main(["chat", *map(str, arguments)])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", 1000), "--context 1000 is too many: the model allows 256 tokens"),
        (("--context", 2), "--context: must be an integer >= 16"),
        (("--max-new-tokens", 250), "--max-new-tokens 250 leaves no room for a message in a conversation of 256 tokens"),
        (("--temperature", -1), "temperature must be >= 0"),
        (("--page-size", 0), "--page-size"),
    ],
)
def test_mistakes_are_one_line(capsys, folder: Path, options: tuple, message: str) -> None:
    assert message in failed(capsys, "--model", folder, *options)


def test_a_model_without_a_chat_template_is_refused_with_the_way_out(capsys, tmp_path: Path) -> None:
    line = failed(capsys, "--model", save_model(tmp_path))
    assert "no chat template" in line
    assert "jaxkv generate" in line


def test_a_message_without_room_ends_a_pipe(talk) -> None:
    _, err = talk("x" * 300, status=2)
    assert "there is room for 250" in err[-1]


def test_an_answer_has_room_for_its_question() -> None:
    assert longest_answer(None, 2048, GenerationDefaults()) == 256
    assert longest_answer(None, 100, GenerationDefaults()) == 50
    assert longest_answer(None, 2048, GenerationDefaults(max_new_tokens=64)) == 64
    assert longest_answer(80, 100, GenerationDefaults()) == 80


class TestWorker:
    def test_it_gives_what_the_generator_gives_and_its_result(self) -> None:
        def work():
            yield 1
            yield 2
            return "done"

        worker = Worker(work())
        assert list(worker) == [1, 2]
        assert list(worker) == []
        assert worker.result == "done"

    def test_an_error_is_raised_where_it_is_waited_for(self) -> None:
        def work():
            yield 1
            raise KeyError("x")

        worker, given = Worker(work()), []
        with pytest.raises(KeyError):
            given.extend(worker)

    def test_stopping_closes_the_generator(self) -> None:
        closed = []

        def work():
            try:
                while True:
                    yield time.sleep(0.001)
            finally:
                closed.append(True)

        worker = Worker(work())
        next(iter(worker))
        worker.stop()
        list(worker)
        assert closed == [True]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
class TestTerminal:
    @pytest.fixture
    def terminal(self, tmp_path: Path):
        """`jaxkv chat` at a terminal, with a model whose answers are long, and what is read from it until some text comes."""
        folder = save_model(tmp_path / "long", chat=True, max_seq_len=100_000, eos_token_ids=())
        environment = {**os.environ, "JAXKV_CACHE_DIR": str(tmp_path / "cache"), "TERM": "dumb", "JAXKV_PROGRESS": "0"}
        start = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from jaxkv.cli.main import main; sys.exit(main())"
        )
        options = ["--context", "50000", "--max-new-tokens", "40000"]
        command = [sys.executable, "-c", start, "chat", "--model", str(folder), *options]
        ours, theirs = os.openpty()
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        ) as process:
            os.close(theirs)
            try:
                yield process, ours
            finally:
                process.kill()
                os.close(ours)

    @staticmethod
    def until(ours: int, text: str, seen: str = "") -> str:
        end = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < end, seen[-500:]
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
        return seen.partition(text)[2]

    @staticmethod
    def interrupt(process: subprocess.Popen) -> None:
        """Ctrl-C once the main thread waits: readline notices none that comes between its prompt and its waiting."""
        stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
        time.sleep(0.1 if stat.exists() else 1.0)
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)

    def test_ctrl_c_stops_the_answer_and_a_second_one_the_program(self, terminal) -> None:
        process, ours = terminal
        rest = self.until(ours, "> ")
        for _ in range(2):  # the conversation goes on after an answer was stopped
            os.write(ours, b"Hello\n")
            rest = self.until(ours, "Hello", rest)
            while len(rest) < 40:  # the answer has begun
                assert select.select([ours], [], [], 120)[0]
                rest += os.read(ours, 4096).decode(errors="replace")
            process.send_signal(signal.SIGINT)
            rest = self.until(ours, "\n> ", rest)
        self.interrupt(process)
        assert process.wait(timeout=30) == 130

    def test_ctrl_d_ends_it(self, terminal) -> None:
        process, ours = terminal
        rest = self.until(ours, "> ")
        self.interrupt(process)
        rest = self.until(ours, "> ", self.until(ours, "Ctrl-C again, or Ctrl-D, ends", rest))
        os.write(ours, b"/help\n")
        self.until(ours, "> ", self.until(ours, "/reset", rest))  # before the prompt, Ctrl-D would be lost in the terminal
        os.write(ours, b"\x04")
        assert process.wait(timeout=30) == 0
