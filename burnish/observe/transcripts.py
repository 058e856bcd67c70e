"""Every episode of a run as text that people and programs can read: `transcripts/step_N.jsonl`, one line an episode.

Owns the line's form. Evaluations go to `transcripts/eval_LABEL_step_N.jsonl` in the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from burnish.observe.run_folder import RunFolder, write_atomically
from burnish.observe.sinks import EvalReport, StepReport
from burnish.types import Trajectory


class TranscriptSink:
    """Writes a file for each step and each evaluation, whole or not at all."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.transcripts_path
        self._folder.mkdir(exist_ok=True)

    def step(self, report: StepReport) -> None:
        episodes = [episode(t, prompt_id=group.prompt.id) for group in report.groups for t in group.trajectories]
        self._write(self._folder / f"step_{report.step}.jsonl", episodes)

    def evaluation(self, report: EvalReport) -> None:
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", report.label)[:60]
        self._write(self._folder / f"eval_{label}_step_{report.step}.jsonl", [episode(t) for t in report.trajectories])

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: take out the episodes of later ones, which are played again."""
        for path in self._folder.glob("*step_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > step:
                path.unlink()

    def close(self) -> None:
        """Nothing is held open between reports."""

    def _write(self, path: Path, episodes: Iterable[dict[str, Any]]) -> None:
        write_atomically(path, "".join(json.dumps(e, ensure_ascii=False, default=str) + "\n" for e in episodes))


def episode(trajectory: Trajectory, *, prompt_id: str | None = None) -> dict[str, Any]:
    """One transcript line: who said what, how it ended, what it earned, how many tokens, sampled by which weights."""
    versions = trajectory.versions[trajectory.sampled]
    return {
        "prompt_id": prompt_id,
        "group": list(trajectory.group),
        "sample": trajectory.sample,
        "status": str(trajectory.status),
        "stops": [str(step.completion.stop) for step in trajectory.steps],
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "messages": trajectory.messages,
        "final_text": trajectory.final_text,
        "num_prompt_tokens": trajectory.prompt_length,
        "num_sampled_tokens": trajectory.num_sampled,
        "versions": [int(versions.min()), int(versions.max())] if versions.size else [],
        "timings": trajectory.timings,
        "error": trajectory.error,
    }
