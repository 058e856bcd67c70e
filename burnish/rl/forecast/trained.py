"""The programs of those who score and learn: actor, reference, teacher, critic, reward model.

Owns what each is given, at the largest shapes that a run can have; the programs are the run's own (`train.step`, `train.score`,
`train.value`, `rl.reward_model`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from burnish.config.algorithms import PPOConfig
from burnish.models import scalar_head, transformer
from burnish.models.config import ModelConfig
from burnish.models.lora import spec_from
from burnish.models.quant import quantised_spec
from burnish.rl.critic import OPTIMIZER
from burnish.rl.forecast.programs import ProgramMemory, RolePrograms, measure
from burnish.rl.forecast.run import PlannedRun, Shaped, bytes_on_a_device, rows, token_batch, weights
from burnish.rl.layout import bucket
from burnish.rl.placement import Role
from burnish.rl.reward_model import LENGTH_STEP, make_scores
from burnish.train.balance import balance_of
from burnish.train.optim import Optimizer, make_optimizer
from burnish.train.score import HeadOptions, make_score
from burnish.train.step import MicroBatch, Steps, make_apply, make_steps
from burnish.train.value import ValueMicroBatch, make_value_steps, make_values

_UPDATES = 1_000_000
"""In a run, for its schedule: a number in a program, which doesn't change its memory."""


def trainable_and_base(run: PlannedRun) -> tuple[Shaped, Shaped | None]:
    """The actor's trained leaves, and the frozen ones under an adapter."""
    config, mesh, lora = run.models[Role.ACTOR], run.meshes[Role.ACTOR], run.config.model.lora
    params = _frozen_weights(run, config, mesh)
    if lora is None:
        return params, None
    return weights(spec_from(config, lora), mesh), params


def _frozen_weights(run: PlannedRun, config: ModelConfig, mesh: Any) -> Shaped:
    """The actor's, in the bits that a base beside an adapter is kept in."""
    lora = run.config.model.lora
    return weights(quantised_spec(transformer.spec(config), None if lora is None else lora.quantize), mesh)


def actor_programs(run: PlannedRun) -> RolePrograms:
    """Scoring by the anchor, where there is one, and an update."""
    training, mesh, needed = run.config.training, run.meshes[Role.ACTOR], run.algorithm.scores_needed
    trainable, base = trainable_and_base(run)
    batch = token_batch(run.largest_batch(run.plan.train_micro), mesh)
    logps: Shaped = rows(batch.mask.shape, jnp.float32, mesh)
    before: list[ProgramMemory] = []
    if run.scores_actor:
        params, pairs = (trainable, None) if base is None else (base, trainable)
        asked = _scoring_batch(run, Role.ACTOR)
        scored = measure("score", _score(run), params, pairs, asked, passing=asked)
        before.append(scored.memory)
        logps = _answer(run, scored.outputs, batch)
    old = logps if "old" in needed or run.algorithm.old == "sampler" else None
    reference = _reference_answer(run, logps, batch) if "reference" in needed else None
    optimizer = make_optimizer(training.optimizer, total_updates=_UPDATES)
    steps = make_steps(
        run.models[Role.ACTOR],
        run.algorithm,
        optimizer,
        lora_scale=_scale(run),
        precision=run.precision,
        remat=base is None if training.remat == "auto" else training.remat,
        head_chunk=training.head_chunk,
        balance=balance_of(run.models[Role.ACTOR], training.balance, trains_routers=base is None),
    )
    return _update(run, steps, optimizer, trainable, base, MicroBatch(batch, old, reference), before)


def reference_programs(run: PlannedRun) -> RolePrograms:
    """Scoring by the reference: with the adapter that the run starts from, if it starts from one."""
    lora, config, mesh = run.config.model.lora, run.models[Role.REFERENCE], run.meshes[Role.REFERENCE]
    started = lora is not None and lora.path is not None
    pairs = weights(spec_from(config, lora), mesh) if lora is not None and started else None
    return _frozen(run, Role.REFERENCE, _score(run), _frozen_weights(run, config, mesh), pairs)


def teacher_programs(run: PlannedRun) -> RolePrograms:
    """Scoring by the teacher."""
    config, mesh = run.models[Role.TEACHER], run.meshes[Role.TEACHER]
    return _frozen(run, Role.TEACHER, make_score(config, options=_head(run)), weights(transformer.spec(config), mesh), None)


def _frozen(run: PlannedRun, role: Role, program: Any, params: Shaped, pairs: Shaped | None) -> RolePrograms:
    asked = _scoring_batch(run, role)
    return RolePrograms((measure("score", program, params, pairs, asked, passing=asked).memory,))


