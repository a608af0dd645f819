"""The command line: `jaxkv generate`, `jaxkv chat`, `jaxkv bench`, `jaxkv inspect`.

Results go to stdout, everything else to stderr. A mistake of the caller's is one line and exit status 2, anything else that goes
wrong one line and status 1; JAXKV_TRACEBACK=1 shows where it was raised. Ctrl-C ends with status 130, a closed pipe with 141.
"""

import argparse
import contextlib
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from jaxkv.cli.arguments import OneLineParser, build_parser, check_command
from jaxkv.cli.worker import WORKER

__all__ = ["OneLineParser", "build_parser", "main"]

LONGEST_MESSAGE = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments without the program's name; None takes the process's.

    Returns:
      The exit status: 0, 2 after a mistake of the caller's, or 1.
    """
    name = "jaxkv"
    _prepare_streams()
    try:
        try:
            parser, argv = build_parser(), sys.argv[1:] if argv is None else argv
            check_command(parser, argv)
            args = parser.parse_args(argv)
            name = f"jaxkv {args.command}"
            status = _run(args)
        finally:
            sys.stdout.flush()  # here a full disk or a closed pipe is still noticed
        return status
    except KeyboardInterrupt:
        _say(f"\n{name}: stopped")
        _leave(130)
    except BrokenPipeError:
        _leave(141)
    except (ValueError, OSError, NotImplementedError) as error:
        return _failed(name, str(error), error, 2)
    except Exception as error:  # whatever it is, a user of the command line has no use for where it was raised
        return _failed(name, f"{type(error).__name__}: {error} (JAXKV_TRACEBACK=1 shows where)", error, 1)


def _run(args: argparse.Namespace) -> int:
    """The chosen command; only its own modules are imported."""
    if args.command == "generate":
        from jaxkv.cli.generate import run
    elif args.command == "chat":
        from jaxkv.cli.chat import run
    elif args.command == "inspect":
        from jaxkv.cli.inspect import run
    else:
        from jaxkv.cli.bench import run
    return run(args)


def _prepare_streams() -> None:
    """Streams that are closed read and write nothing; characters that the terminal's encoding lacks become question marks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until the process ends)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _failed(name: str, message: str, error: Exception, status: int) -> int:
    if os.environ.get("JAXKV_TRACEBACK"):
        raise error
    line = "; ".join(x.strip() for x in message.splitlines() if x.strip())
    _say(f"{name}: error: {line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + '…'}")
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what could not be written would be tried, and complained about, once more at the end
        _leave(status)
    if any(thread.name == WORKER for thread in threading.enumerate()):
        _leave(status)
    return status


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _leave(status: int) -> NoReturn:
    # A computation that runs on another thread cannot be cancelled: the interpreter would wait for it, or it would abort the
    # process when it comes to an end after the interpreter.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
