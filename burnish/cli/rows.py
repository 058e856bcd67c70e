"""From a configuration to a trainer of rows, and from its result to words: what `burnish sft`, `dpo`, `distill` and `reward-model` share.

Owns the order of building (what is cheap and often wrong comes first). Running is `running`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from burnish.cli.build import Report, adapter_options, building, found_folder, make_sources, required
from burnish.cli.options import load, resumed_step
from burnish.cli.running import TALK, Finish, run_in_folder
from burnish.config.errors import UserError
from burnish.config.loader import Resolved
from burnish.config.tuning import CONFIGS, DistillationConfig, PreferenceConfig, RewardModelConfig, RowsRunConfig, SFTConfig
from burnish.data.example_stream import Encoder, ExampleStream, training_examples
from burnish.data.examples import Example
from burnish.models.locate import locate
from burnish.models.weights import load_config
from burnish.observe.run_folder import CHECKPOINTS
from burnish.observe.sinks import Sink
from burnish.text.codec import Codec
from burnish.train.preference import from_config
from burnish.train.trainers.distilled import check_distillation_teacher, distillation_objective
from burnish.train.trainers.named import DistillationTrainer, DPOTrainer, PeftTrainer, RewardModelTrainer
from burnish.train.trainers.objective import Objective, preference_objective, supervised_objective
from burnish.train.trainers.scored import pad_id_of, reward_objective
from burnish.train.trainers.trainer import COUNT, RowsResult, Trainer, check_rows


def run_rows(args: argparse.Namespace, schema: type[RowsRunConfig]) -> int:
    """Train as the arguments describe, in the run's folder; returns the exit code."""
    step = resumed_step(args)
    resolved = load(args, schema)

    def build(sinks: Callable[[], Sequence[Sink]]) -> tuple[Trainer, Finish[RowsResult]]:
        trainer = build_trainer(resolved, sinks=sinks, report=lambda line: print(line, flush=True))
        return trainer, partial(_finish, trainer)

    next_step = "Use it: reward_model.path={exported}" if isinstance(resolved.config, RewardModelConfig) else TALK
    return run_in_folder(args, resolved, step=step, build=build, next_step=next_step)


def evaluate_run(args: argparse.Namespace, run: Path, command: str) -> int:
    """Print what the held-out rows say of a run's newest checkpoint; returns the exit code. Changes nothing in its folder."""
    schema: Any = CONFIGS[command]
    resolved = load(args, schema)
    with build_trainer(resolved, sinks=list, report=lambda line: print(line, flush=True)) as trainer:
        step = trainer.resume(run / CHECKPOINTS)
        if not step:
            raise UserError(f"the run in {run} has saved no step yet; its status.json says how it stands")
        for name, value in sorted(trainer.evaluate().items()):
            print(f"{name}: {value:.4f}" if name != COUNT else f"{name}: {value:.0f}")
    return 0


def build_trainer(resolved: Resolved[RowsRunConfig], *, sinks: Callable[[], Sequence[Sink]], report: Report) -> Trainer:
    """Build everything that `resolved` describes. `sinks` is called once all that can be wrong before loading weights was checked."""
    config = resolved.config
    with building("text", report) as say:
        folder = locate(required(config.model.path, "model.path", "a Hugging Face folder or a name from `burnish fetch`"))
        load_config(folder)
        codec = Codec.load(folder, template_kwargs=config.data.chat_template_kwargs)
        say(f"{folder}")
    with building("data", report) as say:
        objective = _objective(config, folder)
        if isinstance(config, DistillationConfig):
            check_distillation_teacher(_teacher(resolved), codec, max_tokens=config.training.max_tokens)
        encoder = Encoder(objective.encode, codec, config.training.max_tokens, config.training.overlong)
        data, base = config.data, resolved.base
        stream = training_examples(
            make_sources(data, data.train, base, reader=objective.reader),
            encoder,
            seed=config.run.seed,
            batch_size=config.training.batch_size,
            weights=[source.weight for source in data.train],
            shuffle=data.shuffle,
            epochs=data.epochs,
        )
        found = make_sources(data, data.eval, base, reader=objective.reader) if data.eval else []
        held_out = [example for source in found for example in encoder.all(source)]
        say(f"{stream.num_rows or 'uncounted'} rows to train on, {len(held_out)} held out")
        ahead = isinstance(config, PreferenceConfig) and config.training.precompute_reference
        check_rows(objective, config.training, stream, held_out, precompute_reference=ahead)
    outputs = sinks()
    with building("model", report) as say:
        trainer = _trainer(resolved, folder, stream, held_out, outputs)
        trained = "every weight is trained" if trainer.policy.scale is None else "an adapter is trained"
        say(f"{trainer.policy.model.config.family}, products in {trainer.policy.precision}, {trained}")
    return trainer


def _objective(config: RowsRunConfig, folder: Path) -> Objective:
    if isinstance(config, SFTConfig):
        return supervised_objective()
    if isinstance(config, DistillationConfig):
        return distillation_objective(config.distillation)
    if isinstance(config, RewardModelConfig):
        return reward_objective(pad_id=pad_id_of(folder), centering=config.training.centering)
    return preference_objective(config.loss.name, from_config(config.loss))


def _teacher(resolved: Resolved[RowsRunConfig]) -> str:
    """As it is found beside the configuration, else from here."""
    assert isinstance(resolved.config, DistillationConfig), "others have no teacher"
    return found_folder(resolved.config.teacher.path, resolved.base)


def _trainer(
    resolved: Resolved[RowsRunConfig], folder: Path, stream: ExampleStream, held_out: Sequence[Example], sinks: Sequence[Sink]
) -> Trainer:
    config, lora = resolved.config, adapter_options(resolved.config.model, resolved.base)
    where: dict[str, Any] = {"lora": lora, "precision": config.model.precision, "mesh": config.cluster.actor}
    what: dict[str, Any] = {"train_ds": stream, "eval_ds": held_out or None, "run": config.run, "sinks": sinks}
    if isinstance(config, SFTConfig):
        return PeftTrainer(folder, training=config.training, **where, **what)
    if isinstance(config, DistillationConfig):
        return DistillationTrainer(folder, _teacher(resolved), config.distillation, training=config.training, **where, **what)
    if isinstance(config, RewardModelConfig):
        return RewardModelTrainer(folder, training=config.training, **where, **what)
    return DPOTrainer(folder, config.loss, training=config.training, **where, **what)


def _finish(trainer: Trainer, result: RowsResult, folder: Path) -> Path:
    """Export, and say what the held-out rows' metrics have become."""
    before, after = result.evaluations.get(0, {}), result.evaluations.get(result.steps, {})
    for name in sorted((before.keys() & after.keys()) - {COUNT}):
        print(f"{name}: {before[name]:.4f} before, {after[name]:.4f} after")
    return trainer.export(folder)
