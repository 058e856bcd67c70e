"""What the report shows of a run, as plain values for JSON: gathered from the run's folder, made small.

Owns the form that `assets/*.js` reads: texts and pieces of tokens stand in tables and are named by their index, log-probs and advantages
are whole thousandths. What would make the file too large is left out, as `page.py` asks: pieces of tokens of steps in between, then their
episodes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.observe.bottlenecks import analyse, whole_steps
from burnish.observe.health import diagnose
from burnish.observe.run_files import read_config, read_episodes, read_lines, read_metrics, run_path
from burnish.observe.run_folder import read_status
from burnish.observe.trace_reader import Timeline, read
from burnish.observe.trace_writer import GROUPS

STEPS_DRAWN = 6
"""Steps whose timeline is in the file: the first, the last, the slowest, and some between."""
SPANS_DRAWN = 2500
"""Most spans of one step's timeline; the shortest go first."""


class _Table:
    """Texts, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def gather(folder: str | Path, *, most_episodes: int = 4000, every: int = 1) -> dict[str, Any]:
    """Everything of one run. every: pieces of tokens are given of every so many steps only."""
    path = run_path(folder)
    metrics, status = read_metrics(path), read_status(path)
    if not metrics:
        raise UserError(f"{path} has no metrics yet: no step has ended")
    timeline = read(path / "trace.pftrace") if (path / "trace.pftrace").is_file() else None
    config = read_config(path)
    return {
        "name": path.name,
        "status": {key: status.get(key) for key in ("state", "cause", "time", "exit_code")},
        "about": _about(config, metrics),
        "metrics": _columns(metrics),
        "evaluations": _evaluations(path),
        "health": [dataclasses.asdict(warning) for warning in diagnose(metrics)],
        "said": read_lines(path / "health.jsonl"),
        "time": _time(timeline, config),
        "timeline": None if timeline is None else _timeline(timeline),
        "config": _config_lines(path),
        **_episodes(path, most=most_episodes, every=every),
    }


def _about(config: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    model, algorithm, training = (config.get(name) or {} for name in ("model", "algorithm", "training"))
    return {
        "model": Path(str(model.get("path", ""))).name,
        "adapter": (model.get("lora") or {}).get("rank"),
        "algorithm": algorithm.get("name", ""),
        "group": algorithm.get("num_generations"),
        "batch": training.get("batch_size"),
        "max_steps": training.get("max_steps", len(metrics)),
        "seconds": sum(step.get("perf/step_seconds", 0.0) for step in metrics),
    }


def _columns(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """A list a metric; what a step doesn't have, or isn't finite, is null."""
    names = sorted({name for step in metrics for name in step})
    return {name: [_short(step.get(name)) for step in metrics] for name in names}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _evaluations(path: Path) -> list[dict[str, Any]]:
    if not (path / "eval.json").is_file():
        return []
    found = json.loads((path / "eval.json").read_text(encoding="utf-8"))["evaluations"]
    return [{"step": one["step"], "label": one["label"], "metrics": one["metrics"]} for one in found]


def _time(timeline: Timeline | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if timeline is None or not whole_steps(timeline):
        return None
    found = analyse(timeline, config)
    return dataclasses.asdict(found) | {"findings": [finding._asdict() for finding in found.findings]}


# ------------------------------------------------------------------------------------------------------------------------- episodes


def _episodes(path: Path, *, most: int, every: int) -> dict[str, Any]:
    texts, pieces, rows, steps = _Table(), _Table(), [], list(read_episodes(path))
    shown = _evenly(steps, most)
    for order, (step, lines) in enumerate(shown):
        detailed = order % every == 0 or order == len(shown) - 1
        rows += [_episode(step, line, texts, pieces if detailed else None) for line in lines]
    left_out = sum(len(lines) for _, lines in steps) - len(rows)
    return {"texts": texts.texts, "pieces": pieces.texts, "episodes": rows, "left_out": left_out, "token_steps": every}


def _evenly(steps: Sequence[tuple[int, list[dict[str, Any]]]], most: int) -> Sequence[tuple[int, list[dict[str, Any]]]]:
    """As many whole steps as there is room for, the first and the last among them."""
    each = max((len(lines) for _, lines in steps), default=1) or 1
    room = max(2, most // each)
    if len(steps) <= room:
        return steps
    chosen = sorted({round(i * (len(steps) - 1) / (room - 1)) for i in range(room)})
    return [steps[i] for i in chosen]


def _episode(step: int, line: Mapping[str, Any], texts: _Table, pieces: _Table | None) -> dict[str, Any]:
    row = {
        "step": step,
        "group": line["group"][1],
        "sample": line["sample"],
        "prompt": line["prompt_id"],
        "status": line["status"],
        "stops": line["stops"],
        "reward": line["reward"],
        "rewards": line["rewards"],
        "sampled": line["num_sampled_tokens"],
        "shown": line["num_prompt_tokens"],
        "messages": [_message(message, texts) for message in line["messages"]],
        "trained": line.get("trained"),
        "error": line["error"],
        "seconds": round(line["timings"].get("episode_seconds", 0.0), 3),
        "environment": round(line["timings"].get("environment_seconds", 0.0), 3),
    }
    if pieces is not None and line.get("tokens"):
        row["tokens"] = [_turn(turn, pieces) for turn in line["tokens"]]
    elif line.get("tokens"):
        row["advantage"] = _mean([_mean(turn.get("advantages")) for turn in line["tokens"]])
    return row


def _message(message: Mapping[str, Any], texts: _Table) -> list[Any]:
    """[role, index of the text, name or null, calls]."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if message.get("reasoning_content"):
        said = f"<think>{message['reasoning_content']}</think>\n{said}"
    return [message["role"], texts.index(said), message.get("name"), [json.dumps(call, ensure_ascii=False) for call in calls]]


