"""Every option of `burnish sft` and `burnish dpo` does something: each is given other values, and what comes of it must be another.

`checkpoint`, `observe` and what of `run` names a folder are read by `cli.running`, which `burnish train` shares, and an optimizer's own
fields by `train.optim`: `test_effects` has them. An error counts as an effect, silence doesn't.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from burnish.cli.rows import build_trainer
from burnish.config.errors import UserError
from burnish.config.loader import Resolved
from burnish.config.reference import LOSSES
from burnish.config.schema import LoraConfig
from burnish.config.tuning import CONFIGS
from burnish.models.lora import init_adapter
from burnish.models.model import Model
from burnish.models.weights import save_adapter
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.preference import Answers, Kto, from_config
from burnish.train.trainers.trainer import Trainer
from tests.config.test_effects import changed, fields

pytestmark = pytest.mark.slow

ELSEWHERE = (
    "checkpoint",
    "observe.progress",
    "observe.profile",
    "observe.trace_mib",
    "observe.trackers",
    "run.folder",
    "run.name",
    "training.optimizer.",
)
"""What `test_effects` covers, as the same code reads it."""
OTHER: dict[str, list[Any]] = {
    "model.path": ["other"],
    "model.precision": ["bf16"],
    "model.lora": [None, {"rank": 3}],
    "model.lora.rank": [3],
    "model.lora.alpha": [5.0],
    "model.lora.targets": [["q"]],
    "model.lora.path": ["adapter"],
    "model.lora.rslora": [True],
    "model.lora.dora": [True],
    "model.lora.dropout": [0.5],
    "model.lora.quantize": ["int8", "nf4"],
    "data.train": [[{"path": "more.jsonl"}]],
    "data.train.0.path": ["more.jsonl"],
    "data.train.0.recipe": ["mine.py:more"],
    "data.train.0.options": [{"first": 4}],
    "data.train.0.name": ["renamed"],
    "data.train.0.weight": [3.0],
    "data.eval": [[]],
    "data.eval.0.path": ["more.jsonl"],
    "data.eval.0.recipe": ["mine.py:more"],
    "data.eval.0.options": [{"first": 4}],
    "data.eval.0.name": ["renamed"],
    "data.eval.0.weight": [3.0],
    "data.prompt_key": ["question"],
    "data.system_prompt": ["9"],
    "data.shuffle": [False],
    "data.epochs": [1],
    "data.chat_template_kwargs": [{"hint": "7"}],
    "cluster.actor.axes": [{"data": 2}, {"fsdp": 2}],
    "cluster.actor.devices": [2, [3]],
    "cluster.actor.same_as": ["rollout"],
    "cluster.actor.same_devices_as": ["rollout"],
    "run.seed": [1],
    "training.max_steps": [2],
    "training.batch_size": [3],
    "training.max_tokens": [7],
    "training.overlong": ["cut", "error"],
    "training.tokens_per_device": [24],
    "training.optimizer.learning_rate": [0.5],
    "training.remat": [False, "nested"],
    "training.head_chunk": [8],
    "training.balance": [0.5],
    "training.eval_every": [1],
    "training.compare": [False],
    "training.max_nonfinite_updates": [1],
    "training.neftune_alpha": [5.0],
    "training.precompute_reference": [True],
    "training.centering": [0.5],
    "teacher.path": ["model"],
    "distillation.divergence": ["reverse_kl"],
    "distillation.weight": [2.0],
    "distillation.beta": [0.2],
    "distillation.temperature": [3.0],
    "distillation.top_k": [3],
    "distillation.nll": [1.0],
    "distillation.features": [{}],
    "distillation.features.match": ["pool"],
    "distillation.features.weight": [2.0],
    "distillation.features.layers": [[0]],
    "distillation.attention": [{}],
    "distillation.attention.weight": [2.0],
    "distillation.attention.layers": [[0]],
}
WHERE: dict[str, dict[str, Any]] = {
    "data.train.0.weight": {"data.train": [{"path": "train.jsonl"}, {"path": "more.jsonl"}]},
    **{f"data.{split}.0.{key}": {f"data.{split}": [{"recipe": "mine.py"}]} for split in ("train", "eval") for key in ("recipe", "options")},
    "distillation.beta": {"distillation.divergence": "jsd"},
    "distillation.features.": {"distillation.features": {}},
    "distillation.attention.": {"distillation.attention": {}},
    "training.overlong": {"training.max_tokens": 8},
    "training.remat": {"model.lora": None},
    "training.max_nonfinite_updates": {"training.optimizer": {"learning_rate": 1e38, "max_grad_norm": None}},
}
"""What is set in both runs for a field to matter."""
BY_RUNNING = (
    "training.optimizer.learning_rate",
    "training.eval_every",
    "training.compare",
    "training.max_nonfinite_updates",
    "training.neftune_alpha",
)
BY_LOSS = ("training.centering", "distillation.", "teacher.path")
"""What the first mini-batch's loss shows."""
BY_PROGRAM = ("training.remat", "training.head_chunk", "model.lora.dropout")

