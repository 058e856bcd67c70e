"""A student that samples and a teacher that says how likely it finds that: credit by the token, the pass, learning, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.cli.build import build_learner
from burnish.config.algorithms import GRPOConfig, OnPolicyDistillationConfig, TeacherConfig
from burnish.config.errors import UserError
from burnish.config.loader import Resolved
from burnish.config.schema import ClusterConfig, Config, RolloutConfig, RunSection, TrainingConfig
from burnish.observe import trace
from burnish.rl.algorithms import from_config
from burnish.rl.cluster import RLCluster
from burnish.rl.credit import ScoredEpisode, teacher_gains
from burnish.rl.learners import ConfiguredLearner
from burnish.rl.placement import Role
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.batches import scored
from tests.rl.runs import ROWS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of the same size with stronger opinions."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "student", config=tiny_config(width=16), alphabet="0123456789+", scale=2.0)
    write_tiny_model(root / "teacher", config=tiny_config(width=16), alphabet="0123456789+", scale=8.0, seed=1)
    return root / "student", root / "teacher"


def make(
    folders: tuple[Path, Path], *, meshes: Any = None, learning_rate: float = 1e-2, steps: int = 2, **options: Any
) -> ConfiguredLearner:
    student, teacher = folders
    config = OnPolicyDistillationConfig(teacher=TeacherConfig(path=str(teacher)), **options)
    cluster = RLCluster(
        student,
        precision="f32",
        cluster=ClusterConfig.model_validate(meshes or {}),
        rollout=RolloutConfig(max_prompt_tokens=12, slots=16, prefill_rows=4, decode_chunk=4, sampling={"max_tokens": 6}),
        training=TrainingConfig(max_steps=steps, batch_size=4, head_chunk=64, optimizer={"learning_rate": learning_rate}),
        teacher=config.teacher,
        seed=3,
    )
    return ConfiguredLearner(cluster, config, train_ds=ROWS, run=RunSection(seed=3))


def episode(gain: list[float], kl: list[float] | None = None) -> ScoredEpisode:
    worth = np.zeros(len(gain), np.float32)
    penalty = None if kl is None else np.asarray(kl, np.float32)
    return ScoredEpisode((0, 0), 0, 0.0, worth, kl=penalty, teacher_gain=np.asarray(gain, np.float32))


def test_each_token_is_worth_how_much_likelier_the_teacher_finds_it() -> None:
    alone, discounted, summed = (
        teacher_gains([episode([0.5, -2.0, 1.0])], gamma=gamma)[0].advantages.tolist() for gamma in (0.0, 0.5, 1.0)
    )
    assert alone == [0.5, -2.0, 1.0]
    assert discounted == [-0.25, -1.5, 1.0]  # 0.5 + 0.5 (-2 + 0.5), -2 + 0.5
    assert summed == [-0.5, -1.0, 1.0]
    penalised = teacher_gains([episode([0.5, -2.0], kl=[0.25, 0.5])])[0]
    assert penalised.advantages.tolist() == [0.25, -2.5] and penalised.returns is None
    with pytest.raises(ValueError, match="must ask for the scores `teacher`"):
        teacher_gains([ScoredEpisode((0, 0), 0, 0.0, np.zeros(2, np.float32))])


@pytest.mark.slow
def test_a_student_comes_close_to_its_teacher_and_at_rate_0_it_doesnt(folders: tuple[Path, Path]) -> None:
    """Reverse KL per token, as sampled: .36 nats at the start, below .1 over the last 10 of 60 steps. No reward function is given."""
    learned = [m["teacher/reverse_kl"] for m in make(folders, steps=60).train().history]
    assert learned[0] > 0.3 and np.mean(learned[-10:]) < 0.1
    still = [m["teacher/reverse_kl"] for m in make(folders, steps=8, learning_rate=0.0).train().history]
    assert np.mean(still[-5:]) > 0.6 * learned[0]


@pytest.mark.slow
def test_a_teacher_who_is_the_student_has_nothing_to_teach(folders: tuple[Path, Path]) -> None:
    student, _ = folders
    history = make((student, student), steps=1).train().history
    assert abs(history[0]["teacher/reverse_kl"]) < 1e-6 and history[0]["optim/grad_norm"] < 1e-4


@pytest.mark.slow
def test_where_the_teacher_lives_makes_no_difference(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A teacher wider than the student, over the same tokens."""
    write_tiny_model(tmp_path, config=tiny_config(width=32), alphabet="0123456789+", scale=4.0, seed=1)
    pair = (folders[0], tmp_path)
    trace.take()
    here = make(pair)
    there = make(pair, meshes={"teacher": {"devices": "4-5", "axes": {"tp": 2}}, "offload_to_cpu": ["teacher"]})
    found = there.cluster.placement[Role.TEACHER]
    assert (found.place.devices, found.holding) == ((4, 5), "own") and found.bytes_per_device > 0
    one, other = here.train().history, there.train().history
    for name in ("teacher/reverse_kl", "policy/loss", "optim/grad_norm"):
        np.testing.assert_allclose([m[name] for m in one], [m[name] for m in other], rtol=1e-4, atol=1e-5)
    assert len([s for s in trace.take() if s.name == "score" and s.ids.get("role") == "teacher"]) == 4


def test_what_cant_be_is_refused_early(folders: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = folders
    with pytest.raises(UserError, match="needs a teacher: build the cluster with"):
        ConfiguredLearner(student, OnPolicyDistillationConfig(), train_ds=ROWS)
    with pytest.raises(UserError, match="the teacher of on_policy_distillation would say nothing"):
        from_config(OnPolicyDistillationConfig(), advantage=lambda *a, **k: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=r"cluster.teacher gives devices to a role that this run doesn't have"):
        RLCluster(student, cluster=ClusterConfig.model_validate({"teacher": {"devices": 1}}))
    cluster = RLCluster(student, precision="f32", rollout=RolloutConfig(slots=4))
    cluster.prepare(from_config(GRPOConfig(), max_tokens=4), total_updates=1)
    with pytest.raises(RuntimeError, match="this cluster has no teacher"):
        cluster.get_teacher_per_token_logps(scored(np.ones((1, 3))))
    cluster.close()
    write_tiny_model(tmp_path / "other", config=tiny_config(width=16), alphabet="abcdefghijk")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12"}\n' * 8)

    def build(path: str) -> None:
        options = {"name": "on_policy_distillation", "teacher": {"path": path}}
        config = Config.model_validate({"model": {"path": str(student)}, "data": {"train": [{"path": "rows.jsonl"}]}, "algorithm": options})
        build_learner(Resolved(config, {}, tmp_path), sinks=list, report=lambda line: None).close()

    with pytest.raises(UserError, match="algorithm: algorithm.teacher.path isn't set"):
        build("")
    with pytest.raises(UserError, match=r"algorithm.teacher.path: .* has another tokenizer than the policy: .* The teacher reads"):
        build(str(tmp_path / "other"))
    build(str(teacher))
