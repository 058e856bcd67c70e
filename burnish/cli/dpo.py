"""`burnish dpo CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: preference training, by DPO or one of its kin.

A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step that is named.
"""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli.options import add_run_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("dpo", help="train on pairs of a chosen and a rejected answer", description=__doc__)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.cli.rows import run_rows
    from burnish.config.tuning import PreferenceConfig

    return run_rows(args, PreferenceConfig)
