"""From a configuration to a trainer of rows, and from its result to words: what `burnish sft` and `burnish dpo` share.

Owns the order of building (what is cheap and often wrong comes first). Running is `running`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from burnish.cli.build import Report, adapter_options, building, make_sources, required
from burnish.cli.options import load, resumed_step
from burnish.cli.running import Finish, run_in_folder
from burnish.config.loader import Resolved
from burnish.config.tuning import RowsRunConfig, SFTConfig
from burnish.data.example_stream import Encoder, ExampleStream, training_examples
from burnish.data.examples import Example
from burnish.models.locate import locate
from burnish.models.weights import load_config
from burnish.observe.sinks import Sink
from burnish.text.codec import Codec
from burnish.train.preference import from_config
from burnish.train.trainers.named import DPOTrainer, PeftTrainer
from burnish.train.trainers.objective import Objective, preference_objective, supervised_objective
from burnish.train.trainers.trainer import COUNT, RowsResult, Trainer, check_rows


def run_rows(args: argparse.Namespace, schema: type[RowsRunConfig]) -> int:
    """Train as the arguments describe, in the run's folder; returns the exit code."""
    step = resumed_step(args)
    resolved = load(args, schema)

    def build(sinks: Callable[[], Sequence[Sink]]) -> tuple[Trainer, Finish[RowsResult]]:
        trainer = build_trainer(resolved, sinks=sinks, report=lambda line: print(line, flush=True))
        return trainer, partial(_finish, trainer)

    return run_in_folder(args, resolved, step=step, build=build)


def build_trainer(resolved: Resolved[RowsRunConfig], *, sinks: Callable[[], Sequence[Sink]], report: Report) -> Trainer:
    """Build everything that `resolved` describes. `sinks` is called once all that can be wrong before loading weights was checked."""
    config = resolved.config
    with building("text", report) as say:
        folder = locate(required(config.model.path, "model.path", "a Hugging Face folder or a name from `burnish fetch`"))
        load_config(folder)
        codec = Codec.load(folder, template_kwargs=config.data.chat_template_kwargs)
        say(f"{folder}")
    with building("data", report) as say:
        objective = _objective(config)
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
        ahead = not isinstance(config, SFTConfig) and config.training.precompute_reference
        check_rows(objective, config.training, stream, held_out, precompute_reference=ahead)
    outputs = sinks()
    with building("model", report) as say:
        trainer = _trainer(resolved, folder, stream, held_out, outputs)
        trained = "every weight is trained" if trainer.policy.scale is None else "an adapter is trained"
        say(f"{trainer.policy.model.config.family}, products in {trainer.policy.precision}, {trained}")
    return trainer


def _objective(config: RowsRunConfig) -> Objective:
    if isinstance(config, SFTConfig):
        return supervised_objective()
    return preference_objective(config.loss.name, from_config(config.loss))


def _trainer(
    resolved: Resolved[RowsRunConfig], folder: Path, stream: ExampleStream, held_out: Sequence[Example], sinks: Sequence[Sink]
) -> Trainer:
    config, lora = resolved.config, adapter_options(resolved.config.model, resolved.base)
    where: dict[str, Any] = {"lora": lora, "precision": config.model.precision, "mesh": config.cluster.actor}
    what: dict[str, Any] = {"train_ds": stream, "eval_ds": held_out or None, "run": config.run, "sinks": sinks}
    if isinstance(config, SFTConfig):
        return PeftTrainer(folder, training=config.training, **where, **what)
    return DPOTrainer(folder, config.loss, training=config.training, **where, **what)


def _finish(trainer: Trainer, result: RowsResult, folder: Path) -> Path:
    """Export, and say what the held-out rows' metrics have become."""
    before, after = result.evaluations.get(0, {}), result.evaluations.get(result.steps, {})
    for name in sorted((before.keys() & after.keys()) - {COUNT}):
        print(f"{name}: {before[name]:.4f} before, {after[name]:.4f} after")
    return trainer.export(folder)
