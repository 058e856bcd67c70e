"""A run as far as it is known before anything is loaded: what every part of the forecast reads.

Owns the record, the shapes of its batches at their largest, and trees of shapes in place of arrays. Nothing here holds data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burnish.config.schema import Config, SamplingConfig
from burnish.models.config import ModelConfig, Precision
from burnish.models.sharding import batch_sharding, shardings
from burnish.models.transformer import ParamSpec
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import TokenBatch
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.cluster import longest_sequence
from burnish.rl.layout import BatchShape, bucket, plan_shape
from burnish.rl.overlap import streams
from burnish.rl.placement import Placement, Role

Shaped = Any
"""A tree of `ShapeDtypeStruct`: arrays without their numbers, each with the sharding that it will have (None: left to the compiler)."""


@dataclass(frozen=True)
class PlannedRun:
    """algorithm: with the scores that it will need. models: the architecture of every role; meshes: None is the first device alone.
    local_devices: of each process, all of which are parts of this one. reward_dtype: of the reward model's stored weights."""

    config: Config
    algorithm: Algorithm
    plan: BatchPlan
    precision: Precision
    placement: Placement
    models: Mapping[Role, ModelConfig]
    meshes: Mapping[Role, Mesh | None]
    local_devices: int
    reward_dtype: Any = None

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its completion."""
        return longest_sequence(self.config.rollout, self.models[Role.ACTOR])

    @property
    def scores_actor(self) -> bool:
        """Whether the actor's own log-probs are computed before an update, with the anchor."""
        return bool({"old", "teacher"} & self.algorithm.scores_needed) or self.algorithm.reward_kl is not None

    @property
    def deliveries(self) -> list[list[int]]:
        """The mini-batches of a step, from 1, as the producer hands them on: those that are whole when the same prompts are sampled."""
        plan = self.plan
        minis = range(1, plan.num_mini_batches + 1)
        if self.algorithm.zero_signal == "resample":  # what is kept is known at the end
            return [list(minis)]
        return [list(group) for _, group in itertools.groupby(minis, key=lambda mini: -(-mini * plan.mini_batch // plan.rollout))]

    def apart(self, one: Role, other: Role) -> bool:
        """Whether two roles have no device in common."""
        return not {*self.placement[one].place.devices} & {*self.placement[other].place.devices}

    @property
    def streams(self) -> bool:
        """Whether an update takes its micro-batches while the last are sampled."""
        processes = self.placement[Role.ACTOR].place.processes
        return streams(self.algorithm, self.plan, apart=self.apart(Role.ACTOR, Role.ROLLOUT), num_processes=processes)

    @property
    def overlaps(self) -> bool:
        """Whether the engine has something to sample while an update is made."""
        return len(self.deliveries) > 1 or self.plan.max_staleness > 0 or self.streams

    @property
    def accumulates(self) -> bool:
        """Whether an update sums the gradients of several passes (or may: with `tokens_per_device` that depends on lengths)."""
        return self.plan.accumulation_steps != 1

    def largest_batch(self, prompts: int | None) -> BatchShape:
        """The shape of a pass over so many prompts, all as long as they may be; None: as `tokens_per_device` cuts them."""
        rollout, multiple = self.config.rollout, self.placement[Role.ACTOR].place.rows
        generations = self.plan.num_generations
        kept = bucket(rollout.max_kept, multiple=8) if truncates(rollout.sampling) else 0
        if prompts is None:
            length, mini = self.plan.tokens_per_device or 0, self.plan.mini_batch
            return BatchShape(multiple, length, length, mini * generations, mini, kept)
        longest = plan_shape(
            layout="shared",
            num_prompts=prompts,
            num_generations=generations,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_completion_tokens=rollout.longest_sequence - rollout.max_prompt_tokens,
            kept=kept,
        )
        return longest.covering(BatchShape(bucket(prompts, multiple=multiple), 0, 0, 0, 0))


def devices_of(process: int, count: int) -> Sequence[Any]:
    """Those of this process's devices that stand for the `count` devices of another."""
    return jax.local_devices()[process * count : (process + 1) * count]


def truncates(sampling: SamplingConfig) -> bool:
    """Whether completions carry the set of ids that they were drawn from."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


# ------------------------------------------------------------------------------------------------------------ shapes without arrays


def weights(specs: Any, mesh: Mesh | None, dtype: Any = jnp.float32) -> Shaped:
    """Declared leaves where the rule of `models.sharding` puts them, in `dtype` where the declaration doesn't say."""
    places = None if mesh is None else shardings(specs, mesh)
    if places is None:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or dtype), specs, is_leaf=_is_declared)

    def shaped(s: ParamSpec, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype or dtype, sharding=place)

    return jax.tree.map(shaped, specs, places, is_leaf=_is_declared)


def rows(shape: tuple[int, ...], dtype: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """One entry a row: spread over a mesh that divides the rows, else whole on each device (as `sites.Site.take` has it)."""
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    groups = math.prod(mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))
    place = batch_sharding(mesh) if shape[0] % groups == 0 else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def token_batch(shape: BatchShape, mesh: Mesh | None) -> TokenBatch:
    """A batch of that shape."""

    def field(*size: int, dtype: Any = np.int32) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (shape.rows, *size))  # of any size, in a few bytes

    grid = {name: field(shape.columns) for name in ("tokens", "positions", "segments", "parents")}
    counts = ("columns", "own_columns", "target_ids", "sequences", "prompts_index", "sequence_tokens", "prompt_tokens")
    numbers = ("advantages", "returns", "sampler_logps", "temperatures")
    batch = TokenBatch(
        **grid,
        **{name: field(shape.targets) for name in counts},
        **{name: field(shape.targets, dtype=np.float32) for name in numbers},
        mask=field(shape.targets, dtype=np.bool_),
        kept_ids=field(shape.targets, shape.kept) if shape.kept else None,
        num_sequences=shape.sequences,
        num_prompts=shape.prompts,
    )
    return jax.tree.map(lambda x: rows(x.shape, x.dtype, mesh), batch)


def bytes_on_a_device(tree: Shaped) -> int:
    """What a tree takes on each of its devices; a leaf without a sharding is whole."""

    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def declared(specs: Any) -> list[ParamSpec]:
    """The leaves of a declared tree, in jax's order."""
    return jax.tree.leaves(specs, is_leaf=_is_declared)


def _is_declared(leaf: Any) -> bool:
    return isinstance(leaf, ParamSpec)
