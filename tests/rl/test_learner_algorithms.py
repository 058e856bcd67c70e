"""The loop under other algorithms than plain GRPO: which anchor, penalties in the reward, a critic; and the alarm of a stale sampler."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.config.algorithms import CriticConfig, PPOConfig
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import CheckpointSection, Config, LoraConfig, RolloutConfig, RunSection, TrainingConfig
from burnish.models.model import Model
from burnish.rl.advantages import group_relative
from burnish.rl.cluster import RLCluster
from burnish.rl.credit import TokenEstimator, discounted_returns
from burnish.rl.learners import ConfiguredLearner, GRPOLearner, PPOLearner
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import ROWS, assert_same, differs, digits_reward, host

pytestmark = pytest.mark.slow  # each test compiles programs of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


def make(
    model: Model,
    algorithm: dict[str, Any],
    *,
    reward: Any = digits_reward,
    lora: LoraConfig | None = None,
    make_cluster: type[RLCluster] = RLCluster,
    **training: Any,
) -> ConfiguredLearner:
    """Batches of 4 prompts x 4 samples of at most 4 ids, in float32."""
    chosen = Config.model_validate({"algorithm": {"num_generations": 4, **algorithm}}).algorithm
    cluster = make_cluster(
        model,
        lora=lora,
        precision="f32",
        rollout=RolloutConfig(max_prompt_tokens=12, slots=16, prefill_rows=4, decode_chunk=4, sampling={"max_tokens": 4}),
        training=TrainingConfig(**{"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}, "head_chunk": 64, **training}),
        critic=chosen.critic if isinstance(chosen, PPOConfig) else None,
        seed=3,
    )
    return ConfiguredLearner(cluster, chosen, reward_fns=[reward], train_ds=ROWS, run=RunSection(seed=3))


@pytest.mark.parametrize(("old", "tolerance"), [("auto", 0.0), ("recomputed", 1e-5), ("sampler", 1e-4)])
def test_the_first_update_is_on_policy_whatever_the_anchor(model: Model, old: str, tolerance: float) -> None:
    first = make(model, {"name": "grpo", "old": old}, max_steps=1).train().history[0]
    assert max(abs(np.log(first["policy/ratio_min"])), abs(np.log(first["policy/ratio_max"]))) <= tolerance
    assert first["policy/clip_low_fraction"] == first["policy/clip_high_fraction"] == 0.0
    assert first["mismatch/max"] < 1e-4 and first["mismatch/ess"] > 0.9999
    assert ("mismatch/weight_mean" in first) == (old != "sampler")


def test_a_penalty_in_the_reward_is_taken_before_the_advantages(model: Model) -> None:
    """The first policy is the reference, so the first penalty is 0 and the advantages are GRPO's; later it isn't."""
    plain = make(model, {"name": "grpo"}).train().history
    history = make(model, {"name": "grpo", "beta": 0.5, "kl_in": "reward", "kl_estimator": "k2"}).train().history
    assert abs(history[0]["reward/kl_penalty"]) < 1e-8 < history[1]["reward/kl_penalty"]
    assert history[0]["advantage/max"] == pytest.approx(plain[0]["advantage/max"], abs=1e-5)
    assert "policy/kl" not in history[1] and history[1]["reward/mean"] > 0


@pytest.mark.parametrize("old", ["auto", "sampler"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["model", "adapter"])
def test_a_penalty_in_the_reward_of_a_policy_that_is_the_reference_is_exactly_0(model: Model, lora: LoraConfig | None, old: str) -> None:
    """The sampler's rounding, divided by the deviation of a group whose rewards are equal, gave advantages of 0.08 and an update."""
    algorithm = {"name": "grpo", "beta": 0.1, "kl_in": "reward", "old": old}
    learner = make(model, algorithm, reward=lambda completions: [1.0] * len(completions), lora=lora)
    history = learner.train().history
    assert [m["reward/kl_penalty"] for m in history] == [0.0, 0.0]
    assert [m["advantage/max"] for m in history] == [0.0, 0.0] and int(learner.cluster.state.updates) == 0


