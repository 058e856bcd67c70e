"""Runs of the tiny model for a test, in this process or in one of several: what is measured, and the rows that were drawn.

As a program: `python -m tests.distributed.worker JSON`, with the cluster's `distributed`, the model's folder and a list of runs; the first
process prints what `measure` returns for each, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoint.saver import Saver
from burnish.config.schema import CheckpointSection, DistributedConfig, LoraConfig
from burnish.observe.sinks import EvalReport, StepReport
from burnish.rl.distributed import joined
from burnish.rl.fleet import ALONE, Fleet
from tests.rl.runs import RecordingCluster, digits_reward, make_learner

ROWS = [{"prompt": str(10 ** (i % 5) + i), "answer": str((7 * i) % 10)} for i in range(10)]
"""Prompts of one to five digits."""


FAMILIES = ("reward/", "length/", "advantage/", "group/", "mismatch/", "status/", "stop/", "staleness/")
"""Metrics that are the same however many processes there are."""


class Drawn:
    """A sink that notes which rows each step had, and how long its completions were."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.lengths: list[int] = []

    def step(self, report: StepReport) -> None:
        self.rows.append([group.prompt.id for group in report.groups])
        self.lengths += [t.num_sampled for group in report.groups for t in group.trajectories]

    def evaluation(self, report: EvalReport) -> None: ...

    def close(self) -> None: ...


def measure(model: Path, run: dict[str, Any], fleet: Fleet = ALONE) -> dict[str, Any]:
    """One run. run: arguments of `make_learner`; once: the rows are gone through once; save: a folder for checkpoints; resume: a step of
    those."""
    options = dict(run)
    once, save, resume = (options.pop(key, None) for key in ("once", "save", "resume"))
    lora = LoraConfig.model_validate(options.pop("lora")) if "lora" in options else None
    drawn = Drawn()
    learner = make_learner(
        model, train_ds=iter(ROWS) if once else ROWS, reward=digits_reward, lora=lora, sinks=[drawn], fleet=fleet, **options
    )
    saver = None if save is None else Saver(Path(save), CheckpointSection(every=1, keep_last=None), fleet=fleet)
    if saver is not None and resume is not None:
        learner.resume(saver.folder, resume)
    result = learner.train(saver=saver)
    cluster = learner.cluster
    assert isinstance(cluster, RecordingCluster)
    names = [name for name in ("policy/loss", "policy/kl", "optim/grad_norm") if name in cluster.updates[0]]
    return {
        "updates": {name: cluster.means(name) for name in names},
        "apart": cluster.worst_mismatch,
        "metrics": [
            {k: v for k, v in step.items() if k.startswith(("reward/", "length/", "advantage/", "group/", "critic/"))}
            for step in result.history
        ],
        "evaluations": {step: {way: float(np.sum(e.rewards)) for way, e in ways.items()} for step, ways in result.evaluations.items()},
        "rows": drawn.rows,
        "lengths": drawn.lengths,
    }


def main(text: str) -> None:
    task = json.loads(text)
    with joined(DistributedConfig.model_validate(task["distributed"])) as fleet:
        found = [measure(Path(task["model"]), run, fleet) for run in task["runs"]]
    if fleet.leads:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
