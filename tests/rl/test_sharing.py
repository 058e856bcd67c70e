"""What roles share and what they give back: lent weights, the anchor, arrays that wait in the host's memory, engines that others made."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from burnish.checkpoint.saver import Saver
from burnish.config.algorithms import PPOConfig
from burnish.config.errors import UserError
from burnish.config.schema import (
    CheckpointSection,
    ClusterConfig,
    Config,
    LoraConfig,
    RewardModelSection,
    RolloutConfig,
    RunSection,
    TrainingConfig,
)
from burnish.models import transformer, weights
from burnish.models.lora import init_adapter
from burnish.models.model import Model
from burnish.rl.batch import TokenBatch
from burnish.rl.cluster import RLCluster
from burnish.rl.learners import ConfiguredLearner
from burnish.rl.placement import Role
from burnish.rl.publish import SyncError
from burnish.rollout.native.engine import NativeEngine
from burnish.rollout.scripted import ScriptedEngine
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import ROWS, RecordingCluster, assert_same, differs, digits_reward, host

CONFIG = tiny_config(width=16)
LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))
COLOCATED: dict[str, Any] = {"actor": {"axes": {"data": 2, "tp": 2}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=CONFIG, alphabet="0123456789+", scale=5.0)
    return folder


def make(
    folder: Path | Model,
    *,
    algorithm: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    meshes: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    reward_model: Path | None = None,
    engine: Any = None,
    make_cluster: type[RLCluster] = RecordingCluster,
    **training: Any,
) -> ConfiguredLearner:
    chosen = Config.model_validate({"algorithm": {"name": "grpo", "num_generations": 4, **(algorithm or {})}}).algorithm
    cluster = make_cluster(
        folder,
        lora=lora,
        precision="f32",
        cluster=ClusterConfig.model_validate(meshes or {}),
        rollout=RolloutConfig.model_validate(
            {"max_prompt_tokens": 12, "slots": 16, "prefill_rows": 4, "decode_chunk": 4, "sampling": {"max_tokens": 4}, **(rollout or {})}
        ),
        training=TrainingConfig(**{"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}, "head_chunk": 64, **training}),
        critic=chosen.critic if isinstance(chosen, PPOConfig) else None,
        reward_model=None if reward_model is None else RewardModelSection(path=str(reward_model)),
        engine=engine,
        seed=3,
    )
    rewards: list[Any] = [digits_reward] if reward_model is None else [digits_reward, cluster.get_rewards]
    return ConfiguredLearner(cluster, chosen, reward_fns=rewards, train_ds=ROWS, run=RunSection(seed=3))


def recorded(learner: ConfiguredLearner) -> RecordingCluster:
    assert isinstance(learner.cluster, RecordingCluster)
    return learner.cluster


def pointers(tree: Any) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}


# ----------------------------------------------------------------------------------------------------------------------- lent weights


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["one device", "data 2, tp 2"])
def test_colocated_the_engine_samples_from_the_actors_own_buffers(folder: Path, where: str) -> None:
    meshes = {} if where == "one device" else COLOCATED
    algorithm = {"beta": 0.1, "num_iterations": 2}
    lent = make(folder, algorithm=algorithm, meshes=meshes, rollout={"weights": "lent"}, max_steps=5)
    cluster, shared = recorded(lent), []

    def look(step: int) -> None:
        held = cluster.engine._runner.layout.weights  # type: ignore[attr-defined]
        shared.append(pointers(held) == pointers(cluster.state.trainable))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(held)), step

    lent.train(on_step=look)
    assert shared == [True] * 5
    assert cluster.placement[Role.ROLLOUT].holding == "shared" and cluster.placement[Role.ROLLOUT].bytes_per_device == 0
    copied = make(folder, algorithm=algorithm, meshes=meshes, max_steps=5)
    copied.train()
    for name in ("policy/loss", "policy/kl", "optim/grad_norm"):
        np.testing.assert_allclose(cluster.means(name), recorded(copied).means(name), rtol=1e-4, atol=1e-5)


def test_under_an_adapter_reference_and_actor_have_one_base(folder: Path) -> None:
    learner = make(folder, algorithm={"beta": 0.1}, lora=LORA, max_steps=3)
    seen: list[bool] = []

    def look(step: int) -> None:
        cluster = learner.cluster
        assert cluster._reference is not None
        seen.append(pointers(cluster._reference.params) == pointers(cluster._base))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cluster._reference.params)), step

    learner.train(on_step=look)
    assert seen == [True] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meshes": {"rollout": {"devices": [4]}}}, "the engine is on 4, the actor on 0: give them one mesh"),
        ({"lora": LORA}, "an adapter is trained, which the engine merges"),
        ({"mini_batch_size": 2}, "rollout.weights is lent and a step has 2 mini-batches"),
    ],
)
def test_weights_that_cant_be_lent_are_refused_before_a_run(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(folder, rollout={"weights": "lent"}, **options)
    with pytest.raises(UserError, match="products are in bf16"):
        RLCluster(folder, precision="bf16", rollout=RolloutConfig(weights="lent"))


# ------------------------------------------------------------------------------------------------------------------------ the anchor


class Anchored(RecordingCluster):
    """Scores each old policy beside a copy of the weights that the step began with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.apart: list[float] = []
        self.moved: list[float] = []

    def sync_weights(self) -> int:
        version = super().sync_weights()
        self._begun = host(self.state.trainable)
        return version

    def get_actor_per_token_logps(self, batch: TokenBatch) -> Any:
        found = super().get_actor_per_token_logps(batch)
        if self.version:
            began = self._score_with(jax.tree.map(jnp.asarray, self._begun), batch)
            now = self._score_with(self.state.trainable, batch)
            self.apart.append(float(jnp.max(jnp.abs(found - began))))
            self.moved.append(float(jnp.max(jnp.abs(found - now))))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["every weight", "adapter"])