def _turn(turn: Mapping[str, Any], pieces: _Table) -> dict[str, Any]:
    found: dict[str, Any] = {"text": [pieces.index(text) for text in turn["text"]], "logps": _thousandths(turn["logps"])}
    if "advantages" in turn:
        worth = turn["advantages"]
        found["advantages"] = _thousandths(worth) if isinstance(worth, list) else round(1000 * worth)
    if "policy_logps" in turn:
        found["apart"] = [round(1000 * (a - b)) for a, b in zip(turn["policy_logps"], turn["logps"], strict=True)]
    return found


def _thousandths(values: Sequence[float]) -> list[int]:
    return [round(1000 * value) for value in values]


def _mean(values: Any) -> float | None:
    if not isinstance(values, list):
        return values
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# ------------------------------------------------------------------------------------------------------------------------- timeline


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Spans of some steps, by step: [lane, name, start and end in microseconds from the step's start, depth, ids]."""
    steps, names, lanes = whole_steps(timeline), _Table(), _Table()
    drawn = {}
    for step in _chosen(steps):
        inside = [one for one in timeline.slices if one.end_ns > step.start_ns and one.start_ns < step.end_ns and one.name != "run"]
        inside = sorted(inside, key=lambda one: one.start_ns - one.end_ns)[:SPANS_DRAWN]
        inside.sort(key=lambda one: (_rank(one.group), one.group, one.lane, one.start_ns, one.depth))
        drawn[step.ids["step"] + 1] = [
            [
                lanes.index(f"{one.group}\t{one.lane}"),
                names.index(one.name),
                (max(one.start_ns, step.start_ns) - step.start_ns) // 1000,
                (min(one.end_ns, step.end_ns) - step.start_ns) // 1000,
                one.depth,
                {key: value for key, value in one.ids.items() if key != "step"},
            ]
            for one in inside
        ]
    return {"steps": drawn, "names": names.texts, "lanes": lanes.texts}


def _chosen(steps: Sequence[Any]) -> list[Any]:
    if len(steps) <= STEPS_DRAWN:
        return list(steps)
    spread = {round(i * (len(steps) - 1) / (STEPS_DRAWN - 2)) for i in range(STEPS_DRAWN - 1)}
    slowest = max(range(1, len(steps)), key=lambda i: steps[i].seconds)
    return [steps[i] for i in sorted(spread | {slowest})]


def _rank(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)


# -------------------------------------------------------------------------------------------------------------------- configuration

_LINE = re.compile(r"^(?P<indent> *)(?P<key>(?:- )?[^:#]+:|-)(?: (?P<value>.*?))?(?:  # (?P<source>.*))?$")


def _config_lines(path: Path) -> list[list[Any]]:
    """[depth, key, value, where it came from] of each line of config.yaml."""
    file = path / "config.yaml"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [_LINE.match(line) for line in lines]
    return [
        [len(m["indent"]) // 2, m["key"].removesuffix(":"), m["value"] or "", m["source"] or ""] if m else [0, line, "", ""]
        for line, m in zip(lines, found, strict=True)
    ]


__all__ = ["gather"]
