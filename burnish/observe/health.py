"""Whether a run goes well, in plain words: what is wrong, the run's own numbers that say so, and what to try.

Owns the rules; pure functions of the metrics of the steps so far (docs/metrics.md). The terminal, `health.jsonl` and the report show what
they find, the worst first. A rule speaks of the last steps (`RECENT`), so a warning goes when its cause does.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.observe.run_folder import RunFolder, write_atomically
from burnish.observe.sinks import EvalReport, StepReport

History = Sequence[Mapping[str, float]]
RECENT = 5
"""Steps that "now" means: few enough to be quick, many enough that one odd batch says nothing."""


@dataclass(frozen=True, slots=True)
class Warning:
    """name: of the rule. severity: 3 the run can't learn or is lost, 2 it is likely to fail, 1 it wastes something. evidence: the metrics
    that the words speak of, as they are now."""

    name: str
    severity: int
    text: str
    evidence: Mapping[str, float]
    advice: str

    def line(self) -> str:
        return f"{self.text}: {self.advice}"


class Recent:
    """The metrics of some steps, by name; a step without one is left out."""

    def __init__(self, history: History) -> None:
        self._history = history

    def __len__(self) -> int:
        return len(self._history)

    def values(self, name: str) -> list[float]:
        return [step[name] for step in self._history if name in step and math.isfinite(step[name])]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def sum(self, prefix: str, *, without: Iterable[str] = ()) -> float:
        left_out = {*without}
        return sum(v for step in self._history for name, v in step.items() if name.startswith(prefix) and name not in left_out)

    def share(self, name: str) -> float | None:
        """Of one count among all of its family."""
        total = self.sum(name.rpartition("/")[0] + "/")
        return self.sum(name) / total if total else None


def diagnose(history: History) -> list[Warning]:
    """What is wrong now, the worst first; a cause is as bad as the worst that follows from it (`FOLLOWS`), and stands before it."""
    if len(history) < 2:
        return []
    now, begun = Recent(history[-RECENT:]), Recent(history[:RECENT])
    found = [warning for rule in RULES if (warning := rule(now, begun, history)) is not None]
    worst = {w.name: max(v.severity for v in found if v.name in (w.name, *FOLLOWS.get(w.name, ()))) for w in found}
    return sorted(found, key=lambda warning: -worst[warning.name])  # sorting keeps the order of equals


# ----------------------------------------------------------------------------------------------------------------------------- rules


def _graders(now: Recent, begun: Recent, history: History) -> Warning | None:
    share = now.share("status/grader_error")
    if share is None or share < 0.1:
        return None
    return Warning(
        "graders fail",
        3 if share >= 0.5 else 2,
        f"{_percent(share)} of the episodes have no reward because a reward function failed or took too long",
        {"status/grader_error": now.sum("status/grader_error")},
        "read `error` in transcripts/step_N.jsonl, then mend the function or raise its timeout_s",
    )


def _environments(now: Recent, begun: Recent, history: History) -> Warning | None:
    failed = sum(now.share(f"status/{name}") or 0.0 for name in ("env_error", "env_timeout", "aborted"))
    if failed < 0.1:
        return None
    return Warning(
        "environments fail",
        3 if failed >= 0.5 else 2,
        f"{_percent(failed)} of the episodes ended in an error or a time-out of their environment, or weren't played",
        {f"status/{name}": now.sum(f"status/{name}") for name in ("env_error", "env_timeout", "aborted")},
        "read `error` in transcripts/step_N.jsonl; environment.limits has the time limits, rollout.max_prompt_tokens the longest prompt",
    )


def _skipped(now: Recent, begun: Recent, history: History) -> Warning | None:
    names = [name for step in history[-RECENT:] for name in step if name.endswith("/nan_count")]
    lost = now.mean("optim/grad_norm") is None and any("optim/grad_norm" in step for step in history[-RECENT:])
    if not names and not lost:
        return None
    return Warning(
        "not finite",
        3,
        "losses or gradients aren't finite",
        {"optim/skipped_updates": now.sum("optim/skipped_updates")},
        "lower training.optimizer.learning_rate; with precision bf16 try f32; check a loss or reward of your own for logs and divisions",
    )


def _kl(now: Recent, begun: Recent, history: History) -> Warning | None:
    kl, first = now.mean("policy/kl"), begun.mean("policy/kl")
    if kl is None or first is None or kl < 0.5 or kl < 3 * max(first, 1e-3):
        return None
    return Warning(
        "KL diverges",
        3 if kl >= 2 else 2,
        f"the policy is {kl:.2g} nats from its reference and goes further (it began at {first:.2g})",
        {"policy/kl": kl},
        "lower training.optimizer.learning_rate, raise algorithm.beta, or look for a reward that can be had by nonsense",
    )


def _mismatch(now: Recent, begun: Recent, history: History) -> Warning | None:
    mean, most, lag = now.mean("mismatch/mean"), now.mean("mismatch/max"), now.mean("staleness/mean") or 0.0
    if mean is None or lag > 0.5:
        return None
    if mean < 0.05 and (most or 0.0) < 2.0:
        return None
    return Warning(
        "mismatch",
        3 if mean >= 0.2 else 2,
        f"sampler and trainer disagree on the same tokens by {mean:.2g} nats on average and {most or 0:.2g} at most, without being stale",
        {"mismatch/mean": mean, "mismatch/max": most or 0.0},
        "set model.precision to f32 to see whether it is rounding, for which algorithm.importance corrects; cluster.canary tests each sync",
    )


def _stale(now: Recent, begun: Recent, history: History) -> Warning | None:
    lag, ess = now.mean("staleness/mean"), now.mean("mismatch/ess")
    kl = now.mean("mismatch/kl") or 0.0
    if lag is None or lag <= 0.5 or not ((ess is not None and ess < 0.5) or kl > 0.1 or lag >= 4):
        return None
    weight = "" if ess is None else f", and an effective sample of {_percent(ess)} is left"
    return Warning(
        "sampler is stale",
        3 if ess is not None and ess < 0.2 else 2,
        f"tokens are {lag:.1f} versions old when they are learned from{weight}",
        {"staleness/mean": lag} | ({} if ess is None else {"mismatch/ess": ess}),
        "lower rollout.max_staleness or the learning rate; algorithm.importance bounds what stale tokens may do",
    )


def _signal(now: Recent, begun: Recent, history: History) -> Warning | None:
    share = now.mean("group/zero_std_fraction")
    if share is None or share < 0.7:
        return None
    reward, first = now.mean("reward/mean"), begun.mean("reward/mean")
    best, worst = _reward_bounds(history)
    side = ""
    if reward is not None and best > worst:
        side = (
            ", mostly solved"
            if reward > worst + 0.8 * (best - worst)
            else ", mostly unsolved"
            if reward < worst + 0.2 * (best - worst)
            else ""
        )
    elif reward is not None and reward == first:
        side = f", all at {reward:.3g}"
    easier = "harder prompts" if "mostly solved" in side else "easier prompts or a reward with partial credit"
    return Warning(
        "no signal",
        3 if share >= 0.9 else 2,
        f"in {_percent(share)} of the groups all rewards are equal, so nothing is learned from them{side}",
        {"group/zero_std_fraction": share} | ({} if reward is None else {"reward/mean": reward}),
        f"give {easier}, raise algorithm.num_generations or rollout.sampling.temperature, or set algorithm.zero_signal to resample",
    )


def _entropy(now: Recent, begun: Recent, history: History) -> Warning | None:
    entropy, first = now.mean("policy/entropy"), begun.mean("policy/entropy")
    if entropy is None or first is None or len(history) <= RECENT or entropy > 0.2 * first or first < 0.05:
        return None
    return Warning(
        "entropy collapses",
        3 if entropy <= 0.05 * first else 2,
        f"the policy's entropy fell from {first:.2g} to {entropy:.2g} nats: it says nearly the same every time",
        {"policy/entropy": entropy},
        "lower the learning rate, raise algorithm.epsilon_high or algorithm.entropy_bonus, or stop here if the reward is what you want",
    )


def _length(now: Recent, begun: Recent, history: History) -> Warning | None:
    share = now.share("stop/length")
    context = now.share("stop/context") or 0.0
    cut = (share or 0.0) + context
    if share is None or cut < 0.5:
        return None
    return Warning(
        "cut at the limit",
        3 if cut >= 0.9 else 2,
        f"{_percent(cut)} of the completions were cut at their limit of tokens before they ended",
        {"stop/length": now.sum("stop/length"), "length/sampled_mean": now.mean("length/sampled_mean") or 0.0},
        "raise rollout.sampling.max_tokens (or max_episode_tokens), or ask for, and reward, shorter answers",
    )


def _clip(now: Recent, begun: Recent, history: History) -> Warning | None:
    low, high = now.mean("policy/clip_low_fraction"), now.mean("policy/clip_high_fraction")
    if low is None and high is None:
        return None
    clipped = (low or 0.0) + (high or 0.0)
    if clipped < 0.3:
        return None
    return Warning(
        "clipped",
        2,
        f"{_percent(clipped)} of the tokens lose their gradient at the clip",
        {"policy/clip_low_fraction": low or 0.0, "policy/clip_high_fraction": high or 0.0},
        "lower the learning rate, or make fewer updates with the same episodes (algorithm.num_iterations, training.mini_batch_size)",
    )


def _flat(now: Recent, begun: Recent, history: History) -> Warning | None:
    rewards = Recent(history).values("reward/mean")
    if len(rewards) < 20:
        return None
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    gain = statistics.fmean(last) - statistics.fmean(first)
    if gain > 2 * noise and gain > 0:
        return None
    falls = gain < -2 * noise and gain < 0
    return Warning(
        "reward falls" if falls else "reward is flat",
        2 if falls else 1,
        f"the reward {'fell' if falls else 'has not risen'} in {len(rewards)} steps: {statistics.fmean(first):.3g} in the first third, "
        f"{statistics.fmean(last):.3g} in the last",
        {"reward/mean": now.mean("reward/mean") or 0.0},
        "look at the samples: is a better answer rewarded at all? Then raise the learning rate, the groups, or the batch",
    )


def _throughput(now: Recent, begun: Recent, history: History) -> Warning | None:
    seconds = Recent(history).values("perf/step_seconds")[1:]  # the first step compiles
    tokens = Recent(history).values("length/sampled_mean")[1:]
    if len(seconds) < 3 * RECENT:
        return None
    before, after = statistics.median(seconds[:RECENT]), statistics.median(seconds[-RECENT:])
    longer = statistics.fmean(tokens[-RECENT:]) / max(statistics.fmean(tokens[:RECENT]), 1e-9) if len(tokens) == len(seconds) else 1.0
    if after < 1.5 * before * max(longer, 1.0):
        return None
    return Warning(
        "slower",
        1,
        f"a step takes {after:.3g} s, {after / before:.1f} times what it took at the start",
        {"perf/step_seconds": after},
        "`burnish trace` says where the time goes; perf/compiles above 0 means that shapes keep changing; is there another load?",
    )


RULES: tuple[Callable[[Recent, Recent, History], Warning | None], ...] = (
    _skipped, _graders, _environments, _mismatch, _stale, _kl, _length, _entropy, _signal, _clip, _flat, _throughput,
)  # fmt: skip

FOLLOWS: Mapping[str, Sequence[str]] = {
    "graders fail": ("no signal", "reward falls"),
    "environments fail": ("no signal", "reward falls"),
    "mismatch": ("KL diverges", "entropy collapses", "clipped", "reward falls"),
    "sampler is stale": ("KL diverges", "entropy collapses", "clipped", "reward falls"),
    "entropy collapses": ("no signal",),
}
"""What may be no more than a consequence where the first is true, too: mending it alone wouldn't help."""