def test_ratios_compare_with_the_policy_that_the_step_began_with(folder: Path, lora: LoraConfig | None) -> None:
    """Two iterations, mini-batches of half a batch: the second one's old policy isn't the one that the first has left behind."""
    learner = make(folder, algorithm={"num_iterations": 2}, lora=lora, make_cluster=Anchored, mini_batch_size=2, max_steps=4)
    learner.train()
    cluster = learner.cluster
    assert isinstance(cluster, Anchored)
    assert cluster.apart == [0.0] * 6, "three steps after the first sync, two mini-batches each"
    assert cluster.moved[::2] == [0.0] * 3 and min(cluster.moved[1::2]) > 1e-4


def test_the_anchor_waits_in_the_hosts_memory(folder: Path) -> None:
    with make(folder, algorithm={"num_iterations": 2}, mini_batch_size=2) as learner:
        learner._prepare()
        assert learner.cluster._anchor is not None
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(learner.cluster._anchor._snapshot)}
        assert kinds == {"pinned_host"}
    with make(folder) as learner:  # one update a step: the policy now is the old one
        learner._prepare()
        assert learner.cluster._anchor is None


# ---------------------------------------------------------------------------------------------------------------- the host's memory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("meshes", [{}, {"actor": {"axes": {"fsdp": 2}}}], ids=["one device", "fsdp 2"])
def test_offloaded_roles_give_the_same_updates(folder: Path, tmp_path: Path, meshes: dict[str, Any]) -> None:
    write_tiny_model(tmp_path, config=CONFIG, alphabet="0123456789", classifier=True)
    states, losses = [], []
    for roles in ([], ["actor", "reference", "critic", "reward"]):
        learner = make(
            folder, algorithm={"name": "ppo", "beta": 0.1}, meshes={**meshes, "offload_to_cpu": roles}, reward_model=tmp_path, max_steps=3
        )
        learner.train()
        cluster = recorded(learner)
        waiting = [cluster.state.opt_state, cluster.critic_state, cluster._reference._shelf._tree, cluster.reward_model._shelf._tree]  # type: ignore[union-attr]
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting) if leaf.ndim}
        assert kinds == ({"pinned_host"} if roles else {"device"})
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(cluster.state.trainable)} == {"device"}
        states.append(host(cluster.states))
        losses.append(cluster.means("policy/loss"))
    assert_same(states[0], states[1])
    assert losses[0] == losses[1] and len({*losses[0]}) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [{"meshes": {"offload_to_cpu": ["actor"]}}, {"rollout": {"weights": "lent"}}], ids=["offloaded", "lent"])