RECIPE = """
def create_dataset(*, first=0):
    answers = {"question": "5", "rejected": "99"}
    return [{"prompt": str(i), "completion": str(i % 7), "chosen": str(i), **answers} for i in range(first, first + 8)]

def more(*, first=20):
    return create_dataset(first=first)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, seed in (("model", 0), ("other", 1)):
        write_tiny_model(folder / name, config=tiny_config(width=16), alphabet="0123456789", scale=5.0, seed=seed)
        settings = json.loads((folder / name / "tokenizer_config.json").read_text())
        settings["chat_template"] = "{% if hint %}{{ hint }}{% endif %}" + settings["chat_template"]
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    model = Model.load(folder / "model")
    save_adapter(folder / "adapter", model.config, init_adapter(model.config, LoraConfig(rank=2, targets=("q", "v")), jax.random.key(9)))
    (folder / "mine.py").write_text(RECIPE)
    names: dict[str, Any] = {}
    exec(RECIPE, names)
    for name, first in (("train", 0), ("more", 40), ("eval", 90)):
        rows = names["create_dataset"](first=first)
        rows[3]["completion"] = rows[3]["chosen"] = "12345678"  # longer than 8 tokens with its prompt
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def options(folder: Path, command: str = "sft") -> dict[str, Any]:
    taught = {"teacher": {"path": str(folder / "other")}} if command == "distill" else {}
    return taught | {
        "model": {"path": str(folder / "model"), "precision": "f32", "lora": {"rank": 2, "targets": ["q", "v"]}},
        "data": {"train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}], "epochs": 3},
        "training": {"max_steps": 3, "batch_size": 4, "max_tokens": 20, "tokens_per_device": 64, "compare": True},
    }


def build(command: str, values: dict[str, Any], folder: Path) -> Trainer | str:
    """The trainer, or the error."""
    try:
        values["model"]["path"] = str(folder / Path(values["model"]["path"]).name)
        if "teacher" in values:
            values["teacher"]["path"] = str(folder / Path(values["teacher"]["path"]).name)
        if values["model"]["lora"] and values["model"]["lora"].get("path"):
            values["model"]["lora"]["path"] = str(folder / "adapter")
        config = CONFIGS[command].model_validate(values)
        return build_trainer(Resolved(config, {}, folder), sinks=list, report=lambda line: None)
    except (ValidationError, UserError) as error:
        return re.sub("0x[0-9a-f]+", "", str(error))


def observe(command: str, values: dict[str, Any], folder: Path) -> Any:
    trainer = build(command, values, folder)
    if isinstance(trainer, str):
        return trainer
    policy, drawn = trainer.policy, trainer._stream.take(trainer._training.batch_size)
    batches = trainer._placed(drawn)
    rest = [example.id for example in trainer._stream.take(60)]
    first = policy.state.trainable
    return {
        "rows": [(e.id, [(a.ids.tolist(), a.trained.tolist()) for a in e.answers]) for e in (*drawn, *trainer._held_out)],
        "order": rest,
        "steps": trainer.max_steps,
        "batches": [batch.tokens.shape for batch in batches],
        "devices": sorted({str(x.sharding) for x in jax.tree.leaves((first, batches))}),
        "trained": [(x.shape, float(jnp.sum(jnp.abs(x)))) for x in jax.tree.leaves(first)],
        "model": [policy.precision, policy.scale, policy.frozen_digest(has_reference=False)],
        "reference": trainer._references is None,
    }


def run(command: str, values: dict[str, Any], folder: Path) -> Any:
    trainer = build(command, values, folder)
    assert isinstance(trainer, Trainer), trainer
    try:
        result = trainer.train()
    except Exception as error:
        return str(error)
    return [row["policy/loss"] for row in result.history], result.evaluations


def first_loss(command: str, values: dict[str, Any], folder: Path) -> Any:
    """With a score that isn't 0, where it would be."""
    trainer = build(command, values, folder)
    assert isinstance(trainer, Trainer), trainer
    (micro,) = trainer._micro_batches(trainer._stream.take(4))
    state = jax.tree.map(lambda x: x + 0.1, trainer.policy.state.trainable)
    return float(trainer.policy._measure(state, trainer.policy._base, micro)[0].value())


