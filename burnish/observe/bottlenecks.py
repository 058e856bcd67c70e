"""Where a run's time went, and what to change: read from its trace. `burnish trace` and the report show it.

Owns the arithmetic on time and the rules. All shares are of one window, from the first step that is counted to the end of the last; the
first step compiles and is left out where there are others. What the trainer waits for is told apart moment by moment: the engine first, as
it is what should be busy, then environments, tools, rewards, data.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.observe.trace_reader import Slice, Timeline

ENVIRONMENT = ("env.reset", "env.step", "env.close")
PHASES = ("prepare", "score", "update", "sync", "save", "evaluate")
"""What the trainer's thread does, beside waiting; it prepares rows of data, and episodes come prepared."""
_MOST_LISTED = 6


class Intervals:
    """Moments as disjoint intervals in order, in nanoseconds."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.pairs: list[tuple[int, int]] = []
        for start, end in sorted(pairs):
            if end <= start:
                continue
            if self.pairs and start <= self.pairs[-1][1]:
                self.pairs[-1] = (self.pairs[-1][0], max(end, self.pairs[-1][1]))
            else:
                self.pairs.append((start, end))

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Intervals:
        return cls((one.start_ns, one.end_ns) for one in slices)

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.pairs) / 1e9

    def both(self, other: Intervals) -> Intervals:
        """Moments that are in both."""
        found, i, j = [], 0, 0
        while i < len(self.pairs) and j < len(other.pairs):
            (a, b), (c, d) = self.pairs[i], other.pairs[j]
            if max(a, c) < min(b, d):
                found.append((max(a, c), min(b, d)))
            i, j = (i + 1, j) if b < d else (i, j + 1)
        return Intervals(found)

    def without(self, other: Intervals) -> Intervals:
        """Moments that aren't in the other."""
        found = []
        for start, end in self.pairs:
            at = start
            for a, b in other.both(Intervals([(start, end)])).pairs:
                found.append((at, a))
                at = b
            found.append((at, end))
        return Intervals(found)


class Finding(NamedTuple):
    """One thing to know. alarm: time is lost that needn't be; else it is a hint. share: of the window that it is about."""

    name: str
    alarm: bool
    share: float
    text: str


@dataclass(frozen=True)
class Calls:
    """Calls of one kind: how many, seconds of all together, of the median and of the 95th percentile."""

    count: int
    seconds: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Calls:
        lengths = sorted(one.seconds for one in slices)
        if not lengths:
            return cls(0, 0.0, 0.0, 0.0)
        return cls(len(lengths), sum(lengths), statistics.median(lengths), lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))])


@dataclass(frozen=True)
class Bottlenecks:
    """What `analyse` finds. Shares are of the window; seconds are of all of it.

    samples: whether there is a rollout; rows of data have none. trainer, rollout: by phase. waits_for: the trainer's waiting, by what went
    on meanwhile. engine_busy: share in which it computed; slots_used: requests in its slots on average while it did. hidden: share of the
    time of environments and tools in which the engine or the trainer computed. tail: share of rollouts in which at most a tenth of their
    episodes still played. path: a step of median length, part after part.
    """

    steps: int
    seconds: float
    step_s: float
    samples: bool
    trainer: Mapping[str, float]
    waits_for: Mapping[str, float]
    rollout: Mapping[str, float]
    engine_busy: float
    slots_used: float
    environment: Calls
    tools: Calls
    rewards: Calls
    hidden: float | None
    playing: float
    tail: float
    queue: float
    sync_s: float
    path: Sequence[tuple[str, float]]
    findings: Sequence[Finding]

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.alarm]


