"""The command `burnish`: finds the subcommand, runs it, turns errors into plain text and an exit code.

Exit codes: 0 done, 1 the run failed, 2 what was asked for can't be done, 75 a run was stopped by SIGTERM with its last step saved, 130
interrupted. An exception that is no `BurnishError` is a bug, ours or a plug-in's, and keeps its traceback. Command modules import what
they need inside `run`, so that `burnish --help` answers at once; each offers `add_parser(subparsers)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from burnish.cli import (
    chat,
    check,
    config,
    distill,
    dpo,
    eval,
    export,
    fetch,
    launch,
    play,
    report,
    reward_model,
    rewards,
    serve,
    sft,
    trace,
    train,
    watch,
)
from burnish.config.errors import BurnishError
from burnish.config.secrets import scrub

COMMANDS = {
    "fetch": fetch,
    "check": check,
    "train": train,
    "sft": sft,
    "dpo": dpo,
    "distill": distill,
    "reward-model": reward_model,
    "launch": launch,
    "eval": eval,
    "trace": trace,
    "watch": watch,
    "report": report,
    "chat": chat,
    "rewards": rewards,
    "play": play,
    "export": export,
    "serve": serve,
    "config": config,
}
"""Each command's module, in the order of the help; `add_parser` adds the parser of that name."""


class _Parser(argparse.ArgumentParser):
    """A parser, of the command or of a subcommand, that takes `--debug` and no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")


class _Version(argparse.Action):
    """Prints the installed version and leaves; looks it up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        parser.exit(message=f"burnish {version('burnish')}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = _Parser(prog="burnish", description="Post-training for language models in JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if os.getcwd() not in sys.path:  # as with `python -m`: `my_pkg.mod:fn` may name a package in the working directory
        sys.path.append(os.getcwd())
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough; nothing more may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BurnishError as error:
        print(scrub(traceback.format_exc()) if "debug" in args else f"{_label(sys.stderr)} {scrub(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception:
        text = traceback.format_exc()
        if scrub(text) == text:
            raise
        print(scrub(text), file=sys.stderr)
        return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """argparse knows no options with free names, so `--training.max_steps=20` comes back as unknown, to be taken as an override."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and not ("overrides" in args and all("=" in text for text in unknown)):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        args.overrides = [*args.overrides, *unknown]
    return args


def _label(stream: TextIO) -> str:
    return "\033[1;31merror:\033[0m" if stream.isatty() and "NO_COLOR" not in os.environ else "error:"