def program(command: str, values: dict[str, Any], folder: Path) -> str:
    trainer = build(command, values, folder)
    assert isinstance(trainer, Trainer), trainer
    (micro,) = trainer._micro_batches(trainer._stream.take(4), 1)
    policy = trainer.policy
    return str(jax.make_jaxpr(lambda *args: policy._steps.totals(*args))(policy.state.trainable, policy._base, micro))


SHARED = dict(fields(CONFIGS["sft"])).keys()
FIELDS = [
    (command, path)
    for command in ("sft", "dpo", "distill", "reward-model")
    for path in dict(fields(CONFIGS[command]))
    if (path in OTHER or not path.startswith(ELSEWHERE)) and (command in ("sft", "dpo") or path not in SHARED)
]


def test_every_field_is_looked_at() -> None:
    assert {path for _, path in FIELDS} == OTHER.keys()


@pytest.mark.parametrize(("command", "path"), FIELDS)
def test_b127_a_field_of_a_run_on_rows_has_an_effect(folder: Path, command: str, path: str) -> None:
    see = run if path in BY_RUNNING else program if path in BY_PROGRAM else first_loss if path.startswith(BY_LOSS) else observe
    needed = next((where for key, where in WHERE.items() if key == path or (key.endswith(".") and path.startswith(key))), {})
    before = changed(options(folder, command), needed)
    seen = see(command, before, folder)
    assert see is not observe or not isinstance(seen, str), seen
    for value in OTHER[path]:
        assert see(command, changed(before, {path: value}), folder) != seen, f"{path} = {value!r} changes nothing"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.model_fields["name"].default)
def test_b127_a_field_of_a_loss_has_an_effect(loss: Any) -> None:
    x = Answers(jnp.array([-2.0, -4.0]), jnp.array([-3.0, -3.0]), jnp.array([4.0, 2.0]))

    def value(config: Any) -> float:
        found = from_config(config)
        if isinstance(found, Kto):
            return float(found(x, jnp.array([True, False]), jnp.float32(0.3))[0].value())
        return float(found(x)[0].value())

    usual = value(loss())
    assert np.isfinite(usual)
    for name in loss.model_fields.keys() - {"name"}:
        now = getattr(loss(), name)
        assert value(loss(**{name: not now if isinstance(now, bool) else now + 0.2})) != usual, name