def analyse(timeline: Timeline, config: Mapping[str, Any] | None = None) -> Bottlenecks:
    """config: the run's options, for advice that names numbers. Raises UserError where no step has ended."""
    steps = whole_steps(timeline)
    if not steps:
        raise UserError("the trace holds no step that has ended: there is nothing to say yet")
    counted = steps[1:] or steps
    window = Intervals([(counted[0].start_ns, counted[-1].end_ns)])
    on_trainer = [one for one in timeline.slices if one.track == counted[0].track and one.depth in (1, 2, 3)]
    producer = [one for one in timeline.slices if one.group == "threads" and one.lane == "producer" and one.depth == 0]

    def share(moments: Intervals) -> float:
        return moments.both(window).seconds / window.seconds

    def phase(slices: Sequence[Slice], *names: str) -> Intervals:
        return Intervals.of(one for one in slices if one.name in names)

    engine = Intervals.of(one for one in timeline.slices if one.group == "devices" and one.lane == "engine")
    if not engine.pairs:  # it computes elsewhere
        engine = Intervals.of(timeline.named("model"))
    inside = [one for one in timeline.slices if one.start_ns >= window.pairs[0][0] and one.end_ns <= window.pairs[0][1]]
    kinds = {name: [one for one in inside if one.name in names] for name, names in KINDS.items()}
    causes = {"engine": engine} | {name: Intervals.of(one for one in timeline.slices if one.name in names) for name, names in KINDS.items()}
    outside = [*kinds["environment"], *kinds["tools"]]
    waiting = sum(one.seconds for one in outside)
    phases = {name: phase(on_trainer, name) for name in (*PHASES, "wait")}
    # Where micro-batches stream, an update is begun before the last of them is there.
    phases["update"] = phases["update"].without(phases["wait"]).without(phases["score"])
    phases["prepare"] = phases["prepare"].without(phases["score"])
    computing = Intervals([*engine.pairs, *phases["score"].pairs, *phases["update"].pairs])
    trainer = {name: share(moments) for name, moments in phases.items()}
    requests = [one for one in inside if one.name == "request"]
    found = {
        "steps": len(counted),
        "seconds": window.seconds,
        "step_s": statistics.median(one.seconds for one in counted),
        "samples": bool(timeline.named("rollout")),
        "trainer": trainer | {"other": max(0.0, 1.0 - sum(trainer.values()))},
        "waits_for": {name: s / window.seconds for name, s in split(phases["wait"].both(window), causes).items()},
        "rollout": {name: share(phase(producer, name)) for name in ("rollout", "data", "batch", "gate.wait", "queue.put")},
        "engine_busy": share(engine),
        "slots_used": sum(one.seconds for one in requests) / max(engine.both(window).seconds, 1e-9),
        "environment": Calls.of(kinds["environment"]),
        "tools": Calls.of(kinds["tools"]),
        "rewards": Calls.of(kinds["rewards"]),
        "hidden": sum(_alone(one).both(computing).seconds for one in outside) / waiting if waiting > 0 else None,
        "playing": _most_at_once([one for one in inside if one.name == "episode"]),
        "tail": _tail(timeline, window),
        "queue": sum(one.seconds for one in inside if one.name == "queued") / window.seconds,
        "sync_s": phases["sync"].both(window).seconds / len(counted),
        "path": _path(sorted(counted, key=lambda one: one.seconds)[len(counted) // 2], phases, causes),
    }
    return Bottlenecks(**found, findings=_findings(found, config or {}))


KINDS = {"environment": ENVIRONMENT, "tools": ("tool",), "rewards": ("reward",), "data": ("data",), "batch": ("batch",)}


def whole_steps(timeline: Timeline) -> list[Slice]:
    """The steps that ended with new weights: not the one that finds no more data, nor one that was given up."""
    updates: dict[int, list[Slice]] = {}
    for one in timeline.named("update"):
        updates.setdefault(one.track, []).append(one)
    learned = {track: Intervals.of(slices) for track, slices in updates.items()}
    steps = (one for one in timeline.named("step") if not one.cut and "error" not in one.ids)
    return [one for one in steps if _alone(one).both(learned.get(one.track, Intervals())).pairs]


def split(moments: Intervals, causes: Mapping[str, Intervals]) -> dict[str, float]:
    """Seconds of `moments` by cause, each moment counted for the first that applies; `other` is what is left."""
    found = {}
    for name, when in causes.items():
        found[name] = moments.both(when).seconds
        moments = moments.without(when)
    return found | {"other": moments.seconds}


def _alone(one: Slice) -> Intervals:
    return Intervals([(one.start_ns, one.end_ns)])


def _path(step: Slice, phases: Mapping[str, Intervals], causes: Mapping[str, Intervals]) -> list[tuple[str, float]]:
    """The parts of a step in their order, in seconds; they add up to it."""
    whole = _alone(step)
    waits = split(phases["wait"].both(whole), causes)
    parts = {("hand-over" if name == "other" else name): seconds for name, seconds in waits.items()}
    parts |= {name: phases[name].both(whole).seconds for name in PHASES}
    parts["other"] = step.seconds - sum(parts.values())
    return [(name, seconds) for name, seconds in parts.items() if seconds > 0]


def _most_at_once(episodes: Sequence[Slice]) -> float:
    edges = sorted((time, change) for one in episodes for time, change in ((one.start_ns, 1), (one.end_ns, -1)))
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return float(most)


def _tail(timeline: Timeline, window: Intervals) -> float:
    """The share of rollouts in which at most a tenth of their episodes, the slowest, still played."""
    ends: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for one in timeline.named("episode"):
        if not one.cut and _alone(one).both(window).pairs:
            ends.setdefault(one.ids["step"], []).append(one.end_ns)
            starts[one.ids["step"]] = min(starts.get(one.ids["step"], one.start_ns), one.start_ns)
    total = sum(max(times) - starts[step] for step, times in ends.items())
    late = sum(max(times) - sorted(times)[int(0.9 * (len(times) - 1))] for times in ends.values())
    return late / total if total else 0.0


# --------------------------------------------------------------------------------------------------------------------------- advice


def _findings(found: Mapping[str, Any], config: Mapping[str, Any]) -> list[Finding]:
    """What stands out, the largest share first, alarms before hints."""
    waits, trainer, step_s = found["waits_for"], found["trainer"], found["step_s"]
    if not found["samples"]:
        return _findings_of_rows(trainer, step_s)
    per_step = found["seconds"] / found["steps"]
    staleness = _option(config, "rollout", "max_staleness", default=0)
    outside = waits["environment"] + waits["tools"]
    learning = trainer["update"] + trainer["score"]
    gate, used = found["rollout"]["gate.wait"], found["slots_used"]
    prompts_s, rewards_s = waits["data"] * per_step, waits["rewards"] * per_step
    rules = [
        Finding("environment", outside >= 0.3, outside, _about_environments(found, config)),
        Finding(
            "data",
            waits["data"] >= 0.2,
            waits["data"],
            f"everything waits {prompts_s:.2f} s a step for the next prompts: make the source quicker (data.train: a file, or rows "
            "that are computed before), or draw beside training with rollout.max_staleness",
        ),
        Finding(
            "rewards",
            waits["rewards"] >= 0.25,
            waits["rewards"],
            f"the trainer waits {rewards_s:.2f} s a step for rewards (p95 {_seconds(found['rewards'].p95_s)} a group): make the reward "
            "function quicker, or async; plain ones of a module run in as many processes as there are CPUs",
        ),
        Finding(
            "sync",
            trainer["sync"] >= 0.2,
            trainer["sync"],
            f"new weights take {_seconds(found['sync_s'])} a step to reach the engine: train an adapter (model.lora) or lend the weights "
            "(rollout.weights: lent) so that less moves, or do more with each version: raise training.batch_size",
        ),
        _about_saving(trainer),
        Finding(
            "trainer",
            learning >= 0.7,
            learning,
            f"updates and scores take {_percent(learning)} of the time; the rollout waits {_percent(gate)} for new "
            "weights: give the trainer more devices (cluster.actor), larger passes (training.tokens_per_device), an adapter "
            "(model.lora), or shorter completions (rollout.sampling.max_tokens)",
        ),
        Finding(
            "engine",
            waits["engine"] >= 0.7,
            waits["engine"],
            f"sampling takes {_percent(waits['engine'])} of the time, with {used:.0f} requests in {_slots(config)} slots on average: "
            "give the engine more devices (cluster.rollout), or sample beside training: raise rollout.max_staleness from "
            f"{staleness}",
        ),
        Finding(
            "stragglers",
            found["tail"] >= 0.4 and trainer["wait"] >= 0.3,
            found["tail"] * trainer["wait"],
            f"the slowest tenth of the episodes plays alone for {_percent(found['tail'])} of a rollout: cap them "
            "(rollout.sampling.max_tokens, environment.limits), or let the next step's fill the gap with rollout.max_staleness: 1",
        ),
    ]
    alarms = sorted((rule for rule in rules if rule.alarm), key=lambda rule: -rule.share)
    hints = []
    if staleness == 0 and min(trainer["wait"], learning) >= 0.2:
        saved = min(trainer["wait"], learning)
        hints.append(
            Finding(
                "overlap",
                False,
                saved,
                f"sampling and training take turns; with rollout.max_staleness: 1 they overlap, and a step of {step_s:.2f} s could take "
                f"{(1 - saved) * step_s:.2f} s at best",
            )
        )
    return [*alarms, *hints]


def _findings_of_rows(trainer: Mapping[str, float], step_s: float) -> list[Finding]:
    """Of a run on rows of data, which should do little but update."""
    rules = [
        Finding(
            "data",
            trainer["prepare"] >= 0.2,
            trainer["prepare"],
            f"the trainer spends {_seconds(trainer['prepare'] * step_s)} a step in reading and laying out rows: make the source quicker "
            "(data.train: a file, or rows that are computed before)",
        ),
        Finding(
            "reference",
            trainer["score"] >= 0.2,
            trainer["score"],
            f"{_percent(trainer['score'])} of the time goes into the reference's log-probs: where the same rows come again, compute them "
            "once (training.precompute_reference)",
        ),
        _about_saving(trainer),
    ]
    return sorted((rule for rule in rules if rule.alarm), key=lambda rule: -rule.share)


def _about_saving(trainer: Mapping[str, float]) -> Finding:
    share = trainer["save"]
    return Finding("save", share >= 0.15, share, f"{_percent(share)} of the time goes into checkpoints: raise checkpoint.every")


def _about_environments(found: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    calls = found["environment"] if found["environment"].seconds >= found["tools"].seconds else found["tools"]
    kind = "environment" if calls is found["environment"] else "tool"
    idle = found["waits_for"]["environment"] + found["waits_for"]["tools"]
    said = f"{kind} p95 {_seconds(calls.p95_s)}, and the engine is idle meanwhile for {_percent(idle)} of the time"
    slots = _option(config, "rollout", "slots", default=0)
    limit = _option(config, "environment", "limits", "max_concurrency", default=None) or 4 * slots
    if limit and found["playing"] >= limit:
        busy = max(found["engine_busy"], 0.02)
        more = int(min(8.0, max(1.5, (busy + idle) / busy)) * limit)
        return f"{said}: raise environment.limits.max_concurrency from {limit} to about {more}"
    return (
        f"{said}, with all {found['playing']:.0f} episodes of a step at play: make its steps quicker, or play the next step's meanwhile: "
        + ("raise rollout.max_staleness")
    )


def _slots(config: Mapping[str, Any]) -> str:
    slots = _option(config, "rollout", "slots", default=0)
    return str(slots) if slots else "its"


def _option(config: Mapping[str, Any], *path: str, default: Any) -> Any:
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return default if value is None else value


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


__all__ = ["Bottlenecks", "Calls", "Finding", "Intervals", "analyse", "split", "whole_steps"]
