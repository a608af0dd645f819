"""The command line: `jaxkv generate`, `jaxkv bench`, `jaxkv inspect`.

Results go to stdout, everything else to stderr. A mistake of the caller's is one line and exit status 2; JAXKV_TRACEBACK=1
shows where it was raised. Ctrl-C ends with status 130.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxkv.cli.arguments import build_parser


def _leave(status: int) -> NoReturn:
    # A computation that runs on another thread cannot be cancelled, and the interpreter would wait for it.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments without the program's name; None takes the process's.

    Returns:
      The exit status: 0, or 2 after a mistake of the caller's.
    """
    args = build_parser().parse_args(argv)
    name = f"jaxkv {args.command}"
    try:
        if args.command == "generate":
            from jaxkv.cli.generate import run
        elif args.command == "inspect":
            from jaxkv.cli.inspect import run
        else:
            from jaxkv.cli.bench import run
        return run(args)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        _leave(130)
    except BrokenPipeError:
        _leave(141)
    except (ValueError, OSError, NotImplementedError) as error:
        if os.environ.get("JAXKV_TRACEBACK"):
            raise
        print(f"{name}: error: {'; '.join(x.strip() for x in str(error).splitlines() if x.strip())}", file=sys.stderr)
        return 2
