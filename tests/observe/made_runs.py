"""Run folders that no run has made: of any size, in seconds, with everything that a report reads. The numbers are drawn, by a seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from burnish.observe import trace
from burnish.observe.trace import Lane
from burnish.observe.trace_writer import TraceWriter

WORDS = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8").split()
CONFIG = """\
model:
  path: smollm2-135m  # made.yaml
  lora:
    rank: 16  # made.yaml
algorithm:
  name: grpo  # made.yaml
  num_generations: 8  # default
training:
  max_steps: STEPS  # command line
  batch_size: 8  # made.yaml
rollout:
  slots: 64  # default
"""


def write_run(folder: Path, *, steps: int = 30, episodes: int = 64, tokens: int = 120, turns: int = 1, seed: int = 0) -> Path:
    """A run's folder; an eighth of the episodes of a step to a prompt."""
    draw = random.Random(seed)
    (folder / "transcripts").mkdir(parents=True)
    status = {"state": "complete", "exit_code": 0, "pid": 1, "host": "made", "time": "2026-11-30T12:00:00+00:00"}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text(CONFIG.replace("STEPS", str(steps)))
    rows = [_metrics(draw, step, steps) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [
        {"step": step, "label": label, "metrics": {"eval/greedy/accuracy": accuracy, "eval/greedy/count": 300.0}, "outcomes": []}
        for step, label, accuracy in ((0, "before", 0.26), (steps, "after", 0.71))
    ]
    (folder / "eval.json").write_text(json.dumps({"evaluations": evaluations}))
    for step in range(1, steps + 1):
        lines = [_episode(draw, step, i, tokens, turns, rows[step - 1]["reward/mean"]) for i in range(episodes)]
        (folder / "transcripts" / f"step_{step}.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    _write_trace(folder / "trace.pftrace", steps=min(steps, 8), episodes=min(episodes, 32))
    return folder


def _metrics(draw: random.Random, step: int, steps: int) -> dict[str, float]:
    x = step / steps
    return {
        "step": step,
        "reward/mean": 0.1 + 0.6 * x + draw.gauss(0, 0.02),
        "group/zero_std_fraction": 0.2 + 0.3 * x,
        "policy/entropy": 1.4 * math.exp(-x) + draw.gauss(0, 0.02),
        "policy/kl": 0.05 * x,
        "mismatch/mean": 0.004 + draw.random() * 0.001,
        "mismatch/ess": 0.99,
        "length/sampled_mean": 40 + 20 * x,
        "length/sampled_max": 90 + 30 * x,
        "staleness/mean": 0.0,
        "optim/grad_norm": 0.4 + draw.gauss(0, 0.05),
        "optim/learning_rate": 6e-4 * (1 - x),
        "perf/step_seconds": 60.0 if step == 1 else 20 + draw.gauss(0, 1),
        "perf/rollout_tokens_per_second": 400 + draw.gauss(0, 20),
        "time/rollout_seconds": 9.0,
        "time/update_seconds": 10.0,
        "memory/host_peak_mib": 2400.0 + step,
        "stop/stop_id": 60.0,
        "stop/length": 4.0,
        "status/ok": 64.0,
    }


def _episode(draw: random.Random, step: int, i: int, tokens: int, turns: int, level: float) -> dict[str, Any]:
    said = [[" " + draw.choice(WORDS) for _ in range(draw.randint(tokens // 2, tokens))] for _ in range(turns)]
    reward = float(draw.random() < level)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is {i // 8} + {step % 10}? " + " ".join(draw.choices(WORDS, k=12))}
    ]
    for turn, words in enumerate(said):
        messages.append({"role": "assistant", "content": "".join(words)})
        if turn + 1 < turns:
            messages.append({"role": "tool", "name": "calculator", "content": str(i + step)})
    return {
        "prompt_id": f"sums:{(8 * step + i // 8) % 40}",
        "group": [step - 1, i // 8],
        "sample": i % 8,
        "status": "ok" if draw.random() < 0.97 else "truncated",
        "stops": ["stop_id"] * turns,
        "reward": reward,
        "rewards": {"numeric": reward, "brevity": round(draw.random(), 3)},
        "messages": messages,
        "final_text": messages[-1]["content"],
        "num_prompt_tokens": 38,
        "num_sampled_tokens": sum(map(len, said)),
        "versions": [step - 1, step - 1],
        "timings": {"episode_seconds": draw.uniform(2, 9), "environment_seconds": 0.1},
        "error": None,
        "trained": True,
        "tokens": [
            {
                "text": words,
                "logps": [round(-draw.expovariate(1.5), 3) for _ in words],
                "advantages": round(2 * (reward - level), 3),
                "policy_logps": [round(-draw.expovariate(1.5), 3) for _ in words],
            }
            for words in said
        ],
    }


def _write_trace(path: Path, *, steps: int, episodes: int) -> None:
    """Steps of 20 s: episodes of two turns, then an update."""
    writer = TraceWriter(path)
    second, main, producer, engine = 10**9, Lane("threads", "MainThread"), Lane("threads", "producer"), Lane("devices", "engine")
    spans: list[tuple[str, Lane, float, float, dict[str, Any]]] = []
    for step in range(steps):
        t = 20.0 * step
        ids = {"step": step}
        spans += [("step", main, t, t + 20, ids), ("wait", main, t, t + 9.2, ids), ("score", main, t + 9.2, t + 10, ids)]
        spans += [("update", main, t + 10, t + 19, ids), ("sync", main, t + 19, t + 19.8, ids)]
        spans += [
            ("data", producer, t, t + 0.05, ids),
            ("rollout", producer, t + 0.05, t + 9, ids),
            ("gate.wait", producer, t + 9.2, t + 20, ids),
        ]
        spans += [("decode", engine, t + 0.3 + 0.5 * k, t + 0.7 + 0.5 * k, ids) for k in range(17)]
        spans += [("update", Lane("devices", "actor"), t + 10, t + 18.9, ids)]
        for i in range(episodes):
            place, length = Lane("episodes", f"episode {i + 1:03}"), 4 + 5 * ((7 * i) % episodes) / episodes
            spans += [("episode", place, t + 0.1, t + length, ids | {"group": i // 8, "sample": i % 8, "status": "ok"})]
            spans += [
                ("model", place, t + 0.2, t + length / 2, {"turn": 0}),
                ("env.step", place, t + length / 2, t + length / 2 + 0.4, {"turn": 1}),
            ]
            spans += [("model", place, t + length / 2 + 0.5, t + length - 0.1, {"turn": 1})]
    edges = [(s[2], 1, -s[3], s) for s in spans] + [(s[3], 0, -s[2], s) for s in spans]
    made = {id(s): trace.span(s[0], lane=s[1], **s[4]) for s in spans}
    for at, begins, _, s in sorted(edges, key=lambda edge: edge[:3]):
        made[id(s)].start_ns = int(s[2] * second)
        trace._events.append((int(at * second), "begin" if begins else "end", made[id(s)]))
    writer.close()
