"""The trainers that users name: a `Trainer` whose objective is described by options.

Owns how a model and options become a policy and an objective. The loop is `trainer`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from burnish.config.distillation import DistillationSection
from burnish.config.preference import AnyPreferenceConfig, SigmoidConfig
from burnish.config.schema import LoraConfig, MeshSpec, RunSection
from burnish.config.tuning import PreferenceTrainingConfig, RewardTrainingConfig, RowsTrainingConfig, SFTTrainingConfig
from burnish.data.example_stream import ExampleStream
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.observe.sinks import Sink
from burnish.text.codec import Codec
from burnish.train.preference import Kto, PairLoss, from_config
from burnish.train.trainers.distilled import DistilledPolicy, check_distillation_teacher, distillation_objective
from burnish.train.trainers.objective import preference_objective, supervised_objective
from burnish.train.trainers.policy import TrainedPolicy
from burnish.train.trainers.scored import ScoredPolicy, pad_id_of, reward_objective
from burnish.train.trainers.trainer import Trainer


class PeftTrainer(Trainer):
    """Supervised training of an adapter, or of every weight.

    model: a `Model`, or a path as `Model.load` takes it. train_ds, eval_ds: rows with `messages`, `prompt` and `completion`, or `text`
    (`burnish.data.examples`). lora: train an adapter, a fresh one or one that goes on from `lora.path`; without it every weight.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        train_ds: ExampleStream | Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: SFTTrainingConfig = SFTTrainingConfig(),
        run: RunSection = RunSection(),
        sinks: Sequence[Sink] = (),
    ) -> None:
        policy = partial(TrainedPolicy, model, lora=lora, precision=precision, mesh=mesh, training=training, seed=run.seed)
        super().__init__(
            policy,
            supervised_objective(),
            codec=_codec(model),
            train_ds=train_ds,
            eval_ds=eval_ds,
            training=training,
            neftune_alpha=training.neftune_alpha,
            balance=training.balance,
            run=run,
            sinks=sinks,
        )


class DPOTrainer(Trainer):
    """Preference training by DPO or one of its kin.

    loss: a section of `burnish.config.preference`, or a `PairLoss` of your own. train_ds, eval_ds: rows with `prompt`, `chosen`,
    `rejected`; for KTO with `prompt`, `completion`, `label`. The reference is what training started from: the model without a fresh
    adapter, with one that goes on from a folder, or the first weights. The other arguments are `PeftTrainer`'s.
    """

    def __init__(
        self,
        model: Model | str | Path,
        loss: AnyPreferenceConfig | PairLoss | Kto = SigmoidConfig(),
        *,
        train_ds: ExampleStream | Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: PreferenceTrainingConfig = PreferenceTrainingConfig(),
        run: RunSection = RunSection(),
        sinks: Sequence[Sink] = (),
    ) -> None:
        own = isinstance(loss, PairLoss | Kto)
        objective = preference_objective("your own" if own else loss.name, loss if own else from_config(loss))
        policy = partial(TrainedPolicy, model, lora=lora, precision=precision, mesh=mesh, training=training, seed=run.seed)
        super().__init__(
            policy,
            objective,
            codec=_codec(model),
            train_ds=train_ds,
            eval_ds=eval_ds,
            training=training,
            balance=training.balance,
            precompute_reference=training.precompute_reference,
            run=run,
            sinks=sinks,
        )


class DistillationTrainer(Trainer):
    """A student learns from a teacher's distributions, features or activations on rows of data, which are `PeftTrainer`'s.

    teacher: a `Model`, or a path. distillation: what is learned. The other arguments are `PeftTrainer`'s; what is exported is the student.
    """

    def __init__(
        self,
        model: Model | str | Path,
        teacher: Model | str | Path,
        distillation: DistillationSection = DistillationSection(),
        *,
        train_ds: ExampleStream | Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: RowsTrainingConfig = RowsTrainingConfig(),
        run: RunSection = RunSection(),
        sinks: Sequence[Sink] = (),
    ) -> None:
        options: dict[str, Any] = {"lora": lora, "precision": precision, "mesh": mesh, "training": training, "seed": run.seed}
        if not isinstance(teacher, Model):
            check_distillation_teacher(str(teacher), _codec(model), max_tokens=training.max_tokens)
        super().__init__(
            partial(DistilledPolicy, model, teacher, distillation, **options),
            distillation_objective(distillation),
            codec=_codec(model),
            train_ds=train_ds,
            eval_ds=eval_ds,
            training=training,
            run=run,
            sinks=sinks,
        )


class RewardModelTrainer(Trainer):
    """A reward model from pairs of answers, by the likelihood of Bradley and Terry.

    model: the folder or name of a language model, whose score starts at 0, or of a sequence classifier to go on with. train_ds, eval_ds:
    rows with `prompt`, `chosen`, `rejected`, perhaps `margin`. The other arguments are `PeftTrainer`'s; what is exported is a sequence
    classifier, which `reward_model.path` takes.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        train_ds: ExampleStream | Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: RewardTrainingConfig = RewardTrainingConfig(),
        run: RunSection = RunSection(),
        sinks: Sequence[Sink] = (),
    ) -> None:
        options: dict[str, Any] = {"lora": lora, "precision": precision, "mesh": mesh, "training": training, "seed": run.seed}
        super().__init__(
            partial(ScoredPolicy, model, **options),
            reward_objective(pad_id=pad_id_of(locate(str(model))), centering=training.centering),
            codec=_codec(model),
            train_ds=train_ds,
            eval_ds=eval_ds,
            training=training,
            run=run,
            sinks=sinks,
        )


def _codec(model: Model | str | Path) -> Codec:
    return model.codec if isinstance(model, Model) else Codec.load(locate(str(model)))


__all__ = ["DPOTrainer", "DistillationTrainer", "PeftTrainer", "RewardModelTrainer"]
