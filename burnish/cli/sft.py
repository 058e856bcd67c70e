"""`burnish sft CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: supervised training as a configuration describes it.

A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step that is named.
"""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli.options import add_run_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("sft", help="train on conversations, prompts with completions, or texts", description=__doc__)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.cli.rows import run_rows
    from burnish.config.tuning import SFTConfig

    return run_rows(args, SFTConfig)
