"""Where models live and what can be asked of them: the one object that a learner talks to.

Owns the operations on the roles (actor, rollout, reference, critic, reward): sampling, log-probs, values, updates, weight sync, saving.
Where each lives is `rl.placement`, its meshes and the order of programs on them `rl.sites`.
Knows no prompts, rewards or queues (`rl.learner`) and no losses (`rl.losses`, which the algorithm brings).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from burnish import faults
from burnish.config.algorithms import CriticConfig, TeacherConfig
from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, LoraConfig, RewardModelSection, RolloutConfig, TrainingConfig
from burnish.models import families, transformer, weights
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.lora import spec_from
from burnish.models.model import Model, frozen_base, resolve_precision
from burnish.models.quant import quantised_spec
from burnish.models.sharding import batch_sharding, check_mesh, shardings
from burnish.models.transformer import Adapter, Params, Precision
from burnish.observe.devices import dispatched
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.algorithms import Algorithm
from burnish.rl.anchor import Anchor
from burnish.rl.batch import TokenBatch
from burnish.rl.critic import Critic
from burnish.rl.engines import MakeEngine, engine_maker
from burnish.rl.fleet import ALONE, Fleet
from burnish.rl.placement import Place, Placement, Role, placement
from burnish.rl.publish import Publisher, check_canary
from burnish.rl.reference import Reference, fingerprint, load_teacher
from burnish.rl.reward_model import RewardModel
from burnish.rl.sites import Site, place_of, sites
from burnish.rollout.engine import Engine, wait_for
from burnish.rollout.native.engine import NativeEngine
from burnish.rollout.remote.editions import Kind, WeightWriter
from burnish.rollout.setup import EngineSetup
from burnish.sync.folder import AdapterFolders, ModelFolders
from burnish.sync.host_memory import has_host_memory, to_devices, to_host
from burnish.sync.reshard import from_host, whole_here
from burnish.text.tokenizer import read_json
from burnish.train.balance import balance_of
from burnish.train.compiles import keep_compiled
from burnish.train.optim import make_optimizer
from burnish.train.score import HeadOptions, make_score
from burnish.train.state import TrainState, init_state, read_metrics, shape_to_read, stop_if_nonfinite
from burnish.train.step import MicroBatch, Steps, make_steps
from burnish.train.value import ValueMicroBatch
from burnish.types import Completion, Message, Request

Rows = TypeVar("Rows")
_ANY_DECODER = "give engine=RecomputingEngine(model) (burnish.rollout.recomputing), or an engine of your own"


class RLCluster:
    """Holds the actor, the sampling engine and, where they are needed, the reference, the critic and a reward model.

    model: a `Model`, or a path as `Model.load` takes it. lora: train an adapter beside the frozen base; then the base is the reference,
    at no memory. Without it every weight is trained and the first weights are kept as the reference if the algorithm asks for one.
    The engine has its own copy of the weights, in its own layout, or borrows the actor's (`rollout.weights`); `sync_weights` is the only
    way in. critic: the model of values, for algorithms with a value loss; every weight of it is trained, in float32. reward_model: what
    `get_rewards` asks. teacher: whom the policy learns from, for algorithms that ask for its scores. engine: one that is there already, on
    a mesh of its own, or what makes one, instead of the one that `rollout.engine` names; it gets the weights at the first `prepare`, and
    the cluster closes it. logs: a folder for what the processes of an engine say.
    fleet: the processes over whose devices the actor's mesh is; then all of them call the same operations in the same order, and each has
    an engine of its own.
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
        critic: CriticConfig | None = None,
        reward_model: RewardModelSection | None = None,
        teacher: TeacherConfig | None = None,
        engine: Engine | MakeEngine | None = None,
        logs: Path | None = None,
        fleet: Fleet = ALONE,
        seed: int = 0,
    ) -> None:
        if cluster.distributed is not None and fleet is ALONE:
            raise UserError("cluster.distributed names other processes: join them, `with joined(…) as fleet`, and pass the fleet on")
        keep_compiled()
        self.fleet = fleet
        self.precision: Precision = resolve_precision(precision)
        architecture = model.config if isinstance(model, Model) else weights.load_config(locate(str(model)))
        self._balance = balance_of(architecture, training.balance, trains_routers=lora is None)
        given = engine if engine is not None else engine_maker(rollout)
        if given is not None and not isinstance(given, Engine):
            _check_apart(rollout, cluster, lora)
        lent = rollout.weights == "lent" and given is None
        brought = None if given is None else place_of(given.mesh if isinstance(given, Engine) else None)
        placed = _placer(cluster, architecture, lora, self.precision, critic, reward_model, teacher, lent=lent, brought=brought)
        self._place = partial(placed, num_processes=fleet.count)
        self.placement: Placement = self._place(needs_reference=cluster.reference is not None)
        self._sites = sites(self.placement)
        actor = self._sites[Role.ACTOR]
        for role in (Role.ACTOR, Role.ROLLOUT, Role.REFERENCE):
            if role in self._sites:
                _check_divides(role, self._sites[role].mesh, architecture, None if role is Role.ROLLOUT else lora)
        self.mesh = actor.mesh
        model = model if isinstance(model, Model) else Model.load(model, mesh=self.mesh)
        self.model = dataclasses.replace(model, params=actor.spread(model.params, transformer.spec(architecture)))
        self.rollout_config, self.training_config = rollout, training
        self.context = longest_sequence(rollout, architecture)
        self._lora, adapter = lora, None
        if lora is not None:
            _check_adapter(critic, lora)
            self.model = dataclasses.replace(self.model, params=frozen_base(self.model, lora, self.mesh))
            adapter = weights.first_adapter(architecture, lora, jax.random.key(seed), self.model.params)
            adapter = adapter._replace(pairs=actor.spread(adapter.pairs, spec_from(architecture, lora)))
        self._started = None if adapter is None or lora is None or lora.path is None else adapter.pairs
        self._scale = None if adapter is None else adapter.scale
        self._base = None if adapter is None else self.model.params
        self._first: Params | None = self.model.params if adapter is None else adapter.pairs
        self._state: TrainState | None = None
        self._steps: Steps | None = None
        self._anchor: Anchor | None = None
        self._offloaded = frozenset(Role(role) for role in cluster.offload_to_cpu)
        if self._offloaded and not has_host_memory():
            raise UserError("cluster.offload_to_cpu: the devices of this platform can't address the host's memory; leave it out")
        self._has_canary = cluster.canary
        self._reference: Reference | None = None
        self._critic = (
            None
            if critic is None
            else Critic(
                critic,
                self.model,
                context=self.context,
                precision=self.precision,
                site=self._sites[Role.CRITIC],
                offload=Role.CRITIC in self._offloaded,
            )
        )
        self.reward_model = (
            None
            if reward_model is None
            else _reward_model(reward_model, self.precision, self._sites[Role.REWARD], offload=Role.REWARD in self._offloaded)
        )
        self._teacher = (
            None
            if teacher is None
            else load_teacher(
                teacher,
                self.model.codec,
                context=self.context,
                options=HeadOptions(chunk=training.head_chunk, precision=self.precision),
                site=self._sites[Role.TEACHER],
                offload=Role.TEACHER in self._offloaded,
            )
        )
        self.engine: Engine = self._start_engine(given, adapter, logs)
        self._is_behind = given is not None or lent
        self._has_engine_elsewhere = given is not None and self.engine.mesh is None
        self._publisher = Publisher(self.engine, actor=actor, prefix="" if adapter is None else "adapter.")

    def _start_engine(self, given: Engine | MakeEngine | None, adapter: Adapter | None, logs: Path | None) -> Engine:
        config = self.rollout_config
        if isinstance(given, Engine):
            return given
        if given is not None:
            return given(
                EngineSetup(
                    self.model.folder,
                    self.model.codec.tokenizer.decode,
                    context=self.context,
                    slots=config.slots,
                    max_kept=config.max_kept,
                    precision=self.precision,
                    adapter_rank=None if adapter is None else next(iter(adapter.pairs.values()))["a"].shape[-1],
                    adapter_scale=self._scale,
                    writer=partial(self._weight_writer, adapter),
                    logs=logs or Path("runs") / "servers",
                )
            )
        if self.model.config.decoder is not None:
            raise UserError(f"the native engine can't sample from {self.model.config.family}: {_ANY_DECODER}")
        return NativeEngine(
            self.model.config,
            jax.tree.map(whole_here, self.model.params),
            adapter=None if adapter is None else adapter._replace(pairs=jax.tree.map(whole_here, adapter.pairs)),
            lent=config.weights == "lent",
            decode_text=self.model.codec.tokenizer.decode,
            context=self.context,
            slots=config.slots,
            prefill_rows=config.prefill_rows,
            decode_chunk=config.decode_chunk,
            max_kept=config.max_kept,
            kv_cache_bytes=config.kv_cache_bytes,
            in_flight=config.in_flight,
            precision=self.precision,
            mesh=self._sites[Role.ROLLOUT].mesh,
            dispatch=self._sites[Role.ROLLOUT].dispatch,
        )

    @property
    def samples_apart(self) -> bool:
        """Whether the engine computes on devices that the actor doesn't."""
        mine = {*self.placement[Role.ACTOR].place.devices}
        return self._has_engine_elsewhere or not mine & {*self.placement[Role.ROLLOUT].place.devices}

    def _weight_writer(self, adapter: Adapter | None, kind: Kind) -> WeightWriter:
        """Who writes versions for engines that read them from a folder."""
        architecture, folder = self.model.config, self.model.folder
        if architecture.decoder is not None:
            raise UserError(f"{architecture.family} can't be written for the engine `{self.rollout_config.engine}`: {_ANY_DECODER}")
        dtype = "bfloat16" if self.precision == "bf16" else "float32"
        if adapter is None:
            return ModelFolders(architecture, like=folder, dtype=dtype)
        merged = None if kind == "adapter" else (self.model.params, dtype)
        return AdapterFolders(architecture, adapter, base=folder, merged=merged, dispatch=self._sites[Role.ACTOR].dispatch)

    # -------------------------------------------------------------------------------------------------------------- the actor

    def prepare(self, algorithm: Algorithm, *, total_updates: int, critic_updates: int | None = None) -> None:
        """Take the algorithm that updates will follow: its optimizer state, its compiled programs, the policies it compares with.

        total_updates: the actor's in the whole run, for its schedule. critic_updates: the critic's; None is as many.
        """
        training, actor = self.training_config, self._sites[Role.ACTOR]
        self.placement = self._place(needs_reference="reference" in algorithm.scores_needed)
        optimizer = make_optimizer(training.optimizer, total_updates=total_updates)
        remat = self._scale is None if training.remat == "auto" else training.remat
        steps = make_steps(
            self.model.config,
            algorithm,
            optimizer,
            lora_scale=self._scale,
            precision=self.precision,
            remat=remat,
            head_chunk=training.head_chunk,
            balance=self._balance,
        )
        self._steps = steps.mapped(actor.in_turn)
        options = HeadOptions(chunk=training.head_chunk, precision=self.precision)
        score = make_score(self.model.config, lora_scale=self._scale or 1.0, options=options)
        self._score = actor.in_turn(score)
        if self._first is None:
            raise RuntimeError("this cluster has trained already and kept no first weights: build another one")
        self._state = init_state(self._first, optimizer)
        if algorithm.value_loss is not None:
            self._the_critic().prepare(
                self.model.params,
                algorithm.value_loss,
                algorithm.aggregate,
                training=training,
                total_updates=critic_updates or total_updates,
            )
        self._needs_anchor = "old" in algorithm.scores_needed
        self._reference = None
        if Role.REFERENCE in self.placement:
            self._reference = Reference(
                self.model.config,
                self.model.params,
                score,
                self._sites.get(Role.REFERENCE, actor),
                pairs=self._started,
                offload=Role.REFERENCE in self._offloaded and self.placement[Role.REFERENCE].holding != "shared",
            )
        if self._is_behind:
            self._publisher.publish(self._state.trainable, self.version)
            self._is_behind = False
        reference = self.placement.roles.get(Role.REFERENCE)
        has_the_first = reference is not None and reference.holding == "copy" and Role.REFERENCE not in self._offloaded
        if self._base is None and not has_the_first:
            self.model = _without_params(self.model)  # the state has its own copy; the file's needn't stay in memory beside it
            self._first = None
        self._take_anchor()
        self._put_away()

    @property
    def state(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("the cluster has no algorithm yet: a learner calls prepare() first")
        return self._state

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from."""
        return self._publisher.version

    @property
    def rows_multiple(self) -> int:
        """What the rows of a batch must be a multiple of, to be spread evenly over the actor's devices."""
        return self._sites[Role.ACTOR].place.rows

    def place(self, rows: Rows) -> Rows:
        """Put a batch on the host, or any tree of arrays of its rows, on the actor's devices, rows spread over `data` and `fsdp`."""
        return jax.device_put(rows) if self.mesh is None else from_host(rows, batch_sharding(self.mesh))

    def get_actor_per_token_logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids under the policy that the engine sampled from: the anchor of this step's updates.

        Where no anchor is kept, since a step makes one update only, that is the policy now: ask before the update.
        """
        with span("score", role="actor"):
            anchor = self.state.trainable if self._anchor is None else self._anchor.weights(self.state.trainable)
            return self._score_with(anchor, batch)

    def _score_with(self, trainable: Params, batch: TokenBatch) -> Float[Array, "R M"]:
        params, pairs = (trainable, None) if self._base is None else (self._base, trainable)
        start = time.monotonic_ns()
        logps = self._score(params, pairs, batch)
        dispatched("actor", "score", logps, start_ns=start)
        return logps

    def get_ref_per_token_logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids under the reference: the first weights, or the base without its adapter."""
        if self._reference is None:
            raise RuntimeError("this algorithm compares with no reference (beta is 0)")
        return self._reference.logps(batch)

    @property
    def has_teacher(self) -> bool:
        return self._teacher is not None

    def get_teacher_per_token_logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids under the teacher."""
        if self._teacher is None:
            raise RuntimeError("this cluster has no teacher: RLCluster(..., teacher=TeacherConfig(path=...))")
        return self._teacher.logps(batch)

    def update_actor(self, micro_batches: Iterable[MicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        """One update from a mini-batch of `count` micro-batches, each taken when it is needed. Returns the update's metrics.

        Raises NonFiniteError after `training.max_nonfinite_updates` updates in a row that had to be skipped.
        """
        if self._steps is None:
            raise RuntimeError("the cluster has no algorithm yet: a learner calls prepare() first")
        self._publisher.recall()
        if self._anchor is not None:
            self._anchor.moves()
        if Role.ACTOR in self._offloaded:
            self._state = dataclasses.replace(self.state, opt_state=to_devices(self.state.opt_state))
        if faults.point("update.nonfinite", step=step):
            micro_batches = (m._replace(batch=dataclasses.replace(m.batch, advantages=m.batch.advantages * jnp.nan)) for m in micro_batches)
        start = time.monotonic_ns()
        self._state, report = self._steps.update(self.state, self._base, micro_batches, count=count)
        dispatched("actor", "update", report, start_ns=start, step=step - 1)
        self._put_away()
        with span("update.wait"):
            metrics = read_metrics(report)
        stop_if_nonfinite(self._state, report, limit=self.training_config.max_nonfinite_updates, step=step)
        return metrics

    # ------------------------------------------------------------------------------------------------ the critic, the reward model

    @property
    def critic_state(self) -> TrainState:
        return self._the_critic().state

    def get_values(self, batch: TokenBatch) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
        """The critic's values before and after each scored id, 0 at padding, under its weights now."""
        return self._the_critic().values(batch)

    def update_critic(self, micro_batches: Iterable[ValueMicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        """One update of the critic, as `update_actor` makes one of the actor. Its metrics are `critic/…`."""
        return self._the_critic().update(micro_batches, count=count, step=step)

    @property
    def critic_config(self) -> CriticConfig | None:
        """What the critic was built from; None without one."""
        return None if self._critic is None else self._critic.config

    def _the_critic(self) -> Critic:
        if self._critic is None:
            raise RuntimeError("this cluster has no critic: RLCluster(..., critic=CriticConfig())")
        return self._critic

    def get_rewards(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """The reward model's score of each conversation, None for one that is too long. A reward function; any thread may call it."""
        if self.reward_model is None:
            raise RuntimeError("this cluster has no reward model: RLCluster(..., reward_model=RewardModelSection(path=...))")
        return self.reward_model.score(conversations)

    # ------------------------------------------------------------------------------------------------------------ the engine

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample several completions; for scripts and tests. Learners talk to `engine`, request by request."""

        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return wait_for(together())

    def sync_weights(self) -> int:
        """Give the engine the actor's weights as a new version, all or none of them. Returns the version.

        With `cluster.canary`, raises `SyncError` where the engine samples from other weights than these.
        """
        return self._give_weights(self.version + 1)

    def _give_weights(self, version: int) -> int:
        self._publisher.publish(self.state.trainable, version)
        self._take_anchor()
        self._check_canary()
        return version

    def _check_canary(self) -> None:
        def score(batch: TokenBatch) -> Float[Array, "R M"]:
            return self._score_with(self.state.trainable, self.place(batch))

        if self._has_canary:
            prompt = self.model.codec.template.encode([Message(role="user", content="1 2 3")])
            check_canary(self.engine, score, prompt, rows_multiple=self.rows_multiple)

    def _take_anchor(self) -> None:
        self._anchor = Anchor(self.state.trainable) if self._needs_anchor else None

    def _put_away(self) -> None:
        """What the actor doesn't need until its next update."""
        if Role.ACTOR in self._offloaded:
            self._state = dataclasses.replace(self.state, opt_state=to_host(self.state.opt_state))

    # --------------------------------------------------------------------------------------------------------- files, and the end

    def restore(self, read: Callable[[dict[str, TrainState]], dict[str, TrainState]], *, version: int) -> None:
        """Go on from saved states: give the engine their weights as `version`. Between `prepare` and the first update.

        read: gets the shapes, dtypes and shardings of `states`, and returns states like that. What was there is let go before it reads.
        """
        shapes = {role: jax.tree.map(partial(shape_to_read, self._sites[Role(role)].mesh), state) for role, state in self.states.items()}
        self._state = None
        if self._critic is not None:
            self._critic.replace_state(None)
        states = read(shapes)
        self._state = states[str(Role.ACTOR)]
        if self._critic is not None:
            self._critic.replace_state(states.get(str(Role.CRITIC)))
        self._put_away()
        self._give_weights(version)

    @property
    def adapter_scale(self) -> float | None:
        """alpha / rank of the adapter that is trained; None where every weight is."""
        return self._scale

    def frozen_digest(self) -> str | None:
        """A digest of the weights beside which, or against which, this run trains; None where it trains every weight and compares with
        none. A checkpoint doesn't hold them: a run that goes on must have the same. After `prepare`."""
        if self._base is not None:
            digest = self._sites[Role.ACTOR].in_turn(fingerprint)
            return digest(self._base) if self._started is None else f"{digest(self._base)}+{digest(self._started)}"
        return None if self._reference is None else self._reference.digest()

    @property
    def states(self) -> dict[str, TrainState]:
        """What training has changed, by role: all that a checkpoint holds in arrays."""
        critic = {str(Role.CRITIC): self._critic.state} if self._critic is not None and self._critic.is_trained else {}
        return {str(Role.ACTOR): self.state, **critic}

    def export(self, folder: Path) -> Path:
        """Write what was trained for other programs: `adapter/` in PEFT's format, or `model/` as a Hugging Face folder; returns which.

        A critic is written beside it, to `critic/`, as a sequence classifier. Of several processes all call this, and the first writes.
        """
        target = folder / ("model" if self._scale is None else "adapter")
        trained = jax.tree.map(whole_here, self.state.trainable)
        critic = None if self._critic is None or not self._critic.is_trained else jax.tree.map(whole_here, self._critic.state.trainable)
        if not self.fleet.leads:
            return target
        if self._scale is None:
            weights.save(target, self.model.config, trained, like=self.model.folder)
        else:
            adapter, base = Adapter(trained, self._scale), str(self.model.folder.absolute())
            weights.save_adapter(target, self.model.config, adapter, base=base, options=self._lora)
        if critic is not None and self._critic is not None:
            weights.save_scalar(folder / "critic", self._critic.architecture, critic, like=self.model.folder)
        return target

    def close(self) -> None:
        """Stop the engine. Waiting requests end with `EngineClosed`; closing twice is fine."""
        wait_for(self.engine.close())


def longest_sequence(rollout: RolloutConfig, model: ModelConfig) -> int:
    """How many ids an episode can have in one row, its prompt included."""
    return min(rollout.longest_sequence, model.max_positions)


def _check_apart(rollout: RolloutConfig, cluster: ClusterConfig, lora: LoraConfig | None) -> None:
    """An engine that isn't on this run's devices isn't placed, is one run's, and has the base as its folder says it."""
    if lora is not None and lora.quantize is not None:
        raise UserError(
            f"model.lora.quantize is {lora.quantize}, but the engine `{rollout.engine}` samples from the base as it is stored, which is "
            "another policy: leave it out, or use the native engine"
        )
    if cluster.rollout is not None:
        raise UserError(f"cluster.rollout gives devices to the engine, but the engine `{rollout.engine}` has its own: leave it out")
    if cluster.distributed is not None:
        raise UserError(
            f"rollout.engine is `{rollout.engine}` and cluster.distributed names several processes: each would push its versions to the "
            "same servers. Use the native engine there"
        )


def _check_divides(role: Role, mesh: Mesh | None, architecture: ModelConfig, lora: LoraConfig | None) -> None:
    """Refuse a mesh that doesn't divide the model, before its weights are read."""
    if mesh is None:
        return
    try:
        check_mesh(architecture, mesh)
        shardings(quantised_spec(transformer.spec(architecture), None if lora is None else lora.quantize), mesh)
    except UserError as error:
        raise UserError(f"cluster.{role}: {error}") from error


def _check_adapter(critic: CriticConfig | None, lora: LoraConfig) -> None:
    if lora.dropout:
        raise UserError(
            f"model.lora.dropout is {lora.dropout}: what is trained would be another policy than the one that sampled; set it to 0 "
            "(it is for `burnish sft` and others that learn from rows)"
        )
    if critic is not None and critic.path is None and lora.quantize is not None:
        raise UserError(
            f"model.lora.quantize is {lora.quantize}, and a critic without a path starts from the policy's weights, which it trains in "
            "float32: give algorithm.critic.path"
        )


def _placer(
    cluster: ClusterConfig,
    architecture: ModelConfig,
    lora: LoraConfig | None,
    precision: Precision,
    critic: CriticConfig | None,
    reward_model: RewardModelSection | None,
    teacher: TeacherConfig | None,
    *,
    lent: bool,
    brought: Place | None,
) -> Callable[..., Placement]:
    """`placement` of this run, for when it is known whether there is a reference. Reads no weights."""
    options: dict[str, Any] = {"model": architecture, "lora": lora, "precision": precision, "lent": lent, "brought": brought}
    if critic is not None:
        options["critic"] = architecture if critic.path is None else weights.load_scalar_config(locate(critic.path), zero_head=True)
    if reward_model is not None:
        folder = locate(reward_model.path)
        options["reward"] = weights.load_scalar_config(folder)
        options["reward_weight_bytes"] = jnp.dtype(families.stored_dtype(read_json(folder / "config.json"))).itemsize
    if teacher is not None and teacher.path:
        options["teacher"] = weights.load_config(locate(teacher.path))
    return partial(placement, cluster, num_devices=jax.local_device_count(), **options)


def _reward_model(section: RewardModelSection, precision: Precision, site: Site, *, offload: bool) -> RewardModel:
    return RewardModel(section, precision=precision, mesh=site.mesh, rows_multiple=site.place.rows, dispatch=site.dispatch, offload=offload)


def _without_params(model: Model) -> Model:
    return dataclasses.replace(model, params={})


__all__ = ["RLCluster", "longest_sequence"]
