"""A run whose only reward is a reward model, from the command line."""

import json
from pathlib import Path

import pytest

from burnish.config.loader import load_config
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import Shell


@pytest.mark.slow
def test_a_run_learns_from_a_reward_model_alone(task: Path, shell: Shell) -> None:
    """Named relative to the working directory, with a tokenizer of its own; its scores are the reward, weighted."""
    write_tiny_model("scores", config=tiny_config("qwen2", width=16), scale=5.0, classifier=True)
    code, out, err = shell("train", task, "rewards=[]", "reward_model={path: scores, weight: 2.0, micro_batch_size: 2}")
    assert code == 0, err
    assert "reward_model" in out
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["reward/mean"] == pytest.approx(2 * line["reward/reward_model/mean"], rel=1e-5)
        assert line["optim/grad_norm"] > 0
    kept = load_config("runs/first/config.yaml").config.reward_model
    assert kept is not None and kept.path == str(Path("scores").resolve())
