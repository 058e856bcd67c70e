"""Runs whose roles are placed in every way: the losses of one device, the arrays that the placement tells of, and the way between."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.checkpoint.saver import Saver
from burnish.config.algorithms import GRPOConfig
from burnish.config.errors import UserError
from burnish.config.schema import CheckpointSection, ClusterConfig, LoraConfig, RewardModelSection, RolloutConfig
from burnish.models.model import Model
from burnish.models.sharding import batch_sharding
from burnish.rl.algorithms import from_config
from burnish.rl.cluster import RLCluster
from burnish.rl.placement import Role, placement
from burnish.rl.sites import sites
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.types import Message
from tests.rl.runs import RecordingCluster, make_learner

LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))
SPLIT: Any = {"actor": {"axes": {"fsdp": 4}}, "rollout": {"axes": {"tp": 2}}, "reference": {"devices": "6-7", "axes": {"fsdp": 2}}}
PLACEMENTS: dict[str, Any] = {
    "split": SPLIT,
    "same devices": {"actor": {"axes": {"fsdp": 4}}, "rollout": {"same_devices_as": "actor"}},
    "colocated": {"actor": {"axes": {"data": 2, "tp": 2}}},
    "away from the first device": {"actor": {"devices": [3]}, "rollout": {"devices": [5]}, "reference": {"same_as": "rollout"}},
}
SETTINGS: dict[str, Any] = {
    "training": {"max_steps": 3, "mini_batch_size": 2, "optimizer": {"learning_rate": 3e-3}},
    "algorithm": {"beta": 0.1},
}
"""Two updates a step, so that an anchor is scored too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789+", scale=5.0)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder)


def run(model: Model | Path, cluster: Any, **options: Any) -> tuple[RecordingCluster, dict[str, list[float]]]:
    """A finished run: what was measured at each update."""
    learner = make_learner(model, cluster=cluster, **SETTINGS, **options)
    learner.train()
    found = learner.cluster
    assert isinstance(found, RecordingCluster)
    names = ("policy/loss", "policy/kl", "policy/ratio_mean", "optim/grad_norm")
    return found, {name: found.means(name) for name in names if name in found.updates[0]}


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[str, dict[str, list[float]]]:
    return {key: run(model, {}, lora=lora)[1] for key, lora in (("every weight", None), ("adapter", LORA))}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("split", "every weight"),
        ("same devices", "every weight"),
        ("colocated", "every weight"),
        ("split", "adapter"),
        ("away from the first device", "adapter"),
    ],
)
def test_losses_are_those_of_one_device(folder: Path, alone: Any, name: str, what: str) -> None:
    cluster, measured = run(folder, PLACEMENTS[name], lora=None if what == "every weight" else LORA)
    assert len(measured["policy/loss"]) == 6 and measured.keys() == alone[what].keys() >= {"policy/loss", "policy/kl"}
    for metric, values in measured.items():
        np.testing.assert_allclose(values, alone[what][metric], rtol=1e-5 if metric == "policy/loss" else 1e-4, atol=1e-5)
    first_of_steps = cluster.worst_mismatch[::2]
    assert max(first_of_steps) < 1e-5 < min(cluster.worst_mismatch[1::2]), "an engine that missed a sync would differ from the policy"
    assert len({*np.round(alone[what]["policy/loss"], 6)}) == 6


def weight_bytes(*trees: Any, borrowed: Any = ()) -> int:
    """Bytes on the device that has most of them, each buffer once, without those of `borrowed`."""
    taken = {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(borrowed) for shard in leaf.addressable_shards}
    found: dict[Any, int] = {}
    for leaf in jax.tree.leaves(trees):
        for shard in leaf.addressable_shards:
            if shard.data.size and (pointer := shard.data.unsafe_buffer_pointer()) not in taken:
                taken.add(pointer)
                found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return max(found.values(), default=0)


GRPO = from_config(GRPOConfig(beta=0.1), max_tokens=4)


@pytest.mark.parametrize("name", [*PLACEMENTS, "one device"])
@pytest.mark.parametrize("what", ["every weight", "adapter"])
def test_bytes_and_devices_are_those_of_the_arrays(folder: Path, name: str, what: str) -> None:
    lora = None if what == "every weight" else LORA
    meshes = ClusterConfig.model_validate(PLACEMENTS.get(name, {}))
    cluster = RLCluster(folder, lora=lora, precision="f32", cluster=meshes, rollout=RolloutConfig(slots=4))
    try:
        cluster.prepare(GRPO, total_updates=1)
        layout, reference = cluster.engine._runner.layout, cluster._reference  # type: ignore[attr-defined]
        assert reference is not None
        actor = (cluster.state.trainable, cluster._base)
        held = {
            Role.ACTOR: (weight_bytes(actor), actor),
            Role.ROLLOUT: (weight_bytes(layout.weights, dict(layout.stacked), borrowed=actor), layout.weights.layers),
            Role.REFERENCE: (weight_bytes(reference.params, borrowed=actor), reference.params),
        }
        told = {role: found.bytes_per_device for role, found in cluster.placement.roles.items()}
        assert {role: size for role, (size, _) in held.items()} == told
        for role, (_, tree) in held.items():
            devices = {jax.devices()[index] for index in cluster.placement[role].place.devices}
            assert all(leaf.devices() == devices for leaf in jax.tree.leaves(tree)), role
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_under_another_placement(folder: Path, tmp_path: Path) -> None:
    """Saved split, resumed on one device and the other way round: the steps that are left have the same losses."""

    def saved(cluster: Any, where: Path) -> list[float]:
        learner = make_learner(folder, cluster=cluster, **SETTINGS)
        learner.train(saver=Saver(where, CheckpointSection(every=1, keep_last=None)))
        return learner.cluster.means("policy/loss")  # type: ignore[attr-defined]

    def resumed(cluster: Any, where: Path) -> tuple[list[float], RLCluster]:
        learner = make_learner(folder, cluster=cluster, **SETTINGS)
        assert learner.resume(where, 1) == 1
        learner.train(saver=Saver(where, CheckpointSection(every=1, keep_last=None)))
        return learner.cluster.means("policy/loss"), learner.cluster  # type: ignore[attr-defined]

    whole = saved(SPLIT, tmp_path / "split")
    rest, _ = resumed({}, tmp_path / "split")
    np.testing.assert_allclose(rest, whole[2:], rtol=1e-5, atol=1e-5)
    saved({}, tmp_path / "alone")
    rest, cluster = resumed(SPLIT, tmp_path / "alone")
    np.testing.assert_allclose(rest, whole[2:], rtol=1e-5, atol=1e-5)
    assert all(leaf.devices() == {*jax.devices()[:4]} for leaf in jax.tree.leaves(cluster.state))


