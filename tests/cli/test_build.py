"""A configuration as a run keeps it: the same files, wherever it is read from."""

from pathlib import Path

import pytest

from burnish.cli.build import anchored
from burnish.config.algorithms import GRPOConfig
from burnish.config.loader import load_config

TASK = """
model: {path: tiny}
data: {train: [{path: train.jsonl}], chat_template_kwargs: {path: train.jsonl}}
rewards: [{fn: numeric}, {fn: "./grade.py:hits", options: {path: train.jsonl}}]
algorithm: {loss: {fn: "grade.py:loss"}, advantage: {fn: "my_pkg.mod:advantage"}}
"""


def test_what_names_a_file_is_absolute_and_nothing_else_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders beside the run that are called like a reward or an agent are no files; what is the user's stays as it is."""
    task, work = tmp_path / "task", tmp_path / "work"
    for folder in (task, work / "tiny", work / "numeric", work / "ModelAgent"):
        folder.mkdir(parents=True)
    for file in (task / "train.jsonl", work / "train.jsonl", task / "grade.py"):
        file.touch()
    (task / "task.yaml").write_text(TASK)
    monkeypatch.chdir(work)
    config = anchored(load_config(task / "task.yaml", (), {})).config
    assert config.model.path == str(work / "tiny")
    assert config.data.train[0].path == str(task / "train.jsonl"), "a file beside the configuration wins"
    assert config.data.chat_template_kwargs == config.rewards[1].options == {"path": "train.jsonl"}
    assert [reward.fn for reward in config.rewards] == ["numeric", f"{task / 'grade.py'}:hits"]
    assert (config.agent.agent, config.environment.env) == ("ModelAgent", "TaskEnvironment")
    assert isinstance(config.algorithm, GRPOConfig) and config.algorithm.loss is not None and config.algorithm.advantage is not None
    assert config.algorithm.loss.fn == f"{task / 'grade.py'}:loss"
    assert config.algorithm.advantage.fn == "my_pkg.mod:advantage"
