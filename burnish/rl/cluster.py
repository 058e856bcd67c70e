"""Where models live and what can be asked of them: the one object that a learner talks to.

Owns placement of the roles (actor, rollout, reference) and the operations on them: sampling, log-probs, updates, weight sync, saving.
Knows no prompts, rewards or queues (`rl.learner`) and no losses (`rl.losses`, which the algorithm brings).
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float

from burnish import checkpoint
from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, LoraConfig, MeshSpec, RolloutConfig, TrainingConfig
from burnish.models import weights
from burnish.models.lora import init_adapter
from burnish.models.model import Model, resolve_precision
from burnish.models.sharding import batch_sharding, check_mesh
from burnish.models.transformer import Adapter, Params, Precision
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import TokenBatch
from burnish.rollout.engine import Engine, wait_for
from burnish.rollout.native.engine import NativeEngine
from burnish.train.optim import make_optimizer
from burnish.train.score import HeadOptions, make_score
from burnish.train.state import TrainState, init_state, leaf_names, read_metrics, stop_if_nonfinite
from burnish.train.step import MicroBatch, Steps, make_steps
from burnish.types import Completion, Request


class Role(enum.StrEnum):
    """Who a model is in a run."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"


class RLCluster:
    """Holds the actor, the sampling engine and, where an algorithm needs it, the reference.

    model: a `Model`, or a path as `Model.load` takes it. lora: train an adapter beside the frozen base; then the base is the reference,
    at no memory. Without it every weight is trained and the first weights are kept as the reference if the algorithm asks for one.
    The engine has its own copy of the weights, in its own layout; `sync_weights` is the only way in.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        cluster: ClusterConfig = ClusterConfig(),
        rollout: RolloutConfig = RolloutConfig(),
        training: TrainingConfig = TrainingConfig(),
        seed: int = 0,
    ) -> None:
        self.mesh = build_mesh(cluster.actor)
        self.model = model if isinstance(model, Model) else Model.load(model, mesh=self.mesh)
        self.precision: Precision = resolve_precision(precision)
        self.rollout_config, self.training_config = rollout, training
        self.context = min(rollout.max_prompt_tokens + rollout.sampling.max_tokens, self.model.config.max_positions)
        if self.mesh is not None:
            check_mesh(self.model.config, self.mesh)
        adapter = None if lora is None else init_adapter(self.model.config, lora, jax.random.key(seed))
        self._scale = None if adapter is None else adapter.scale
        self._base = None if adapter is None else self.model.params
        self._first: Params | None = self.model.params if adapter is None else adapter.pairs
        self._state: TrainState | None = None
        self._steps: Steps | None = None
        self._anchor: Any = None
        self._version = 0
        self.engine: Engine = self._start_engine(adapter)

    def _start_engine(self, adapter: Adapter | None) -> NativeEngine:
        config = self.rollout_config
        return NativeEngine(
            self.model.config,
            self.model.params,
            adapter=adapter,
            decode_text=self.model.codec.tokenizer.decode,
            context=self.context,
            slots=config.slots,
            prefill_rows=config.prefill_rows,
            decode_chunk=config.decode_chunk,
            max_kept=config.max_kept,
            precision=self.precision,
        )

    # -------------------------------------------------------------------------------------------------------------- the actor

    def prepare(self, algorithm: Algorithm, *, total_updates: int) -> None:
        """Take the algorithm that updates will follow: its optimizer state, its compiled programs, the policies it compares with."""
        training = self.training_config
        optimizer = make_optimizer(training.optimizer, total_updates=total_updates)
        remat = self._scale is None if training.remat == "auto" else training.remat
        self._steps = make_steps(
            self.model.config,
            algorithm,
            optimizer,
            lora_scale=self._scale,
            precision=self.precision,
            remat=remat,
            head_chunk=training.head_chunk,
        )
        options = HeadOptions(chunk=training.head_chunk, precision=self.precision)
        self._score = make_score(self.model.config, lora_scale=self._scale or 1.0, options=options)
        if self._first is None:
            raise RuntimeError("this cluster has trained already and kept no first weights: build another one")
        self._state = init_state(self._first, optimizer)
        self._needs_anchor = "old" in algorithm.scores_needed
        self._needs_reference = "reference" in algorithm.scores_needed
        if self._scale is None and not self._needs_reference:
            self.model = _without_params(self.model)  # the state has its own copy; the file's needn't stay in memory beside it
            self._first = None
        self._take_anchor()

    @property
    def state(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("the cluster has no algorithm yet: a learner calls prepare() first")
        return self._state

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from."""
        return self._version

    @property
    def rows_multiple(self) -> int:
        """What the rows of a batch must be a multiple of, to be spread evenly."""
        return 1 if self.mesh is None else self.mesh.shape.get("data", 1) * self.mesh.shape.get("fsdp", 1)

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a host batch on the actor's devices, rows spread over `data` and `fsdp`."""
        return jax.device_put(batch, None if self.mesh is None else batch_sharding(self.mesh))

    def get_actor_per_token_logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids under the policy that the engine sampled from: the anchor of this step's updates."""
        if not self._needs_anchor:
            raise RuntimeError("this algorithm makes one update a step, so it keeps no older policy to ask")
        with span("score", role="actor"):
            params, pairs = (self._anchor, None) if self._base is None else (self._base, self._anchor)
            return self._score(params, pairs, batch)

    def get_ref_per_token_logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids under the reference: the first weights, or the base without its adapter."""
        reference = self._first if self._base is None else self._base
        if reference is None or not self._needs_reference:
            raise RuntimeError("this algorithm compares with no reference (beta is 0)")
        with span("score", role="reference"):
            return self._score(reference, None, batch)

    def update_actor(self, micro_batches: Iterable[MicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        """One update from a mini-batch of `count` micro-batches, each taken when it is needed. Returns the update's metrics.

        Raises NonFiniteError after `training.max_nonfinite_updates` updates in a row that had to be skipped.
        """
        if self._steps is None:
            raise RuntimeError("the cluster has no algorithm yet: a learner calls prepare() first")
        self._state, report = self._steps.update(self.state, self._base, micro_batches, count=count)
        with span("update", step=step):
            metrics = read_metrics(report)
        stop_if_nonfinite(self._state, report, limit=self.training_config.max_nonfinite_updates, step=step)
        return metrics

    # ------------------------------------------------------------------------------------------------------------ the engine

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample several completions; for scripts and tests. Learners talk to `engine`, request by request."""

        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return wait_for(together())

    def sync_weights(self) -> int:
        """Give the engine the actor's weights as a new version, all or none of them. Returns the version."""
        version = self._version + 1
        prefix = "" if self._scale is None else "adapter."
        leaves = jax.tree.leaves(self.state.trainable)
        names = [prefix + name for name in leaf_names(self.state.trainable)]

        async def push() -> None:
            await self.engine.begin_update(version)
            for name, leaf in zip(names, leaves, strict=True):
                await self.engine.push(name, leaf)
            await self.engine.commit_update()

        with span("sync", version=version):
            wait_for(push())
        self._version = version
        self._take_anchor()
        return version

    def _take_anchor(self) -> None:
        if self._needs_anchor:
            self._anchor = jax.tree.map(lambda x: jnp.array(x, copy=True), self.state.trainable)

    # --------------------------------------------------------------------------------------------------------- files, and the end

    def save(self, folder: Path, *, step: int, extra: dict[str, Any]) -> Path:
        """Commit the trainable weights, the optimizer's state and `extra` as checkpoint `step`."""
        with span("save", step=step):
            return checkpoint.save(folder, step, self.state, extra)

    def export(self, folder: Path) -> Path:
        """Write what was trained for other programs: `adapter/` in PEFT's format, or `model/` as a Hugging Face folder."""
        if self._scale is not None:
            target = folder / "adapter"
            adapter = Adapter(self.state.trainable, self._scale)
            weights.save_adapter(target, self.model.config, adapter, base=str(self.model.folder.absolute()))
        else:
            target = folder / "model"
            weights.save(target, self.model.config, self.state.trainable, like=self.model.folder)
        return target

    def close(self) -> None:
        """Stop the engine. Waiting requests end with `EngineClosed`; closing twice is fine."""
        wait_for(self.engine.close())


def build_mesh(spec: MeshSpec) -> Mesh | None:
    """The actor's mesh, or None for one device, where a mesh would only cost dispatch time."""
    sizes = tuple(spec.axes.values())
    needed, found = int(np.prod(sizes)), jax.local_device_count()
    if needed > found:
        raise UserError(f"cluster.actor.axes {spec.axes} needs {needed} devices, this process has {found}: make an axis smaller")
    if needed == 1:
        return None
    devices = np.array(jax.local_devices()[:needed]).reshape(sizes)
    return Mesh(devices, tuple(spec.axes), axis_types=(AxisType.Auto,) * len(sizes))


def _without_params(model: Model) -> Model:
    return dataclasses.replace(model, params={})


__all__ = ["RLCluster", "Role", "build_mesh"]
