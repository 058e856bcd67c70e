"""`burnish eval` with several samples of a prompt, and on the tasks of other configurations."""

import re
from pathlib import Path

import numpy as np
import pytest

from burnish.cli.eval import estimates
from burnish.rl.evaluation import Evaluation
from tests.cli.runs import Shell, write_task

pytestmark = pytest.mark.slow

LAKE = """
model: {path: /nowhere}
data: {eval: [{path: lake.jsonl}], train: [{path: lake.jsonl}]}
environment:
  env: GymText
  options: {env_id: FrozenLake-v1, make: {is_slippery: false}}
  limits: {max_turns: 2}
rollout: {max_prompt_tokens: 200, max_episode_tokens: 400, sampling: {max_tokens: 4}}
training: {batch_size: 2}
"""


def test_several_samples_and_several_environments(model_folder: Path, tmp_path: Path, shell: Shell) -> None:
    task = write_task(tmp_path / "task", model_folder)
    (tmp_path / "lake.jsonl").write_text('{"prompt": ""}\n' * 2)
    (tmp_path / "lake.yaml").write_text(LAKE)
    code, out, _ = shell("eval", task, "--samples", 4)
    assert code == 0
    found = dict(re.findall(r"^(avg@4|pass@[124]|maj@4): ([-\d.]+) % of 6 prompts$", out, flags=re.MULTILINE))
    assert sorted(found) == ["avg@4", "maj@4", "pass@1", "pass@2", "pass@4"]
    assert shell("eval", task, "--samples", 4)[1].splitlines()[-5:] == out.splitlines()[-5:], "the same noise"
    code, out, err = shell(
        "eval", task, "--samples", 2, "--temperature", 0, "--on", task, "--on", tmp_path / "lake.yaml", "rollout.slots=4"
    )
    assert code == 0, err
    assert f"{task}: avg@2: " in out and f"{tmp_path / 'lake.yaml'}: pass@2: 0.0 % of 2 prompts" in out
    assert "lake.yaml: maj@2" not in out, "moves are no votes"


def test_what_cant_be_asked(model_folder: Path, tmp_path: Path, shell: Shell) -> None:
    task = write_task(tmp_path / "task", model_folder)
    assert shell("eval", task, "--samples", 0)[0] == 2
    code, _, err = shell("eval", task, "--temperature", 1)
    assert code == 2 and "--temperature is of --samples" in err


def test_estimates_of_evaluations() -> None:
    samples = [Evaluation(str(i), np.array(rewards)) for i, rewards in enumerate([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])]
    assert estimates(samples, votes=False) == {"avg@3": 1 / 3, "pass@1": pytest.approx(1 / 3), "pass@2": 0.5, "pass@3": 0.5}
