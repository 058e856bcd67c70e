"""The model that is trained on rows: where it lies, its updates, its reference, its files. `RLCluster` without an engine.

Owns the weights and the compiled programs that ask about them. The loss is `objective`'s, updates are `train.step`'s, log-probs
`train.score`'s, as in reinforcement learning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float

from burnish.config.schema import ClusterConfig, LoraConfig, MeshSpec
from burnish.config.tuning import RowsTrainingConfig
from burnish.models import transformer, weights
from burnish.models.lora import spec_from
from burnish.models.model import Model, frozen_base, resolve_precision
from burnish.models.moe import Load
from burnish.models.sharding import batch_sharding, check_mesh
from burnish.models.transformer import Adapter, Dropout, Params, Precision
from burnish.observe.devices import dispatched
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics
from burnish.rl.placement import actor_place
from burnish.rl.reference import fingerprint
from burnish.rl.sites import Site, make_mesh
from burnish.train.balance import balance_of
from burnish.train.optim import make_optimizer
from burnish.train.preference import PerAnswer, answer_sums
from burnish.train.score import HeadOptions, policy_scores_and_load
from burnish.train.state import TrainState, init_state, read_metrics, shape_to_read, stop_if_nonfinite
from burnish.train.step import Steps, compile_steps
from burnish.train.trainers.noise import dropout, neftune
from burnish.train.trainers.objective import Objective, RowsMicroBatch

ROLE = "actor"
"""Name of the one state in a checkpoint, as in reinforcement learning."""


class TrainedPolicy:
    """All weights of a model, or an adapter beside them, and the reference that it is compared with: the weights it started from.

    model: a `Model`, or a path as `Model.load` takes it. lora: train an adapter beside the frozen base; one that goes on from a folder
    (`lora.path`) is a part of the reference as it was there.
    """

    counts_load: ClassVar[bool] = True
    """Whether `_score` counts what routers do, so that experts' load can be balanced."""

    def __init__(
        self,
        model: Model | str | Path,
        *,
        lora: LoraConfig | None = None,
        precision: Literal["auto", "f32", "bf16"] = "auto",
        mesh: MeshSpec = MeshSpec(),
        training: RowsTrainingConfig = RowsTrainingConfig(),
        seed: int = 0,
    ) -> None:
        self._place_at(mesh, precision, training, lora)
        model = model if isinstance(model, Model) else Model.load(model, mesh=self.mesh)
        if self.mesh is not None:
            check_mesh(model.config, self.mesh)
        self.model = dataclasses.replace(model, params=self._site.spread(model.params, transformer.spec(model.config)))
        if lora is not None:
            self.model = dataclasses.replace(self.model, params=frozen_base(self.model, lora, self.mesh))
        start = None if lora is None else self._start(lora, seed)
        self.scale = None if start is None else start.scale
        self._base: Params | None = None if start is None else self.model.params
        self._first: Params = self.model.params if start is None else start.pairs
        self._is_fresh = lora is None or lora.path is None

    def _place_at(
        self, mesh: MeshSpec, precision: Literal["auto", "f32", "bf16"], training: RowsTrainingConfig, lora: LoraConfig | None
    ) -> None:
        """What is known before there are weights."""
        place = actor_place(ClusterConfig(actor=mesh), num_devices=jax.local_device_count())
        self.mesh = make_mesh(place)
        self._site = Site(place, self.mesh, self.mesh, contextlib.nullcontext())
        self.precision: Precision = resolve_precision(precision)
        self._training, self._lora = training, lora
        self._state: TrainState | None = None

    def _start(self, lora: LoraConfig, seed: int) -> Adapter:
        config = self.model.config
        start = weights.first_adapter(config, lora, jax.random.key(seed), self.model.params)
        return start._replace(pairs=self._site.spread(start.pairs, spec_from(config, lora)))

    # ------------------------------------------------------------------------------------------------------------- programs

    def prepare(
        self, objective: Objective, *, total_updates: int, neftune_alpha: float | None = None, balance: float | None = None
    ) -> None:
        """Take what is learned: the optimizer's state, the compiled programs. total_updates: of the whole run, for its schedule. balance:
        factor on the loss that balances experts, None for the model's own."""
        optimizer = make_optimizer(self._training.optimizer, total_updates=total_updates)
        uneven = balance_of(self.model.config, balance, trains_routers=self.scale is None) if self.counts_load else None
        loss, score = self._loss(objective, neftune_alpha, with_load=uneven is not None), self._score()
        self._steps: Steps[RowsMicroBatch] = compile_steps(loss, optimizer, uneven)
        self._measure = jax.jit(lambda trainable, base, micro: loss(trainable, base, micro)[:2])
        self._sums = jax.jit(lambda trainable, base, batch: answer_sums(batch, score(trainable, base, batch)[0]))
        self._state = init_state(self._first, optimizer)
        if not objective.needs_reference:
            self.forget_reference()

    def forget_reference(self) -> None:
        """Nothing will be compared with the first weights any more: the state has its own copy, so these needn't stay in memory."""
        self._first = {}
        if self._base is None:
            self.model = dataclasses.replace(self.model, params={})

    def _score(self, remat: Any = False, *, with_load: bool = False) -> Callable[..., tuple[Float[Array, "R M"], Load | None]]:
        """(trained leaves or none, frozen ones, batch, noise, dropout) → log-probs of the scored tokens, and what routers did."""
        head = HeadOptions(chunk=self._training.head_chunk, precision=self.precision, train_head=self.scale is None)
        config, scale = self.model.config, self.scale

        def score(
            trainable: Params | None, base: Params | None, batch: TokenBatch, noise: Any = None, dropout: Dropout | None = None
        ) -> tuple[Float[Array, "R M"], Load | None]:
            params = trainable if base is None else base
            adapter = None if base is None or trainable is None or scale is None else Adapter(trainable, scale, dropout)
            assert params is not None, "all weights are trained, or there is a base"
            how: dict[str, Any] = {"adapter": adapter, "options": head, "remat": remat, "noise": noise}
            logps, _, load = policy_scores_and_load(config, params, batch, **how, with_load=with_load)
            return logps, load

        return score

    def _loss(self, objective: Objective, alpha: float | None, *, with_load: bool) -> Callable[..., Any]:
        remat = self.scale is None if self._training.remat == "auto" else self._training.remat
        score, width = self._score(remat, with_load=with_load), self.model.config.width
        rate = 0.0 if self._lora is None else self._lora.dropout

        def loss(trainable: Params, base: Params | None, micro: RowsMicroBatch) -> tuple[Mean, Metrics, Load | None]:
            noise = None if alpha is None or micro.key is None else neftune(micro.key, micro.batch, width, alpha=alpha)
            left_out = None if not rate or micro.key is None else dropout(micro.key, micro.batch, rate=rate)
            scores, load = score(trainable, base, micro.batch, noise, left_out)
            mean, metrics = objective.loss(scores, micro)
            return mean, metrics | {"policy/loss": mean}, load

        return loss

    # ------------------------------------------------------------------------------------------------------- what it is asked

    @property
    def state(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("nothing is learned yet: a trainer calls prepare() first")
        return self._state

    @property
    def trained(self) -> Params:
        """All weights, or an adapter's pairs, as they are now."""
        return self.state.trainable

    @property
    def rows_multiple(self) -> int:
        """What the rows of a batch must be a multiple of, to be spread evenly over the devices."""
        return self._site.place.rows

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a host batch on the devices, rows spread over `data` and `fsdp`."""
        return jax.device_put(batch, None if self.mesh is None else batch_sharding(self.mesh))

    def sums(self, batch: TokenBatch) -> PerAnswer:
        """Log-probs of whole sequences under the policy now."""
        with span("score", role="actor"):
            return self._sums(self.state.trainable, self._base, batch)

    def reference_sums(self, batch: TokenBatch) -> PerAnswer:
        """The same under the weights that training started from: the base with its starting adapter, or the first weights."""
        with span("score", role="reference"):
            if self._base is None:
                return self._sums(self._first, None, batch)
            return self._sums(None if self._is_fresh else self._first, self._base, batch)

    def measure(self, micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
        """The loss and its metrics, without a gradient."""
        return self._measure(self.state.trainable, self._base, micro)

    def update(self, micro_batches: Iterable[RowsMicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        """One update from a mini-batch of `count` micro-batches. Raises NonFiniteError after `training.max_nonfinite_updates` in a row."""
        start = time.monotonic_ns()
        self._state, report = self._steps.update(self.state, self._base, micro_batches, count=count)
        dispatched(ROLE, "update", report, start_ns=start, step=step - 1)
        with span("update.wait"):
            metrics = read_metrics(report)
        stop_if_nonfinite(self._state, report, limit=self._training.max_nonfinite_updates, step=step)
        return metrics

    # ---------------------------------------------------------------------------------------------------------------- files

    @property
    def states(self) -> dict[str, TrainState]:
        """What training has changed: all that a checkpoint holds in arrays."""
        return {ROLE: self.state}

    def restore(self, read: Callable[[dict[str, TrainState]], dict[str, TrainState]]) -> None:
        """Go on from a saved state. read: gets the shapes, dtypes and shardings of `states`, and returns states like that."""
        shapes = jax.tree.map(partial(shape_to_read, self.mesh), self.states)
        self._state = None  # let go before the saved one is read
        self._state = read(shapes)[ROLE]

    def frozen_digest(self, *, has_reference: bool) -> str | None:
        """A digest of the weights that a checkpoint doesn't hold and a run that goes on must have; None where there are none."""
        if self._base is None:
            return fingerprint(self._first) if has_reference else None
        started = has_reference and not self._is_fresh  # then the adapter of that folder is part of the reference
        return f"{fingerprint(self._base)}+{fingerprint(self._first)}" if started else fingerprint(self._base)

    def export(self, folder: Path) -> Path:
        """Write what was trained: `adapter/` in PEFT's format, or `model/` as a Hugging Face folder; returns which."""
        if self.scale is None:
            weights.save(folder / "model", self.model.config, self.trained, like=self.model.folder)
            return folder / "model"
        adapter = Adapter(self.trained, self.scale)
        base = str(self.model.folder.absolute())
        weights.save_adapter(folder / "adapter", self.model.config, adapter, base=base, options=self._lora)
        return folder / "adapter"
