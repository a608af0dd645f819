"""What each command takes: argument parsers, and with them the help."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from jaxkv import __version__

MOST = 2**31 - 1
SEED = (-(2**63), 2**63 - 1)
DTYPES = ("float32", "bfloat16", "float16")


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text above every error."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(least: int, most: int = MOST):
    """An argparse type: an integer in a range."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        if number > most:
            raise argparse.ArgumentTypeError(f"must be an integer <= {most}, got {text!r}")
        return number

    return convert


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: positive integers with commas between them."""
    return tuple(whole_number(1)(part) for part in text.split(","))


COMMANDS = ("generate", "chat", "bench", "inspect")
_NOT_YET = {"serve": "there is no server yet"}


def check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """End with one line, and exit status 2, where the first word is no command."""
    if not argv:
        parser.error(f"a command is missing: {', '.join(COMMANDS)}")
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        what = _NOT_YET.get(argv[0], "there is no such command")
        parser.error(f"{argv[0]!r}: {what}. The commands are {', '.join(COMMANDS)}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the chosen one is `args.command`."""
    parser = OneLineParser(prog="jaxkv", description="LLM inference in JAX with a paged KV cache.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    _add_generate(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_inspect(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="default",
        metavar="NAME",
        help="hub id, folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the model's own choice)")
    parser.add_argument("--page-size", type=whole_number(1), default=16, metavar="N", help="tokens a page holds (default: 16)")


def _model_says(otherwise: int) -> str:
    return f"(default: as the model's generation_config.json says, or {otherwise})"


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """How answers are made: what the model's `generation_config.json` decides where nothing is typed, and the seed."""
    for name, kind, value, what in (
        ("--temperature", float, "T", f"0 is greedy {_model_says(0)}"),
        ("--top-k", whole_number(0), "K", f"only the K most probable; 0 is all {_model_says(0)}"),
        ("--top-p", float, "P", f"only the most probable that make up P {_model_says(1)}"),
        ("--min-p", float, "P", f"only those at least P times as probable as the first {_model_says(0)}"),
    ):
        parser.add_argument(name, type=kind, metavar=value, help=what)
    parser.add_argument("--seed", type=whole_number(*SEED), default=0, metavar="N", help="of the sampling (default: 0)")
    parser.add_argument(
        "--max-new-tokens",
        type=whole_number(1),
        metavar="N",
        help="longest answer (default: as the model's generation_config.json says, or 256; or the room left)",
    )


def _add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="write text that goes on from prompts",
        description="Writes what a model makes of one or several prompts, as it makes it.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; '-' is all of stdin, as one prompt")
    _add_model(parser)
    parser.add_argument("--raw", action="store_true", help="take the prompts as they are, without the model's chat template")
    _add_sampling(parser)
    parser.add_argument(
        "--num-samples",
        type=whole_number(1),
        metavar="N",
        help=f"answers to each prompt, which share its pages {_model_says(1)}",
    )
    parser.add_argument(
        "--num-pages",
        type=whole_number(1),
        metavar="N",
        help="pages in the pool, null page included (default: enough)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_chat(commands) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="A conversation: a line is a message, the answer appears as it is made, and what was said before is remembered. "
        "Ctrl-C stops an answer, Ctrl-D ends the conversation, /help says what else there is. Without a terminal, each line of stdin "
        "is a message.",
        allow_abbrev=False,
    )
    _add_model(parser)
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told before the conversation (default: as its template)"
    )
    parser.add_argument(
        "--context",
        type=whole_number(16),
        metavar="N",
        help="tokens of the conversation; when it is full, the oldest turns are dropped (default: 2048, or the model's length)",
    )
    _add_sampling(parser)


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measures this machine.", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=OneLineParser)
    decode = kinds.add_parser(
        "decode",
        help="prefill and decode speed",
        description="Prefill and decode tokens/s over batch sizes and context lengths, and the memory-bandwidth limit.",
        allow_abbrev=False,
    )
    _add_model(decode)
    decode.add_argument("--batch-sizes", type=whole_numbers, default=(1, 8), metavar="N,N", help="rows (default: 1,8)")
    decode.add_argument(
        "--context-lengths",
        type=whole_numbers,
        default=(128, 512),
        metavar="N,N",
        help="prompt tokens per row (default: 128,512)",
    )
    decode.add_argument(
        "--new-tokens", type=whole_number(8), default=64, metavar="N", help="tokens decoded per row (default: 64)"
    )
    decode.add_argument("--repeats", type=whole_number(1), default=3, metavar="N", help="runs; the median counts (default: 3)")
    decode.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _add_inspect(commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="draw the pages of a cache at work",
        description="Generates, and draws the page map and block tables along the way.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a prompt, taken as it is")
    _add_model(parser)
    for name, default, what in (
        ("--max-new-tokens", 32, "longest answer"),
        ("--num-samples", 1, "answers to each prompt, which share its pages"),
        ("--moments", 1, "pictures along the way; 1 is the fullest moment"),
        ("--max-seqs", None, "rows that work at a time"),
        ("--num-pages", None, "pages in the pool, null page included"),
    ):
        note = "enough" if default is None else default
        parser.add_argument(name, type=whole_number(1), default=default, metavar="N", help=f"{what} (default: {note})")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=whole_number(*SEED), default=0, metavar="N", help="of the sampling (default: 0)")
    parser.add_argument("--html", metavar="FILE", help="also write all moments as a slider")
