"""Whether graders can be trusted, asked without a model: a row's own answer must earn the reward, another row's mustn't.

Owns the asking and the report; grading is the `RewardManager`'s, as in a run. Called by `burnish rewards check` and by recipes' tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.rewards.manager import RewardError, RewardManager, RewardSpec, Runner
from burnish.types import Completion, Group, Prompt, Step, StopReason, Trajectory


@dataclass(slots=True)
class GraderReport:
    """What a grader made of a data set's answers. refused: rows whose own answer didn't earn `expected`; fooled: rows for which another
    row's answer did; each as (id, the text, what it got)."""

    name: str
    count: int = 0
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    tried: int = 0
    fooled: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.refused and not self.fooled


def check_graders(
    specs: Sequence[RewardSpec],
    prompts: Sequence[Prompt],
    answers: Mapping[str, str],
    *,
    expected: float = 1.0,
    others: bool = True,
    runner: Runner | None = None,
) -> list[GraderReport]:
    """Grade each prompt's own answer (by its id), and (`others`) the next different one, by each function. Not inside an event loop."""
    texts = [answers[prompt.id] for prompt in prompts]
    reports = []
    for spec in specs:
        manager, report = RewardManager([spec], runner=runner), GraderReport(spec.name)
        for place, (prompt, own) in enumerate(zip(prompts, texts, strict=True)):
            other = next((text for text in texts[place + 1 :] + texts[:place] if others and text != own), None)
            got = _graded(manager, prompt, [own] if other is None else [own, other], place)
            report.count += 1
            if got[0] != expected:
                report.refused.append((prompt.id, own, str(got[0])))
            if other is not None:
                report.tried += 1
                if got[1] == expected:
                    report.fooled.append((prompt.id, other, str(got[1])))
        reports.append(report)
    return reports


def check_gold(fn: Callable[..., Any], prompts: Iterable[Prompt], *, gold: str = "answer", expected: float = 1.0) -> None:
    """Raise `RewardError` unless `fn` gives each prompt's own answer, the text of column `gold`, the reward `expected`: a grader that fails
    this can teach nothing. Other rows' answers may earn it too: they may be right by chance."""
    rows = list(prompts)
    answers = {prompt.id: str(prompt.meta[gold]) for prompt in rows}
    (report,) = check_graders([RewardSpec.of(fn)], rows, answers, expected=expected, others=False)
    if report.refused:
        shown = "; ".join(f"{name} ({text!r:.80}) gets {got}" for name, text, got in report.refused[:3])
        raise RewardError(f"{len(report.refused)} of {report.count} gold answers don't get {expected}: {shown}")


def _graded(manager: RewardManager, prompt: Prompt, texts: Sequence[str], number: int) -> list[float | str | None]:
    """The rewards of some texts as completions of a prompt, or why there is none."""
    none = np.zeros(0, np.int32)
    completion = Completion(none, none.astype(np.float32), none, StopReason.STOP_ID)
    group = Group((0, number), prompt, [])
    for sample, text in enumerate(texts):
        step = Step(none, completion, text)
        group.trajectories.append(Trajectory([step], none, none.astype(bool), completion.logps, none, 0, group.id, sample))
    asyncio.run(manager.score(group))
    return [episode.error or episode.reward for episode in group.trajectories]


__all__ = ["GraderReport", "check_gold", "check_graders"]
