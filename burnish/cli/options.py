"""`CONFIG [KEY=VALUE ...]`, the arguments that every command with a configuration takes, and `--resume` of those that train."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.loader import Resolved
    from burnish.config.tuning import RunConfig

AnyConfig = TypeVar("AnyConfig", bound="RunConfig")
"""What a run is described by."""
NEWEST = "newest"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the configuration file and the overrides; `load` reads them."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of options; without it, the defaults")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", default=[], help="override, e.g. training.max_steps=20")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a command that trains; `resumed_step` reads the last, before `load`."""
    add_config_arguments(parser)
    help_text = "go on with the run in the folder, from its newest checkpoint or from STEP"
    parser.add_argument("--resume", nargs="?", const=NEWEST, metavar="STEP", help=help_text)


def load(args: argparse.Namespace, schema: type[AnyConfig]) -> Resolved[AnyConfig]:
    """The configuration that the arguments and the environment describe; its notes go to stderr."""
    from burnish.config import loader

    no_file = args.config and "=" in args.config and not Path(args.config).is_file()
    overrides = [args.config, *args.overrides] if no_file else args.overrides
    resolved = loader.load(schema, Path(args.config) if args.config and not no_file else None, overrides, os.environ)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    return resolved


def resumed_step(args: argparse.Namespace) -> int | None:
    """The step to go on from; None for the newest, or for a new run.

    argparse takes the word behind a bare `--resume` for its value: one that is no step is the file, or an override.
    """
    if args.resume is None or args.resume == NEWEST:
        return None
    if args.resume.isdecimal():
        return int(args.resume)
    if "=" in args.resume:
        args.overrides = [*args.overrides, args.resume]
    elif Path(args.resume).is_file():
        args.overrides = [*([args.config] if args.config else []), *args.overrides]
        args.config = args.resume
    else:
        raise UserError(f"--resume {args.resume!r} is neither a step (a whole number; without one the newest) nor a configuration file")
    args.resume = NEWEST
    return None
