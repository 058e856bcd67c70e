"""Each strategy lowers what it is about, on rows that weren't trained on; what is exported is the student.

Measured, 40 updates of a student half as wide and deep as its teacher (before, after): docs/results.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.checkpoint.saver import Saver
from burnish.config.distillation import AttentionSection, DistillationSection, FeaturesSection
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import CheckpointSection, LoraConfig
from burnish.config.tuning import RowsTrainingConfig
from burnish.models.model import Model
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.trainers.named import DistillationTrainer

from .toys import HIGH, LOW, successors

RATE = OptimizerConfig(learning_rate=1e-2)
ROWS = [{"text": f"{i % 8}{(3 * i) % 8}{(i * i) % 8}{(5 * i + 1) % 8}"} for i in range(40)]
NOTHING = {"divergence": None}
STRATEGIES: dict[str, tuple[dict[str, Any], str]] = {
    "forward": ({"divergence": "forward_kl"}, "eval/divergence"),
    "reverse": ({"divergence": "reverse_kl", "temperature": 2.0}, "eval/divergence"),
    "jsd of the top 5": ({"divergence": "jsd", "beta": 0.3, "top_k": 5}, "eval/divergence"),
    "projected features": (NOTHING | {"features": FeaturesSection(match="project", layers=(0, -1))}, "eval/features"),
    "pooled features": (NOTHING | {"features": FeaturesSection(match="pool")}, "eval/features"),
    "attention": (NOTHING | {"attention": AttentionSection(layers=(0, -1))}, "eval/attention"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A student and its teacher."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "student", config=tiny_config(width=16, num_layers=2), alphabet=LOW + HIGH, scale=3.0, seed=1)
    write_tiny_model(folder / "teacher", config=tiny_config("qwen2", width=32, num_layers=4), alphabet=LOW + HIGH, scale=5.0, seed=2)
    return Model.load(folder / "student"), Model.load(folder / "teacher")


def distil(
    pair: tuple[Model, Model], options: dict[str, Any], *, steps: int, lora: LoraConfig | None = None, **more: Any
) -> DistillationTrainer:
    training = RowsTrainingConfig(max_steps=steps, batch_size=8, max_tokens=16, tokens_per_device=64, optimizer=RATE, **more)
    return DistillationTrainer(*pair, DistillationSection(**options), train_ds=ROWS[:32], eval_ds=ROWS[32:], lora=lora, training=training)


@pytest.mark.learn
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_lowers_its_own_target(pair: tuple[Model, Model], name: str) -> None:
    options, target = STRATEGIES[name]
    evaluations = distil(pair, options, steps=40, compare=True).train().evaluations
    print(f"\n{name}: {evaluations[0][target]:.4f} -> {evaluations[40][target]:.4f}")
    assert evaluations[40][target] < 0.6 * evaluations[0][target], evaluations


@pytest.mark.slow
def test_all_targets_together_by_an_adapter_and_a_run_that_goes_on(pair: tuple[Model, Model], tmp_path: Path) -> None:
    options = {"nll": 0.1, "features": FeaturesSection(match="project"), "attention": AttentionSection()}
    lora = LoraConfig(rank=4, quantize="int8")
    whole = distil(pair, options, steps=4, lora=lora, compare=True)
    result = whole.train(saver=Saver(tmp_path, CheckpointSection(every=2, keep_last=None)))
    first, last = result.evaluations[0], result.evaluations[4]
    assert first.keys() == {f"eval/{name}" for name in ("loss", "divergence", "nll", "features", "attention", "count")}
    parts = first["eval/divergence"] + 0.1 * first["eval/nll"] + first["eval/features"] + first["eval/attention"]
    assert first["eval/loss"] == pytest.approx(parts, rel=1e-5) and last["eval/loss"] < first["eval/loss"]
    assert whole.policy.trained.keys() == set(lora.targets) and whole.policy.state.trainable["projections"]["0"].shape == (16, 32)
    rest = distil(pair, options, steps=4, lora=lora)
    assert rest.resume(tmp_path, 2) == 2
    rest.train()
    for a, b in zip(*(jax.tree.leaves(trainer.policy.state.trainable) for trainer in (whole, rest)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rest.export(tmp_path / "out").name == "adapter"


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_nothing_to_learn(pair: tuple[Model, Model]) -> None:
    """Every divergence and distance is 0, with rows packed and cut in another way too."""
    student = pair[0]
    options = {"features": FeaturesSection(match="pool"), "attention": AttentionSection()}
    found = distil((student, student), options, steps=1).evaluate()
    assert all(abs(found[f"eval/{name}"]) < 1e-5 for name in ("loss", "divergence", "features", "attention"))


def test_mistakes_show_before_weights_are_loaded(pair: tuple[Model, Model], tmp_path: Path) -> None:
    student, _ = pair
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="abcdefgh")
    with pytest.raises(UserError, match="teacher.path: .* has another tokenizer than the policy"):
        DistillationTrainer(student.folder, tmp_path, train_ds=successors())
    with pytest.raises(UserError, match="teacher.path isn't set"):
        DistillationTrainer(student.folder, "", train_ds=successors())
    with pytest.raises(ValueError, match="nothing is learned"):
        DistillationSection(divergence=None)
