"""`CONFIG [KEY=VALUE ...]`, the arguments that every command with a configuration takes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.config.loader import Resolved
    from burnish.config.schema import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the configuration file and the overrides; `load` reads them."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of options; without it, the defaults")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", default=[], help="override, e.g. training.max_steps=20")


def load(args: argparse.Namespace) -> Resolved[Config]:
    """The configuration that the arguments and the environment describe; its notes go to stderr."""
    from burnish.config.loader import load_config

    no_file = args.config and "=" in args.config and not Path(args.config).is_file()
    resolved = load_config(None, [args.config, *args.overrides]) if no_file else load_config(args.config, args.overrides)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    return resolved