def test_ppo_updates_policy_and_critic_and_saves_both(model: Model, tmp_path: Path) -> None:
    learner = make(model, {"name": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}}}, max_steps=3)
    history = learner.train(saver=Saver(tmp_path)).history
    assert [m["critic/learning_rate"] for m in history] == [pytest.approx(1e-2)] * 3
    assert history[0]["critic/value_mean"] == 0.0 < history[2]["critic/value_mean"], "a fresh head says 0, then moves towards the returns"
    assert abs(history[0]["advantage/mean"]) < 1e-5 and history[0]["policy/ratio_max"] == 1.0
    assert store.committed(tmp_path) == [3]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}, "warmup_steps": 1}},
        {"name": "grpo", "beta": 0.2, "old": "recomputed"},
        {"name": "grpo", "zero_signal": "resample", "max_resample_rounds": 8},
    ],
    ids=["critic", "reference", "resample"],
)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(model: Model, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Every weight is trained: with a critic and its own optimizer, beside a reference, with prompts drawn in rounds."""
    sparse = {"reward": lambda completions, answer: [float(gold in text) for text, gold in zip(completions, answer, strict=True)]}
    options = sparse if "zero_signal" in algorithm else {}
    whole = make(model, algorithm, max_steps=4, mini_batch_size=2, **options)
    whole.train(saver=Saver(tmp_path, CheckpointSection(every=2)))
    resumed = make(model, algorithm, max_steps=4, mini_batch_size=2, **options)
    assert resumed.resume(tmp_path, 2) == 2
    resumed.train()
    assert_same(host(resumed.cluster.states), host(whole.cluster.states))
    assert ("critic" in whole.cluster.states) == (algorithm["name"] == "ppo")


def test_while_the_critic_warms_up_the_policy_stays(model: Model) -> None:
    seen: dict[int, tuple[Any, Any]] = {}
    learner = make(model, {"name": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}, "warmup_steps": 2}}, max_steps=3)
    cluster = learner.cluster
    history = learner.train(
        on_step=lambda step: seen.update({step: (host(cluster.state.trainable), host(cluster.critic_state.trainable))})
    ).history
    assert_same(seen[1][0], host(model.params))
    assert_same(seen[2][0], seen[1][0])
    assert differs(seen[1][1], seen[2][1]) and differs(seen[3][0], seen[2][0])
    assert "policy/loss" not in history[1] and "policy/loss" in history[2]


def test_several_updates_a_step_keep_the_values_that_the_mini_batch_began_with(model: Model) -> None:
    learner = make(model, {"name": "ppo", "num_iterations": 2, "value_clip": 1e-4}, max_steps=1, train_micro_batch_size=2)
    (metrics,) = learner.train().history
    assert metrics["policy/ratio_max"] > 1.0 and int(learner.cluster.state.updates) == 2


@pytest.mark.parametrize("advantage", [group_relative, TokenEstimator(discounted_returns)], ids=["by episode", "by token"])
def test_an_advantage_without_returns_is_refused_where_a_critic_would_learn_0(model: Model, advantage: Any) -> None:
    learner = make(model, {"name": "ppo"}, max_steps=1)
    learner._algorithm = dataclasses.replace(learner._algorithm, advantage=advantage)
    with pytest.raises(ValueError, match="a critic learns returns, and the algorithm's advantage gives none"):
        learner.train()


class Forgetful(RLCluster):
    """Publishes versions with the first weights in them: what a broken sync looks like."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(model, **options)
        self._stale = host(model.params)

    def sync_weights(self) -> int:
        trained = self._state
        self._state = dataclasses.replace(self.state, trainable=jax.tree.map(jnp.asarray, self._stale))
        version = super().sync_weights()
        self._state = trained
        return version


def test_a_stale_sampler_raises_the_alarm_within_one_step_B075(model: Model) -> None:
    frozen = make(model, {"name": "grpo"}, optimizer={"learning_rate": 0.0}).train().history
    assert max(m["mismatch/mean"] for m in frozen) < 1e-4
    healthy = make(model, {"name": "grpo"}).train().history[1]
    stale = make(model, {"name": "grpo"}, make_cluster=Forgetful).train().history[1]
    assert healthy["mismatch/mean"] < 1e-4 < 0.01 < stale["mismatch/mean"]
    assert stale["mismatch/max"] > 0.05 and stale["mismatch/ess"] < healthy["mismatch/ess"]


def test_ppo_needs_a_critic_and_time_beyond_its_warm_up(model: Model) -> None:
    with pytest.raises(UserError, match="PPO needs a critic"):
        cluster = RLCluster(model, precision="f32", rollout=RolloutConfig(max_prompt_tokens=12, slots=4, sampling={"max_tokens": 4}))
        PPOLearner(cluster, reward_fns=[digits_reward], train_ds=ROWS)
    with pytest.raises(UserError, match="PPO needs a critic, and this cluster has one of other options"):
        other = PPOConfig(critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=0.5)))
        PPOLearner(make(model, {"name": "ppo"}).cluster, other, reward_fns=[digits_reward], train_ds=ROWS)
    with pytest.raises(UserError, match="warms up for 2 steps and training.max_steps is 2"):
        make(model, {"name": "ppo", "critic": {"warmup_steps": 2}})
    assert PPOLearner.default.name == "ppo" and GRPOLearner.default.name == "grpo"