def test_such_a_run_goes_on_from_a_checkpoint_bit_by_bit(folder: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    def saver() -> Saver:
        return Saver(tmp_path, CheckpointSection(every=1, keep_last=None))

    whole = make(folder, algorithm={"num_iterations": 2}, max_steps=3, **how)
    whole.train(saver=saver())
    rest = make(folder, algorithm={"num_iterations": 2}, max_steps=3, **how)
    assert rest.resume(tmp_path, 1) == 1
    rest.train(saver=saver())
    assert_same(host(whole.cluster.states), host(rest.cluster.states))


# ----------------------------------------------------------------------------------------------------------------- a starting adapter


def test_rl_from_an_adapter_starts_at_kl_0_and_moves_away(folder: Path, tmp_path: Path) -> None:
    fresh = init_adapter(CONFIG, LORA, jax.random.key(5))
    started = fresh._replace(pairs=jax.tree.map(lambda x: x + 0.3, fresh.pairs))
    weights.save_adapter(tmp_path, CONFIG, started)
    lora = LORA.model_copy(update={"path": str(tmp_path)})
    learner = make(folder, algorithm={"beta": 0.1}, lora=lora, max_steps=3)
    history = learner.train().history
    assert history[0]["policy/kl"] == 0 and history[1]["policy/kl"] > 1e-6
    assert differs(learner.cluster.state.trainable, started.pairs)
    assert "the adapter that it started from" in learner.cluster.placement[Role.REFERENCE].why
    without = make(folder, algorithm={"beta": 0.1}, lora=LORA)
    without._prepare()
    assert without.cluster.frozen_digest() != learner.cluster.frozen_digest(), "a run that goes on must start from the same adapter"
    without.close()


def test_an_adapter_of_another_make_is_refused(folder: Path, tmp_path: Path) -> None:
    weights.save_adapter(tmp_path, CONFIG, init_adapter(CONFIG, LORA, jax.random.key(5)))
    other = LoraConfig(rank=4, alpha=4, targets=("q",), path=str(tmp_path))
    with pytest.raises(
        UserError, match=r"rank is 2 there, 4 here; targets is \['down', 'q'\] there, \['q'\] here; alpha / rank is 2.0 there"
    ):
        RLCluster(folder, lora=other, precision="f32")


# ---------------------------------------------------------------------------------------------- engines as they come, and the canary


def engine_on(folder: Path, devices: list[int], axes: dict[str, int]) -> NativeEngine:
    model = Model.load(folder)
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]).reshape(tuple(axes.values())), tuple(axes), (AxisType.Auto,) * len(axes))
    strange = jax.tree.map(lambda x: x * 0.5, model.params)
    decode = model.codec.tokenizer.decode
    return NativeEngine(model.config, strange, decode_text=decode, context=16, slots=16, prefill_rows=4, decode_chunk=4, mesh=mesh)


@pytest.mark.slow
def test_an_engine_that_brings_its_own_mesh_is_recorded_and_nothing_is_shared(folder: Path) -> None:
    """Also where the configuration lends: the weights are pushed, the run is right."""
    engine = engine_on(folder, [4, 5], {"tp": 2})
    learner = make(folder, engine=engine, rollout={"weights": "lent"}, max_steps=3)
    found = learner.cluster.placement[Role.ROLLOUT]
    assert (found.place.devices, found.place.axes, found.holding) == ((4, 5), (("tp", 2),), "elsewhere")
    assert "brought its own mesh" in found.why
    learner.train()
    plain = make(folder, max_steps=3)
    plain.train()
    np.testing.assert_allclose(recorded(learner).means("policy/loss"), recorded(plain).means("policy/loss"), rtol=1e-5, atol=1e-5)
    assert max(recorded(learner).worst_mismatch) < 1e-5
    other = engine_on(folder, [1, 2], {"tp": 2})
    with pytest.raises(UserError, match="they share 1 but not all"):
        make(folder, engine=other, meshes={"actor": {"axes": {"data": 2}}})
    asyncio.run(other.close())


def test_an_engine_in_another_process_leaves_all_devices_to_the_actor(folder: Path) -> None:
    with make(folder, engine=ScriptedEngine(lambda request: [3]), meshes={"actor": {"axes": {"data": 2}}}) as learner:
        found = learner.cluster.placement[Role.ROLLOUT]
        assert (str(found.place), found.holding, found.total_bytes) == ("elsewhere", "elsewhere", 0)
        assert learner.cluster.samples_apart and learner.cluster.placement[Role.ACTOR].place.devices == (0, 1)


class Misplacing(RecordingCluster):
    """From the second version on, two square matrices change places on the way."""

    def sync_weights(self) -> int:
        trained = self.state
        layers = trained.trainable["layers"]
        if self.version:
            swapped = {**trained.trainable, "layers": layers | {"q": layers["o"], "o": layers["q"]}}
            self._state = dataclasses.replace(trained, trainable=jax.tree.map(jnp.copy, swapped))
        self._publisher.publish(self.state.trainable, self.version + 1)
        self._state = trained
        self._check_canary()
        return self.version


def test_the_canary_finds_weights_that_arrived_in_the_wrong_place(folder: Path) -> None:
    square = tiny_config(width=16)
    assert transformer.spec(square)["layers"]["q"].shape == transformer.spec(square)["layers"]["o"].shape
    assert make(folder, meshes={"canary": True}, max_steps=2).train().steps == 2
    broken = make(folder, meshes={"canary": True}, make_cluster=Misplacing, max_steps=3)
    with pytest.raises(SyncError, match="after the sync to version 2 the engine's log-probs of a fixed prompt differ"):
        broken.train()
