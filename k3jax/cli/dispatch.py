"""Runs one subcommand of `k3jax` and turns what goes wrong into an exit code.

A subcommand is a module of this package with two functions:

- `add_parser(subparsers)` declares its arguments and returns the parser;
- `run(args)` does the work and returns the exit code.

It imports JAX and everything else that is slow inside `run`, so that `k3jax --help` stays fast.
To add one, write the module and name it in `COMMANDS`.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from k3jax.engine.host import keep_freed_memory

COMMANDS = ("demo", "chat", "serve", "generate", "info", "convert", "version")

USAGE_ERROR = 2
INTERRUPTED = 128 + 2  # what a shell reports for a program ended by SIGINT
PIPE_CLOSED = 128 + 13  # the same for SIGPIPE

_EXAMPLES = """\
examples:
  k3jax demo                   what the bundled model can do
  k3jax chat k3-nano           talk to it in the terminal
  k3jax serve k3-nano          OpenAI's API on port 8000, gRPC on 50051
  k3jax generate k3-nano --prompt "What is 12+30?"
  k3jax info WEIGHTS           what a model folder holds
  k3jax convert SRC DST        the same model in the native or the released format
  k3jax version                what is installed, and the devices that JAX sees
  k3jax COMMAND --help         the options of one command, with examples
"""


def main(argv: Sequence[str] | None = None, *, commands: Sequence[str] = COMMANDS) -> int:
    """Run `k3jax` with `argv` (default: the process's arguments) and return its exit code.

    `commands` names the modules of this package that can be run.

    Errors that a user can cause (`ValueError`, `OSError`) become one line on stderr and exit
    code 2; with `--debug` the traceback comes first. Any other exception is a defect of k3jax and
    propagates. Ctrl-C ends with 130, a reader that closed the pipe with 141, both silently.
    """
    parser = _build_parser(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    keep_freed_memory()
    try:
        code = args.run(args)
        print(end="", flush=True)  # a closed pipe must show here, not at interpreter exit
        return code
    except KeyboardInterrupt:
        if args.debug:
            traceback.print_exc()
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more on exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        print(f"k3jax: error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line; keeps the line breaks of descriptions and examples."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"k3jax: error: {message} (see `{self.prog} --help`)\n")


def _build_parser(commands: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="k3jax",
        description="Exact, fast Kimi K3 inference in JAX.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in commands:
        module = importlib.import_module(f"k3jax.cli.{name}")
        command = module.add_parser(subparsers)
        # SUPPRESS: a `--debug` given before the command must survive this parser's default.
        command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        command.set_defaults(run=module.run)
    return parser


def _one_line(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
