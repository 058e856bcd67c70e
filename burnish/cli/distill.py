"""`burnish distill CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: a student learns from a teacher's distributions, features or activations.

Both models read rows of data. A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step
that is named. For distillation on what the student itself samples: `burnish train` with `algorithm.name=on_policy_distillation`.
"""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli.options import add_run_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("distill", help="train a student on a teacher's distributions, on rows of data", description=__doc__)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.cli.rows import run_rows
    from burnish.config.tuning import DistillationConfig

    return run_rows(args, DistillationConfig)
