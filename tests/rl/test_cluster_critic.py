"""The critic in the cluster: which weights it starts from, whose ids it may read, what an update changes, what is saved of it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from burnish.checkpoint import store
from burnish.config.algorithms import CriticConfig, GRPOConfig
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import ClusterConfig, LoraConfig, RolloutConfig, TrainingConfig
from burnish.models import weights
from burnish.models.families import UnsupportedModel
from burnish.models.model import Model
from burnish.models.scalar_head import with_zero_score
from burnish.rl.algorithms import Algorithm, from_config
from burnish.rl.batch import TokenBatch, build_batch, fit_shape
from burnish.rl.cluster import RLCluster
from burnish.rl.losses import clipped_value
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.state import NonFiniteError
from burnish.train.value import ValueMicroBatch, make_values
from tests.rl.batches import credit_all, group
from tests.rl.runs import assert_same, differs, host

CONFIG = tiny_config(width=16)
LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))
PPO: Algorithm = dataclasses.replace(from_config(GRPOConfig(num_generations=2)), name="ppo", value_loss=partial(clipped_value, clip=None))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("actor")
    write_tiny_model(folder, config=CONFIG, alphabet="0123456789", scale=5.0)
    return Model.load(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic")
    write_tiny_model(folder, config=CONFIG, alphabet="0123456789", scale=5.0, seed=7, classifier=True)
    return folder


def make_cluster(model: Model | Path, critic: CriticConfig | None, *, meshes: dict[str, Any] | None = None, **options: Any) -> RLCluster:
    return RLCluster(
        model,
        precision="f32",
        critic=critic,
        cluster=ClusterConfig.model_validate(meshes or {}),
        rollout=RolloutConfig(max_prompt_tokens=8, slots=4, sampling={"max_tokens": 8}),
        training=TrainingConfig(max_nonfinite_updates=2),
        **options,
    )


def critic(path: Path | None = None, learning_rate: float = 0.03) -> CriticConfig:
    return CriticConfig(path=None if path is None else str(path), optimizer=OptimizerConfig(learning_rate=learning_rate))


def prepared(model: Model | Path, config: CriticConfig, **options: Any) -> RLCluster:
    cluster = make_cluster(model, config, **options)
    cluster.prepare(PPO, total_updates=10)
    return cluster


def batch_for(cluster: RLCluster) -> TokenBatch:
    groups = [group(0, [3, 4, 5], [[6, 7], [8, 9, 10, 11]]), group(1, [5, 4], [[3], [4, 6, 8]])]
    credit = credit_all(groups)
    batch = build_batch(groups, credit, temperature=1.0, shape=fit_shape(groups, credit, rows_multiple=cluster.rows_multiple))
    returns = np.where(batch.mask, batch.target_ids / 8, np.nan).astype(np.float32)
    return cluster.place(dataclasses.replace(batch, returns=returns))


def learn(cluster: RLCluster, updates: int) -> list[dict[str, float]]:
    batch = batch_for(cluster)
    found = []
    for step in range(updates):
        micro = ValueMicroBatch(batch, cluster.get_values(batch)[0])
        metrics = cluster.update_critic([micro], count=1, step=step)
        found.append({name: metric.result() for name, metric in metrics.items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["every weight", "adapter"])
def test_without_a_path_values_start_at_zero_from_the_actors_weights_and_learn_alone(model: Model, lora: LoraConfig | None) -> None:
    original = host(model.params)
    cluster = prepared(model, critic(), lora=lora)
    assert_same(host(cluster.critic_state.trainable), host(with_zero_score(CONFIG, model.params)))
    actor = host(cluster.state)
    batch = batch_for(cluster)
    assert not any(np.asarray(values).any() for values in cluster.get_values(batch))
    metrics = learn(cluster, 12)
    assert metrics[-1]["critic/loss"] < 0.3 * metrics[0]["critic/loss"]
    assert metrics[0]["critic/learning_rate"] == pytest.approx(0.03) and metrics[0]["critic/value_mean"] == 0
    assert cluster.critic_state.trainable["score"].any()
    assert differs(host(cluster.critic_state.trainable["decoder"]), host(with_zero_score(CONFIG, model.params)["decoder"]))
    assert_same(host(cluster.state), actor)  # the critic's arrays are its own
    assert_same(host(model.params), original)


def test_a_classifier_brings_its_score_and_a_language_model_starts_at_zero(model: Model, classifier: Path) -> None:
    cluster = prepared(model, critic(classifier))
    config, params = weights.load_scalar(classifier)
    batch = batch_for(cluster)
    for ours, expected in zip(cluster.get_values(batch), make_values(config)(params, batch), strict=True):
        np.testing.assert_array_equal(ours, expected)
        assert np.asarray(ours)[np.asarray(batch.mask)].std() > 0.1
    started = prepared(model, critic(model.folder))
    assert_same(host(started.critic_state.trainable), host(with_zero_score(CONFIG, weights.load(model.folder)[1])))


def test_both_states_are_in_a_checkpoint_and_come_back(model: Model, tmp_path: Path) -> None:
    cluster = prepared(model, critic(), lora=LORA)
    learn(cluster, 2)
    store.write(tmp_path, 2, store.snapshot(cluster.states), {})
    assert set(cluster.states) == {"actor", "critic"}
    kept = host(cluster.states)
    fresh = prepared(model, critic(), lora=LORA)
    fresh.restore(lambda like: store.read(tmp_path, 2, like)[0], version=2)
    assert_same(host(fresh.states), kept)
    assert int(fresh.states["critic"].updates) == 2 and int(fresh.states["actor"].updates) == 0
    assert fresh.version == fresh.engine.version == 2


def test_an_exported_critic_is_the_next_ones_start(model: Model, tmp_path: Path) -> None:
    cluster = prepared(model, critic(), lora=LORA)
    learn(cluster, 2)
    assert cluster.export(tmp_path) == tmp_path / "adapter"
    _, params = weights.load_scalar(tmp_path / "critic")
    assert_same(host(params), host(cluster.critic_state.trainable))
    again = prepared(model, critic(tmp_path / "critic"), lora=LORA)
    batch = batch_for(cluster)
    np.testing.assert_array_equal(again.get_values(batch)[0], cluster.get_values(batch)[0])


def test_without_a_value_loss_nothing_is_loaded_saved_or_exported(model: Model, tmp_path: Path) -> None:
    cluster = make_cluster(model, critic(), lora=LORA)
    cluster.prepare(from_config(GRPOConfig()), total_updates=1)
    cluster.export(tmp_path)
    assert set(cluster.states) == {"actor"} and not (tmp_path / "critic").exists()
    with pytest.raises(RuntimeError, match="the critic has no loss yet"):
        cluster.get_values(batch_for(cluster))


def test_an_algorithm_with_values_needs_a_critic(model: Model) -> None:
    cluster = make_cluster(model, None)
    with pytest.raises(RuntimeError, match=r"no critic: RLCluster\(..., critic=CriticConfig\(\)\)"):
        cluster.prepare(PPO, total_updates=1)


def two_labels(folder: Path) -> None:
    write_tiny_model(folder, config=CONFIG, alphabet="0123456789", classifier=True)
    tensors = load_file(folder / "model.safetensors") | {"score.weight": np.zeros((2, 16), np.float32)}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (
            partial(write_tiny_model, config=CONFIG),
            UserError,
            "another tokenizer.*: 16 tokens have another id there or none, e.g. '<.im_end",
        ),
        (
            partial(write_tiny_model, config=dataclasses.replace(CONFIG, max_positions=12), alphabet="0123456789"),
            UserError,
            "has 12 positions, this run uses 16",
        ),
        (two_labels, UnsupportedModel, "tells 2 labels apart.*num_labels=1"),
    ],
)
def test_a_folder_that_is_no_critic_of_this_policy_is_an_error_at_once(
    model: Model, tmp_path: Path, write: Any, error: type[Exception], message: str
) -> None:
    write(tmp_path)
    with pytest.raises(error, match=message):
        make_cluster(model, critic(tmp_path))


def test_too_many_nonfinite_updates_of_the_critic_name_its_own_key(model: Model) -> None:
    cluster = prepared(model, critic(), lora=LORA)
    before = host(cluster.critic_state.trainable)
    batch = batch_for(cluster)
    poisoned = ValueMicroBatch(dataclasses.replace(batch, returns=jnp.full_like(batch.returns, jnp.nan)), jnp.zeros_like(batch.returns))
    cluster.update_critic([poisoned], count=1, step=1)
    with pytest.raises(NonFiniteError, match=r"2 non-finite updates .* at step 2.*Lower algorithm.critic.optimizer.learning_rate"):
        cluster.update_critic([poisoned], count=1, step=2)
    assert_same(host(cluster.critic_state.trainable), before)


@pytest.mark.slow
@pytest.mark.parametrize("path", [False, True], ids=["actor's weights", "folder"])
def test_a_critic_on_a_mesh_learns_as_on_one_device(model: Model, classifier: Path, path: bool) -> None:
    config = critic(classifier if path else None)
    alone = learn(prepared(model, config), 3)
    cluster = prepared(model.folder, config, meshes={"actor": {"axes": {"data": 2, "fsdp": 2}}})
    assert cluster.critic_state.trainable["score"].sharding.spec == PartitionSpec(None, "fsdp")
    assert_close(learn(cluster, 3), alone)


@pytest.mark.slow
@pytest.mark.parametrize("path", [False, True], ids=["actor's weights", "folder"])
def test_a_critic_on_devices_of_its_own_learns_as_on_the_actors(model: Model, classifier: Path, path: bool) -> None:
    """Four devices don't divide the rows, so each has them all; the answers come back to the actor's device."""
    config = critic(classifier if path else None)
    meshes = {"actor": {"devices": [1]}, "critic": {"devices": "4-7", "axes": {"fsdp": 4}}}
    cluster = prepared(model.folder, config, meshes=meshes)
    assert {leaf.devices() == {*jax.devices()[4:]} for leaf in jax.tree.leaves(cluster.critic_state.trainable)} == {True}
    assert cluster.critic_state.trainable["decoder"]["layers"]["q"].sharding.spec == PartitionSpec(None, "fsdp", None)
    assert all(values.devices() == {jax.devices()[1]} for values in cluster.get_values(batch_for(cluster)))
    assert_close(learn(cluster, 3), learn(prepared(model, config), 3))


def assert_close(spread: list[dict[str, float]], alone: list[dict[str, float]]) -> None:
    for one, many in zip(alone, spread, strict=True):
        assert one.keys() == many.keys()
        for name, value in one.items():
            assert many[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