def _reward_bounds(history: History) -> tuple[float, float]:
    """The best and the worst mean reward of a step so far."""
    rewards = Recent(history).values("reward/mean")
    return (max(rewards), min(rewards)) if rewards else (0.0, 0.0)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ------------------------------------------------------------------------------------------------------------------------ the file


class HealthSink:
    """Writes `health.jsonl`: a line when a warning appears, and one when it is over."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.health_path
        self._metrics_path = folder.metrics_path
        self._history: list[Mapping[str, float]] = []
        self._standing: set[str] = set()

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: forget what was said of later ones, and read what came before."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        said = [entry for entry in map(json.loads, lines) if entry["step"] <= step]
        if self._path.is_file():
            write_atomically(self._path, "".join(json.dumps(entry) + "\n" for entry in said))
        rows = self._metrics_path.read_text(encoding="utf-8").splitlines() if self._metrics_path.is_file() else []
        past = [{name: float(value) for name, value in json.loads(row).items()} for row in rows]
        self._history = [row for row in past if row["step"] <= step]
        for entry in said:
            (self._standing.add if entry["state"] == "begins" else self._standing.discard)(entry["name"])

    def step(self, report: StepReport) -> None:
        self._history.append(report.metrics)
        now = {warning.name: warning for warning in diagnose(self._history)}
        lines: list[dict[str, Any]] = [
            {"step": report.step, "state": "begins", "name": w.name, "severity": w.severity, "text": w.text, "evidence": w.evidence,
             "advice": w.advice}
            for w in now.values() if w.name not in self._standing
        ]  # fmt: skip
        lines += [{"step": report.step, "state": "is over", "name": name} for name in sorted(self._standing - now.keys())]
        self._standing = {*now}
        if lines:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))

    def evaluation(self, report: EvalReport) -> None:
        """Evaluations are judged by people."""

    def close(self) -> None:
        """Nothing is held open."""


__all__ = ["FOLLOWS", "RECENT", "RULES", "HealthSink", "Warning", "diagnose"]
