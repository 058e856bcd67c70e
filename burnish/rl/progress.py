"""How far a run is: what `train` returns, and its form in a checkpoint, from which a later process goes on.

Owns the JSON blob beside a checkpoint's arrays. What the arrays are is the cluster's, how they get to disk `burnish.checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.checkpoint.saver import METRICS
from burnish.checkpoint.store import FACTS
from burnish.observe.sinks import json_numbers
from burnish.rl.evaluation import Evaluation


@dataclass
class TrainResult:
    """What a run did: the last step it made, metrics of each that this process made, evaluations by step and label.

    stopped: it was asked to stop before its end. A resumed run has the evaluations of the steps before, without their episodes.
    """

    steps: int = 0
    history: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, Evaluation]] = field(default_factory=dict)
    stopped: bool = False


def pack(result: TrainResult, *, cursor: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The blob. cursor: the data's, after the last trained step. facts: what a run that goes on must have in common with this one."""
    measured = dict(result.history[-1]) if result.history else {}
    for evaluation in result.evaluations.get(result.steps, {}).values():
        measured |= evaluation.metrics()
    evaluations = {
        str(step): {label: evaluation.rewards.tolist() for label, evaluation in ways.items()} for step, ways in result.evaluations.items()
    }
    return {FACTS: facts, "data": cursor, "evaluations": evaluations, METRICS: json_numbers(measured)}


def unpack(step: int, blob: Mapping[str, Any]) -> tuple[TrainResult, Mapping[str, Any]]:
    """The result as it stood after `step`, and the data's cursor."""
    evaluations = {
        int(at): {label: Evaluation(label, np.array(rewards, dtype=np.float64)) for label, rewards in ways.items()}
        for at, ways in blob["evaluations"].items()
    }
    return TrainResult(steps=step, evaluations=evaluations), blob["data"]


__all__ = ["TrainResult", "pack", "unpack"]
