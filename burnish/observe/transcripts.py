"""Every episode of a run as text that people and programs can read: `transcripts/step_N.jsonl`, one line an episode.

Owns the line's form. Evaluations go to `transcripts/eval_LABEL_step_N.jsonl` in the same form, without `tokens`.

`tokens` has one object a turn, with what was sampled in it, piece by piece: `text`; `logps` under the sampler; `advantages`, one number
where all are equal; `policy_logps`, the trained policy's, where the algorithm asked for them before the update. At most `max_tokens` of
an episode are there, its first ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.observe.run_folder import RunFolder, write_atomically
from burnish.observe.sinks import EvalReport, StepReport
from burnish.types import Trajectory

MOST_PIECES = 500_000
"""Pairs of ids whose text is remembered."""
HALF = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character."""


class TranscriptSink:
    """Writes a file for each step and each evaluation, whole or not at all."""

    def __init__(self, folder: RunFolder, *, max_tokens: int = 1024) -> None:
        """max_tokens: of an episode whose pieces are written one by one; 0 writes none."""
        self._folder, self._max_tokens = folder.transcripts_path, max_tokens
        self._pieces: dict[tuple[int, int], str] = {}
        self._folder.mkdir(exist_ok=True)

    def step(self, report: StepReport) -> None:
        episodes = [episode(t, prompt_id=group.prompt.id) | self._tokens(t, report) for group in report.groups for t in group.trajectories]
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

    def _tokens(self, trajectory: Trajectory, report: StepReport) -> dict[str, Any]:
        if report.decode is None or self._max_tokens == 0:
            return {}
        scores = report.scores.get((trajectory.group, trajectory.sample))
        turns, at = [], 0
        for step in trajectory.steps:
            ids = step.completion.ids[: max(0, self._max_tokens - at)].tolist()
            where = slice(at, at + len(ids))
            turn: dict[str, Any] = {"text": self._texts(ids, report.decode), "logps": _rounded(step.completion.logps[: len(ids)])}
            if scores is not None:
                worth = _rounded(scores.advantages[where])
                turn["advantages"] = worth[0] if len({*worth}) == 1 else worth
                if scores.policy_logps is not None:
                    turn["policy_logps"] = _rounded(scores.policy_logps[where])
            turns.append(turn)
            at += len(step.completion.ids)
        return {"trained": scores is not None, "tokens": turns}

    def _texts(self, ids: list[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
        """Each id's own text, which may depend on the id before it: some tokenizers write no space at the beginning."""
        if len(self._pieces) > MOST_PIECES:
            self._pieces.clear()
        texts, before = [], -1
        for index in ids:
            if (text := self._pieces.get((before, index))) is None:
                head = [] if before < 0 else [before]
                text = self._pieces[before, index] = decode([*head, index])[len(decode(head)) if head else 0 :]
            texts.append(text)
            before = index
        return texts if HALF not in "".join(texts) else _whole_characters(ids, texts, decode)

    def _write(self, path: Path, episodes: Iterable[dict[str, Any]]) -> None:
        write_atomically(path, "".join(json.dumps(e, ensure_ascii=False, default=str) + "\n" for e in episodes))


def _whole_characters(ids: list[int], texts: list[str], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Where a character's bytes are spread over several ids, the first of them has it all."""
    texts, start = list(texts), 0
    while start < len(ids):
        end = start + 1
        if HALF in texts[start]:
            while end < len(ids) and end - start < 8 and HALF in decode(ids[start:end]):
                end += 1
            texts[start:end] = [decode(ids[start:end]), *[""] * (end - start - 1)]
        start = end
    return texts


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in values]


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
