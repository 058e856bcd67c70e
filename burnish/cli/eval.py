"""`burnish eval CONFIG|RUN [KEY=VALUE ...]`: sample the held-out prompts and grade them, as `training.eval_every` does on its way."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from burnish.cli.options import add_config_arguments, load


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("eval", help="evaluate a configuration's model, or what a run has made of it", description=__doc__)
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_folder = Path(args.config) if args.config and Path(args.config).is_dir() else None
    if run_folder is not None:
        args.config = str(run_folder / "config.yaml")

    from burnish.config.schema import Config

    resolved = load(args, Config)

    from burnish.cli.build import build_learner
    from burnish.cli.result import load_result
    from burnish.models.model import Model

    # Nothing is trained here, so there is no adapter beside the weights: a run's own is merged into them. And this process is alone.
    model = resolved.config.model.model_copy(update={"lora": None})
    cluster = resolved.config.cluster.model_copy(update={"distributed": None})
    resolved = dataclasses.replace(resolved, config=resolved.config.model_copy(update={"model": model, "cluster": cluster}))

    def load_model(base: Path, **options: Any) -> Model:
        return Model.load(base, **options) if run_folder is None else load_result(run_folder, **options)

    with build_learner(resolved, sinks=list, report=lambda line: print(line, flush=True), load_model=load_model) as learner:
        for label, evaluation in learner.evaluate().items():
            print(f"{label}: {100 * evaluation.accuracy:.1f} % of {len(evaluation.trajectories)}")
    return 0
