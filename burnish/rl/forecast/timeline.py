"""The timeline of one step: what runs after what, and what at the same time, as a chart and in words.

Derived from the placement and the algorithm: two roles work at the same time only if they have no device in common and neither waits for
the other. The order is that of the learner and its producer: the engine samples a mini-batch and goes on with the next one of the step; the
trainer scores a mini-batch and makes its updates; when all are made the engine gets the new weights, with which the next step begins.
Where micro-batches stream (`rl.overlap`), it does so beside the sampling of the same mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from burnish.rl.forecast.run import PlannedRun
from burnish.rl.forecast.units import aligned
from burnish.rl.overlap import streams
from burnish.rl.placement import Role

Column = dict[Role, str]
"""Who works at one time, and at what."""

_GOES_ON = "·····"
_ALL_SHOWN = 3
"""Mini-batches that are drawn one by one; of more, the first two and the last."""


def timeline(run: PlannedRun) -> str:
    """The chart, a line a role, time to the right; and what overlaps."""
    columns = list(_columns(run))
    lines = [["role", "devices", *map(str, range(1, len(columns) + 1))]]
    for role, placed in run.placement.roles.items():
        if any(role in column for column in columns):
            lines.append([str(role), placed.place.where, *(column.get(role, "") for column in columns)])
    return "\n".join([aligned(lines), *_words(run, columns)])


def _columns(run: PlannedRun) -> Iterator[Column]:
    yield from _ahead(run) if run.plan.max_staleness else _step_by_step(run)
    yield {Role.ACTOR: "sync", Role.ROLLOUT: "sync"}


def _ahead(run: PlannedRun) -> Iterator[Column]:
    """A step in the middle of a run whose sampling may be ahead: what is learned has been sampled before."""
    minis = list(range(1, run.plan.num_mini_batches + 1))
    yield from _beside(run, [column for mini in _some(minis) for column in _learning(run, mini)], "later")


def _streaming(run: PlannedRun) -> Iterator[Column]:
    """All of a step is sampled without a stop, and learned beside it, always a micro-batch behind."""
    minis = list(range(1, run.plan.num_mini_batches + 1))
    sampling, *grading = _sampling(run, _named(minis))
    yield from [sampling, *grading]
    yield from (column | dict.fromkeys(sampling, _GOES_ON) for mini in _some(minis) for column in _learning(run, mini))


def _step_by_step(run: PlannedRun) -> Iterator[Column]:
    if run.streams:
        yield from _streaming(run)
        return
    deliveries = run.deliveries
    yield from _sampling(run, _named(deliveries[0]))
    for number, minis in enumerate(deliveries, start=1):
        if _ALL_SHOWN <= number < len(deliveries) > _ALL_SHOWN:
            if number == _ALL_SHOWN:
                yield {role: "…" for role in (Role.ACTOR, Role.ROLLOUT)}
            continue
        learning = [column for mini in _some(minis) for column in _learning(run, mini)]
        yield from _beside(run, learning, _named(deliveries[number])) if number < len(deliveries) else learning


def _some(minis: list[int]) -> list[int]:
    """Of mini-batches that are learned one after another, those that are drawn."""
    return minis if len(minis) <= _ALL_SHOWN else [minis[0], minis[-1]]


def _named(minis: list[int]) -> str:
    return str(minis[0]) if len(minis) == 1 else f"{minis[0]}-{minis[-1]}"


def _beside(run: PlannedRun, learning: list[Column], following: str) -> Iterator[Column]:
    """The columns of who learns, with the next sampling in those that leave the engine's devices free; else after them."""
    sampling, *later = _sampling(run, following)
    free = [column for column in learning if all(run.apart(role, other) for role in sampling for other in column)]
    if not free:
        yield from [*learning, sampling, *later]
        return
    free[0].update(sampling)
    for column in free[1:]:
        column.update(dict.fromkeys(sampling, _GOES_ON))
    yield from [*learning, *later]


