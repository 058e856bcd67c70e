"""`burnish train CONFIG [KEY=VALUE ...] [--resume[=STEP]]`: reinforcement learning as a configuration describes it.

A run that was killed or stopped goes on with `--resume`, from its newest whole checkpoint or from the step that is named.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.options import add_run_arguments, load, resumed_step

if TYPE_CHECKING:
    from burnish.cli.running import Finish
    from burnish.observe.sinks import Sink
    from burnish.rl.learner import RLLearner
    from burnish.rl.progress import TrainResult


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train a policy by reinforcement learning", description=__doc__)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.config.schema import Config

    step = resumed_step(args)
    resolved = load(args, Config)

    from burnish.cli.build import build_learner
    from burnish.cli.running import run_in_folder
    from burnish.rl.distributed import joined

    def build(sinks: Callable[[], Sequence[Sink]]) -> tuple[RLLearner, Finish[TrainResult]]:
        report = functools.partial(print, flush=True) if fleet.leads else lambda line: None
        learner = build_learner(resolved, sinks=sinks, report=report, fleet=fleet)
        return learner, functools.partial(_finish, learner)

    observe = resolved.config.observe
    tokens = observe.transcript_tokens if observe.transcripts else None
    shown: dict[str, Any] = {"transcript_tokens": tokens, "keep_episodes": observe.episodes, "sample_every": observe.sample_every}
    with joined(resolved.config.cluster.distributed) as fleet:
        return run_in_folder(args, resolved, step=step, build=build, **shown, fleet=fleet)


def _finish(learner: RLLearner, result: TrainResult, folder: Path) -> Path:
    """Export, and say what the held-out tasks' rewards have become."""
    from burnish.rl.evaluation import paired_change

    exported = learner.cluster.export(folder)
    if not learner.cluster.fleet.leads:
        return exported
    before, after = result.evaluations.get(0, {}), result.evaluations.get(result.steps, {})
    for label in before.keys() & after.keys():
        change = paired_change(before[label], after[label], clusters=learner.held_out_clusters)
        print(f"{label}: {100 * change.difference:+.1f} points (95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f})")
    return exported


__all__ = ["add_parser", "run"]