def test_programs_take_turns_where_roles_share_several_devices_and_nowhere_else() -> None:
    options = {"num_devices": 8, "model": tiny_config(), "critic": tiny_config(), "reward": tiny_config(), "needs_reference": True}
    meshes = {**SPLIT, "critic": {"same_devices_as": "rollout", "axes": {"data": 2}}}
    found = sites(placement(ClusterConfig.model_validate(meshes), **options))  # type: ignore[arg-type]
    locks = {role: site.dispatch for role, site in found.items()}
    assert locks[Role.ACTOR] is locks[Role.REWARD] and locks[Role.ROLLOUT] is locks[Role.CRITIC]
    assert len({id(lock) for lock in locks.values()}) == 3
    seen: list[bool] = []
    found[Role.ACTOR].in_turn(lambda: seen.append(locks[Role.REWARD].acquire(blocking=False)))()  # type: ignore[attr-defined]
    found[Role.ROLLOUT].in_turn(lambda: seen.append(locks[Role.REWARD].acquire(blocking=False)))()  # type: ignore[attr-defined]
    assert seen == [False, True]
    single = sites(placement(ClusterConfig(), **options))  # type: ignore[arg-type]
    assert all(isinstance(site.dispatch, contextlib.nullcontext) and site.mesh is None for site in single.values())


def test_rows_go_to_a_roles_devices_and_back() -> None:
    found = sites(placement(ClusterConfig.model_validate(SPLIT), num_devices=8, model=tiny_config(), needs_reference=True))
    mesh = found[Role.ACTOR].mesh
    assert mesh is not None
    here = jax.device_put(np.arange(24.0, dtype=np.float32).reshape(8, 3), batch_sharding(mesh))
    there = found[Role.REFERENCE].take({"rows": here})["rows"]
    assert there.devices() == {*jax.devices()[6:]} and there.sharding.shard_shape(there.shape) == (4, 3)
    odd = found[Role.REFERENCE].take(np.ones((3, 2), np.float32))
    assert odd.sharding.shard_shape(odd.shape) == (3, 2), "two groups of devices don't divide three rows: both have them all"
    back = found[Role.REFERENCE].back(there)
    assert back.sharding == here.sharding
    np.testing.assert_array_equal(np.asarray(back), np.asarray(here))
    assert found[Role.ACTOR].take(here) is here


def test_a_reward_model_on_devices_of_its_own_gives_the_same_scores(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789+", classifier=True)
    conversations = [[Message(role="user", content="12"), Message(role="assistant", content=text)] for text in ("3", "4+5", "6")]

    def scores(meshes: Any) -> list[float | None]:
        cluster = RLCluster(
            folder,
            precision="f32",
            cluster=ClusterConfig.model_validate(meshes),
            rollout=RolloutConfig(slots=4),
            reward_model=RewardModelSection(path=str(tmp_path)),
        )
        try:
            judge = cluster.reward_model
            assert judge is not None
            found = cluster.placement[Role.REWARD]
            assert weight_bytes(judge.params) == found.bytes_per_device
            devices = {jax.devices()[index] for index in found.place.devices}
            assert all(leaf.devices() == devices for leaf in jax.tree.leaves(judge.params))
            return cluster.get_rewards(conversations)
        finally:
            cluster.close()

    assert scores({"reward": {"devices": "4-7", "axes": {"data": 2, "tp": 2}}}) == pytest.approx(scores({}), abs=1e-5)


def test_meshes_that_cannot_be_are_refused_before_weights_are_read(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for meshes, message in (
        ({"actor": {"devices": 9}}, "cluster.actor.devices 9 needs 9 devices, this process has 8"),
        ({"rollout": {"axes": {"tp": 4}}}, "cluster.rollout: tp=4 doesn't divide num_kv_heads=2"),
        ({"critic": {"devices": 1}}, "only PPO has a critic"),
    ):
        with pytest.raises(UserError, match=message):
            RLCluster(tmp_path, cluster=ClusterConfig.model_validate(meshes))
    cluster = RLCluster(folder, cluster=ClusterConfig.model_validate({"reference": {"devices": 1}}))
    with pytest.raises(UserError, match="cluster.reference gives devices to a role that this run doesn't have"):
        cluster.prepare(from_config(GRPOConfig(), max_tokens=4), total_updates=1)
    cluster.close()
