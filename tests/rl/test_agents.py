"""Three ways to set up a run, each as a user writes it: one turn, tools, an environment of many turns; rewards move on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from burnish import GRPOConfig, GRPOLearner, ModelAgent, RLCluster, RolloutConfig, ToolAgent, ToolEnvironment, TrainingConfig
from burnish.testing.tiny import write_tiny_model
from burnish.types import Group
from tests.agentic.worlds import MyCalculator

pytestmark = pytest.mark.slow

DIGITS = "01234567"


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def cluster_of(folder: Path, *, steps: int, tokens_per_device: int | None = None, **rollout: Any) -> RLCluster:
    optimizer = {"name": "muon", "learning_rate": 2e-2}
    training = TrainingConfig(max_steps=steps, batch_size=4, tokens_per_device=tokens_per_device, optimizer=optimizer)
    sizes = {"slots": 32, "prefill_rows": 4, "decode_chunk": 2, "max_prompt_tokens": 64, "sampling": {"max_tokens": 2}}
    return RLCluster(folder, precision="f32", training=training, rollout=RolloutConfig(**(sizes | rollout)))


class Keep:
    """A sink that keeps the episodes."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def step(self, report: Any) -> None:
        self.groups += report.groups

    def evaluation(self, report: Any) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


def test_one_turn_and_a_reward_function(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, alphabet=DIGITS)
    cluster = cluster_of(tmp_path, steps=12)
    rows = [{"prompt": digit, "answer": "3"} for digit in DIGITS]
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8), agent_class=ModelAgent,
                          agent_kwargs={"system_prompt": "Answer with a number."}, reward_fns=[exact], train_ds=rows)  # fmt: skip
    earned = [step["reward/mean"] for step in learner.train().history]
    assert sum(earned[-3:]) / 3 > sum(earned[:3]) / 3 + 0.3, earned


def test_tools(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, alphabet=DIGITS)
    cluster = cluster_of(tmp_path, steps=12, max_prompt_tokens=800)
    rows = [{"prompt": digit, "answer": "3"} for digit in DIGITS]
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8), agent_class=ToolAgent,
                          agent_kwargs={"system_prompt": "Use the tools.", "tool_parser_name": "qwen",
                                        "tool_map": {"calculator": MyCalculator}},
                          env_class=ToolEnvironment, reward_fns=[exact], train_ds=rows)  # fmt: skip
    result = learner.train()
    earned = [step["reward/mean"] for step in result.history]
    assert sum(earned[-3:]) / 3 > sum(earned[:3]) / 3 + 0.3, earned
    assert result.history[0]["length/prompt_mean"] > 300, "the tools are in the prompt"


def test_an_environment_of_many_turns(tmp_path: Path) -> None:
    """FrozenLake, three fields in a row, the goal at the end: moves are words, which are one id each here."""
    pytest.importorskip("gymnasium")
    from tests.agentic.grid import MyEnv

    write_tiny_model(tmp_path, alphabet="ldruSFG\n")
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    for word in ("left", "down", "right", "up"):
        vocabulary["model"]["vocab"][word] = vocabulary["model"]["vocab"].pop(word[0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    cluster = cluster_of(tmp_path, steps=10, tokens_per_device=192, sampling={"max_tokens": 1}, max_episode_tokens=192)
    maps = [{"prompt": "", "map": ["SFG"], "seed": n} for n in range(4)]
    sink = Keep()
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8), env_class=MyEnv, train_ds=maps, sinks=[sink])
    result = learner.train()
    earned = [step["reward/mean"] for step in result.history]
    assert sum(earned[-3:]) / 3 > sum(earned[:3]) / 3, earned
    assert result.history[0]["episode/turns"] > 2 and result.history[-1]["workers/leaked_threads"] == 0
    first = sink.groups[0].trajectories[0]
    assert first.messages[0]["content"].startswith("You are on this map:\n") and first.messages[1]["role"] == "assistant"
    assert max(step["mismatch/max"] for step in result.history) < 1e-4