def _sampling(run: PlannedRun, which: str) -> list[Column]:
    sample, grade = {Role.ROLLOUT: f"sample {which}"}, {Role.REWARD: f"grade {which}"}
    if Role.REWARD not in run.placement:
        return [sample]
    return [sample | grade] if run.apart(Role.ROLLOUT, Role.REWARD) else [sample, grade]


def _learning(run: PlannedRun, mini: int) -> Iterator[Column]:
    """Scores, each role's as soon as its devices are free, then updates, each after the other."""
    needed = run.algorithm.scores_needed
    scoring = {
        Role.ACTOR: run.scores_actor,
        Role.REFERENCE: "reference" in needed,
        Role.TEACHER: "teacher" in needed,
        Role.CRITIC: "values" in needed,
    }
    by_host = run.config.training.compute_logps_micro_batch_size is not None  # each pass is waited for
    column: Column = {}
    for role in (role for role, scores in scoring.items() if scores):
        if column and (by_host or not all(run.apart(role, other) for other in column)):
            yield column
            column = {}
        column[role] = f"{'values' if role is Role.CRITIC else 'score'} {mini}"
    if column:
        yield column
    times = f" ×{run.plan.num_iterations}" if run.plan.num_iterations > 1 else ""
    if run.algorithm.value_loss is not None:
        yield {Role.CRITIC: f"update {mini}{times}"}
    yield {Role.ACTOR: f"update {mini}{times}"}


def _words(run: PlannedRun, columns: list[Column]) -> Iterator[str]:
    names = [frozenset(column) for column in columns if not {"sync", "…"} & {*column.values()}]
    together = {roles for roles in names if len(roles) > 1}
    for roles in sorted(together, key=sorted):
        yield f"At the same time: {' and '.join(sorted(roles))}, which have no device in common."
    if not any(Role.ROLLOUT in roles and roles - {Role.ROLLOUT, Role.REWARD} for roles in together):
        yield f"Sampling and updates don't overlap: {_why(run)}."
    if run.streams:
        yield (
            f"Micro-batches of {run.plan.train_micro} prompt{'s' * (run.plan.train_micro != 1)} go to the trainer as they are complete: "
            "gradients of the first are taken while the last are sampled."
        )
    if run.plan.max_staleness:
        versions = f"{run.plan.max_staleness} version{'s' * (run.plan.max_staleness != 1)}"
        yield f"What is sampled here is for later steps, with weights that will be up to {versions} behind (rollout.max_staleness)."
    elif len(run.deliveries) > _ALL_SHOWN and not run.streams:
        yield "… stands for the mini-batches between, which go as those before."


def _why(run: PlannedRun) -> str:
    plan = run.plan
    if not run.apart(Role.ROLLOUT, Role.ACTOR):
        return "actor and rollout have devices in common, where their programs take turns"
    if plan.max_staleness:
        return "who learns has devices in common with the rollout, where programs take turns"
    if run.algorithm.zero_signal == "resample":
        return "zero_signal: resample hands a step on when all of it is sampled"
    if plan.num_mini_batches == 1:
        return (
            "a step is one mini-batch, and the next step is sampled with the weights that this one makes; a training.mini_batch_size below "
            f"{plan.batch}, and rollout_micro_batch_size with it, would let the engine sample one while another is learned{_or_stream(run)}"
        )
    if len(run.deliveries) == 1:
        return (
            f"the engine is handed {plan.rollout} prompts at once and what comes of them goes on together; a "
            f"training.rollout_micro_batch_size of {plan.mini_batch} would let it sample one mini-batch while another is learned"
        )
    return "who learns has devices in common with the rollout, where programs take turns"


def _or_stream(run: PlannedRun) -> str:
    """Whether smaller micro-batches would do as well."""
    micro = run.plan.train_micro
    if micro is None or micro < run.plan.mini_batch:
        return ""
    smaller = dataclasses.replace(run.plan, train_micro=1, logps_micro=1)
    would = streams(run.algorithm, smaller, apart=True, num_processes=run.placement[Role.ACTOR].place.processes)
    return (
        "; a smaller training.train_micro_batch_size lets gradients of the first groups be taken while the last are sampled"
        if would
        else ""
    )


__all__ = ["Column", "timeline"]
