"""`burnish reward-model CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: train a reward model on pairs of a chosen and a rejected answer.

A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step that is named.
"""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli.options import add_run_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("reward-model", help="train a reward model on pairs of answers", description=__doc__)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.cli.rows import run_rows
    from burnish.config.tuning import RewardModelConfig

    return run_rows(args, RewardModelConfig)