def critic_programs(run: PlannedRun) -> RolePrograms:
    """Values, and an update of the critic."""
    config, training, mesh = run.models[Role.CRITIC], run.config.training, run.meshes[Role.CRITIC]
    options, value_loss = run.config.algorithm, run.algorithm.value_loss
    assert isinstance(options, PPOConfig) and value_loss is not None, "there is a critic"
    trainable = weights(scalar_head.spec(config), mesh)
    batch = token_batch(run.largest_batch(run.plan.train_micro), mesh)
    values = measure("values", make_values(config, precision=run.precision), trainable, batch, passing=batch)
    optimizer = make_optimizer(options.critic.optimizer, total_updates=_UPDATES, key=OPTIMIZER)
    remat = True if training.remat == "auto" else training.remat
    steps = make_value_steps(config, value_loss, run.algorithm.aggregate, optimizer, precision=run.precision, remat=remat)
    old: Shaped = values.outputs[0] if mesh == run.meshes[Role.ACTOR] else rows(batch.mask.shape, jnp.float32, mesh)
    return _update(run, steps, optimizer, trainable, None, ValueMicroBatch(batch, old), [values.memory])


def reward_programs(run: PlannedRun) -> RolePrograms:
    """Scores of as many conversations as go together, as long as they may be."""
    section, config, mesh = run.config.reward_model, run.models[Role.REWARD], run.meshes[Role.REWARD]
    assert section is not None, "there is a reward model"
    size = bucket(section.micro_batch_size, multiple=run.placement[Role.REWARD].place.rows)
    length = min(bucket(section.max_tokens or config.max_positions, multiple=LENGTH_STEP), config.max_positions)
    params = weights(scalar_head.spec(config), mesh, run.reward_dtype)
    tokens, lasts = rows((size, length), jnp.int32, mesh), rows((size,), jnp.int32, mesh)
    return RolePrograms((measure("score", make_scores(config, run.precision), params, tokens, lasts, passing=(tokens, lasts)).memory,))


# ------------------------------------------------------------------------------------------------------------------------- scoring


def _scale(run: PlannedRun) -> float | None:
    lora = run.config.model.lora
    return None if lora is None else lora.scale


def _score(run: PlannedRun) -> Any:
    return make_score(run.models[Role.ACTOR], lora_scale=_scale(run) or 1.0, options=_head(run))


def _head(run: PlannedRun) -> HeadOptions:
    return HeadOptions(chunk=run.config.training.head_chunk, precision=run.precision)


def _scoring_batch(run: PlannedRun, role: Role) -> Shaped:
    """What a scoring pass gets: as many prompts as it is told to take, else a micro-batch of the update."""
    size = run.config.training.compute_logps_micro_batch_size
    shape = run.largest_batch(size or run.plan.train_micro)
    if size is not None:  # rows are taken from several micro-batches, one for each prompt
        shape = dataclasses.replace(shape, rows=bucket(size, multiple=run.placement[Role.ACTOR].place.rows))
    return token_batch(shape, run.meshes[role])


def _answer(run: PlannedRun, scored: Shaped, batch: Any) -> Shaped:
    """Log-probs on their way into an update; those of passes of another size come by the host."""
    by_host = run.config.training.compute_logps_micro_batch_size is not None
    return rows(batch.mask.shape, jnp.float32, run.meshes[Role.ACTOR]) if by_host else scored


def _reference_answer(run: PlannedRun, own: Shaped, batch: Any) -> Shaped:
    if run.meshes[Role.REFERENCE] == run.meshes[Role.ACTOR]:
        return own
    return _answer(run, rows(batch.mask.shape, jnp.float32, run.meshes[Role.ACTOR]), batch)


# ---------------------------------------------------------------------------------------------------------------------- any update


def _update(
    run: PlannedRun,
    steps: Steps[Any],
    optimizer: Optimizer,
    trainable: Shaped,
    base: Shaped | None,
    micro: Any,
    before: list[ProgramMemory],
) -> RolePrograms:
    """The gradients of a pass, added to the sum where there are several; then the parameters and the moments. before: what runs earlier."""
    state, gradients = _state(optimizer, trainable), bytes_on_a_device(trainable)  # float32 both, and cut alike
    if run.accumulates:
        nothing = jax.tree.map(_unplaced, jax.eval_shape(steps.totals, trainable, base, micro))
        start = dataclasses.replace(nothing, gradients=trainable)
        update = measure("update", steps.accumulate, start, trainable, base, micro, passing=micro, with_gradients=True)
    else:
        update = measure("update", steps.totals, trainable, base, micro, passing=micro, with_gradients=True, new_gradients=gradients)
    apply, totals, counter = make_apply(optimizer), update.outputs, jax.ShapeDtypeStruct((), jnp.int32)
    moved = measure("apply: weights", apply.move, trainable, state, counter, totals, with_gradients=True)
    new, verdict, _ = moved.outputs
    remembered = measure("apply: moments", apply.remember, state, new, totals.gradients, verdict, with_gradients=True)
    return RolePrograms((*before, update.memory, moved.memory, remembered.memory), optimizer=bytes_on_a_device(state), gradients=gradients)


def _state(optimizer: Optimizer, trainable: Shaped) -> Shaped:
    """The optimizer's first state: moments that are like a leaf lie as it does, whatever else there is the compiler places."""

    def moment(s: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=leaf.sharding) if s.shape == leaf.shape else _unplaced(s)

    shapes = jax.eval_shape(optimizer.transform.init, trainable)
    return optax.tree_utils.tree_map_params(optimizer.transform, moment, shapes, trainable, transform_non_params=_unplaced)


def _unplaced(s: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(s.shape, s.dtype)
