"""The loop with everything real, on a tiny random model: what a step does, what it reports, and every way in which a run ends."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.config.errors import UserError
from burnish.config.schema import LoraConfig
from burnish.data.source import DataError, from_rows
from burnish.data.stream import PromptStream
from burnish.models.model import Model
from burnish.observe import trace
from burnish.observe.sinks import EvalReport, StepReport
from burnish.rl.producer import RolloutFailed
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import ROWS, RecordingCluster, assert_same, differs, digits_reward, host, make_learner

pytestmark = pytest.mark.slow  # each test compiles programs of its own

LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


def updates_of(learner: Any) -> RecordingCluster:
    assert isinstance(learner.cluster, RecordingCluster)
    return learner.cluster


class Recorder:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.evaluations: list[EvalReport] = []
        self.closed = 0

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def evaluation(self, report: EvalReport) -> None:
        self.evaluations.append(report)

    def close(self) -> None:
        self.closed += 1


# ------------------------------------------------------------------------------------------------------------------ what a step does


@pytest.mark.slow
def test_b045_iterations_compare_with_the_policy_that_sampled(model: Model) -> None:
    """24 prompts, mini-batches of 12, micro-batches of 4, 2 iterations: 4 updates a step; only a step's first has ratio 1."""
    rows = [{"prompt": f"{i:02d}", "answer": str(i % 10)} for i in range(24)]
    recorder = Recorder()
    learner = make_learner(
        model,
        train_ds=rows,
        training={"batch_size": 24, "mini_batch_size": 12, "train_micro_batch_size": 4},
        algorithm={"num_iterations": 2, "num_generations": 2},
        sinks=[recorder],
    )
    result = learner.train()
    cluster = updates_of(learner)
    assert (result.steps, len(cluster.updates)) == (2, 8)
    assert int(cluster.state.updates) + int(cluster.state.skipped) == 8
    ratios = np.array(cluster.means("policy/ratio_mean"))
    assert np.abs(ratios[[0, 4]] - 1).max() <= 1e-6
    assert np.abs(ratios[[1, 2, 3, 5, 6, 7]] - 1).min() > 1e-6
    assert [group.id for group in recorder.steps[1].groups] == [(1, i) for i in range(24)]
    assert all(metrics["staleness/max"] == 0 and metrics["policy/ratio_mean"] != 1 for metrics in result.history)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["every weight", "adapter"])
def test_the_first_policy_is_the_reference(model: Model, lora: LoraConfig | None) -> None:
    """B047: KL to the reference is 0 before the first update, with the same mask; afterwards it isn't."""
    trace.take()
    learner = make_learner(model, algorithm={"beta": 0.1}, training={"max_steps": 2}, lora=lora)
    learner.train()
    first, second = updates_of(learner).means("policy/kl")
    assert abs(first) < 1e-10 < second
    assert [s.ids["role"] for s in trace.take() if s.name == "score" and "role" in s.ids] == ["reference"] * 2


def test_without_a_penalty_no_reference_is_asked_or_kept(model: Model) -> None:
    trace.take()
    learner = make_learner(model, training={"max_steps": 1})
    result = learner.train()
    assert not [s for s in trace.take() if s.name == "score" and "role" in s.ids]
    assert "policy/kl" not in result.history[0]
    with pytest.raises(RuntimeError, match="no reference"):
        learner.cluster.get_ref_per_token_logps(updates_of(learner).batches[0])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"tokens_per_device": 32}], ids=["by prompts", "by tokens"])
def test_constant_rewards_change_nothing_r19_B005(model: Model, cut: dict[str, int]) -> None:
    """After 3 real steps at beta 0: no update, no decay, no moment, no step of the schedule; counted."""
    optimizer = {"learning_rate": 0.1, "weight_decay": 0.5, "schedule": "linear"}
    groups_seen = iter(range(1000))

    def reward(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        return digits_reward(completions, answer) if next(groups_seen) < 3 * 4 else [1.0] * len(completions)

    states = {}
    learner = make_learner(model, reward=reward, training={"max_steps": 5, "optimizer": optimizer, **cut})
    result = learner.train(on_step=lambda step: states.update({step: host(learner.cluster.state)}))
    assert differs(states[3].trainable, host(model.params)) and int(states[3].updates) == 3
    for later in (states[4], states[5]):
        assert_same((later.trainable, later.opt_state, later.updates), (states[3].trainable, states[3].opt_state, states[3].updates))
    assert int(states[5].skipped) == 2
    told = [(m["optim/skipped_updates"], m["group/zero_std_fraction"], m["optim/grad_norm"]) for m in result.history[3:]]
    assert told == [(1.0, 1.0, 0.0)] * 2


@pytest.mark.slow
def test_tokens_per_device_gives_the_update_of_one_batch_and_a_warm_run_compiles_nothing(model: Model) -> None:
    """The optimizer's eps is large, so that its update is about the gradient. 16 episodes of at most 16 ids, 32 a pass."""
    training = {"optimizer": {"learning_rate": 1.0, "eps": 1.0}, "max_steps": 1}
    whole = make_learner(model, training=training)
    whole.train()
    parts = make_learner(model, training={**training, "tokens_per_device": 32})
    parts.train()
    batches = updates_of(parts).batches
    assert len(batches) > 1 and {batch.tokens.shape for batch in batches} == {(1, 32)}
    a, b = host(whole.cluster.state.trainable), host(parts.cluster.state.trainable)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)
    assert differs(a, host(model.params))
    history = make_learner(model, training={"max_steps": 6, "tokens_per_device": 32}, algorithm={"num_iterations": 2}).train().history
    compiles = [metrics["perf/compiles"] for metrics in history]
    assert compiles[0] > 0 and compiles[3:] == [0.0] * 3, compiles


@pytest.mark.slow
def test_resampled_groups_are_counted_and_only_those_with_a_signal_are_trained_B011(model: Model) -> None:
    recorder = Recorder()
    ties = iter(range(1000))

    def reward(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        return [1.0] * len(completions) if next(ties) % 2 else digits_reward(completions, answer)

    learner = make_learner(model, reward=reward, algorithm={"zero_signal": "resample"}, training={"max_steps": 1}, sinks=[recorder])
    metrics = learner.train().history[0]
    sampled = recorder.steps[0].groups
    rewards = [t.reward for group in sampled for t in group.trajectories]
    assert len(sampled) == 4 + metrics["group/resampled"] > 4
    assert metrics["reward/mean"] == pytest.approx(np.mean([r for r in rewards if r is not None]))
    assert metrics["group/missing"] == 0 and metrics["group/dropped"] == metrics["group/zero_std_fraction"] * len(sampled) > 0
    (batch,) = updates_of(learner).batches
    assert len(set(np.asarray(batch.prompts_index)[np.asarray(batch.mask)].tolist())) == 4


@pytest.mark.slow
def test_an_adapter_is_all_that_is_trained(model: Model) -> None:
    before = host(model.params)
    learner = make_learner(model, lora=LORA)
    learner.train()
    assert_same(host(model.params), before)
    assert {name for name in learner.cluster.state.trainable} == set(LORA.targets)
    assert all(np.abs(pair["b"]).max() > 0 for pair in learner.cluster.state.trainable.values())


@pytest.mark.slow
@pytest.mark.parametrize("temperature, top_p", [(0.7, 1.0), (1.0, 0.9), (1.3, 1.0), (1.3, 0.9)])
def test_the_trainer_agrees_with_the_sampler_on_every_token(model: Model, temperature: float, top_p: float) -> None:
    """Before and after an update, over the whole vocabulary and over the kept sets, which are replayed."""
    learner = make_learner(model, sampling={"temperature": temperature, "top_p": top_p})
    result = learner.train()
    assert max(updates_of(learner).worst_mismatch) < 1e-4
    assert all(0 <= m["mismatch/mean"] < 1e-4 and abs(m["mismatch/kl"]) < 1e-4 and abs(m["mismatch/k3"]) < 1e-6 for m in result.history)
    assert all(m["mismatch/max"] < 1e-3 and m["mismatch/ess"] > 1 - 1e-4 for m in result.history)
    assert differs(host(learner.cluster.state.trainable), host(model.params))


@pytest.mark.slow
def test_a_run_repeats_bitwise_whatever_finished_first(model: Model) -> None:
    """f32, one seed: metrics and weights of two runs whose rewards come back in different orders."""

    def run(delays: Sequence[float]) -> tuple[list[dict[str, float]], Any]:
        calls = iter(range(1000))

        async def reward(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
            await asyncio.sleep(delays[next(calls) % len(delays)])
            return digits_reward(completions, answer)

        learner = make_learner(model, reward=reward, training={"max_steps": 3})
        history = learner.train().history
        timeless = [{k: v for k, v in m.items() if k.partition("/")[0] not in ("time", "perf", "memory")} for m in history]
        return timeless, host(learner.cluster.state.trainable)

    first, second = run([0.0, 0.1, 0.02, 0.05]), run([0.08, 0.0])
    assert first[0] == second[0]
    assert_same(first[1], second[1])
    assert len({m["reward/mean"] for m in first[0]}) > 1


@pytest.mark.slow
def test_rows_spread_over_two_devices_give_the_same_update(model: Model) -> None:
    """The optimizer's eps is large here, so that its update is about the gradient: Adam's first is its sign, which rounding can turn."""
    training = {"max_steps": 1, "optimizer": {"learning_rate": 1.0, "eps": 1.0}}
    alone, spread = (make_learner(model, training=training, axes={"data": n}) for n in (1, 2))
    alone.train()
    spread.train()
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(spread.cluster.state.trainable)} == {2}
    a, b = host(alone.cluster.state.trainable), host(spread.cluster.state.trainable)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)
    assert differs(a, host(model.params))


# ------------------------------------------------------------------------------------------------------------------------- evaluation


def test_evaluations_are_paired_and_change_nothing(model: Model) -> None:
    """Before, on the way, after: the same questions with the same noise; the run's numbers are the same with and without them."""
    recorder = Recorder()
    with make_learner(model, eval_ds=ROWS) as learner:
        first, again = learner.evaluate(), learner.evaluate()
    assert list(first) == ["greedy"]
    assert [t.ids.tolist() for t in first["greedy"].trajectories] == [t.ids.tolist() for t in again["greedy"].trajectories]
    assert [t.messages[0]["content"] for t in first["greedy"].trajectories] == [row["prompt"] for row in ROWS]

    plain = make_learner(model).train()
    learner = make_learner(model, eval_ds=ROWS, training={"eval_every": 1, "compare": True}, sinks=[recorder])
    result = learner.train()
    assert [(report.label, report.step) for report in recorder.evaluations] == [("before", 0), ("step 1", 1), ("step 2", 2), ("after", 2)]
    assert list(result.evaluations[0]) == ["greedy", "T=1"]
    assert result.evaluations[0]["greedy"].accuracy == first["greedy"].accuracy
    assert [m["reward/mean"] for m in result.history] == [m["reward/mean"] for m in plain.history]
    assert recorder.evaluations[2].metrics == recorder.evaluations[3].metrics
    assert result.evaluations[0]["greedy"].rewards.tolist() != result.evaluations[2]["greedy"].rewards.tolist()


# ---------------------------------------------------------------------------------------------------------------------------- the end


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def assert_back_to(baseline: set[str]) -> None:
    deadline = time.monotonic() + 5
    while not threads() <= baseline and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() <= baseline


def test_data_that_ends_is_a_clean_end(model: Model) -> None:
    baseline, recorder = threads(), Recorder()
    learner = make_learner(
        model, train_ds=PromptStream([from_rows(ROWS, name="rows")], seed=0, epochs=1), training={"max_steps": 50}, sinks=[recorder]
    )
    result = learner.train()
    assert (result.steps, len(result.history), len(recorder.steps), recorder.closed) == (2, 2, 2, 1)
    assert_back_to(baseline)
    with pytest.raises(RuntimeError, match="this learner is closed"):
        learner.train()
    with pytest.raises(RuntimeError, match="this learner is closed"):
        learner.evaluate()


@pytest.mark.parametrize("failing", ["data", "reward", "callback", "interrupt"])
def test_whatever_ends_a_run_everything_is_closed_and_the_cause_is_raised(model: Model, failing: str) -> None:
    def rows() -> Any:
        yield from ROWS[:5]
        raise OSError("the feed broke")

    def broken(completions: Sequence[str]) -> list[float]:
        raise ZeroDivisionError("no tests were run")

    def on_step(step: int) -> None:
        if failing in ("callback", "interrupt"):
            raise KeyboardInterrupt if failing == "interrupt" else LookupError("in the callback")

    baseline, recorder = threads(), Recorder()
    data: Any = PromptStream([from_rows(rows(), name="feed")], seed=0, epochs=1) if failing == "data" else ROWS
    learner = make_learner(model, train_ds=data, reward=broken if failing == "reward" else digits_reward, sinks=[recorder])
    expected = {
        "data": (DataError, "feed: row 5 could not be read: OSError: the feed broke"),
        "reward": (RolloutFailed, "all 16 episodes of the first batch failed.*ZeroDivisionError: no tests were run"),
        "callback": (LookupError, "in the callback"),
        "interrupt": (KeyboardInterrupt, "^$"),
    }[failing]
    start = time.monotonic()
    with pytest.raises(expected[0], match=expected[1]) as caught:
        learner.train(on_step=on_step)
    assert recorder.closed == 1
    assert_back_to(baseline)
    if failing in ("data", "reward"):
        assert {"run", "_steps_in_turn"} <= {entry.name for entry in caught.traceback}, "the producer's frames are gone"
    assert failing != "reward" or time.monotonic() - start < 30


def test_what_cant_work_is_refused_before_anything_is_sampled(model: Model) -> None:
    with pytest.raises(UserError, match="10"):
        make_learner(model, training={"batch_size": 11})
    with pytest.raises(UserError, match="held-out"):
        make_learner(model, training={"eval_every": 1})
    with pytest.raises(UserError, match="too long"):
        make_learner(model, rollout={"max_prompt_tokens": 2})
    with pytest.raises(ValueError, match="mini_batch_size is 3"):
        make_learner(model, training={"mini_batch_size": 3})


@pytest.mark.slow
def test_a_checkpoint_says_where_weights_and_data_stand(model: Model, tmp_path: Path) -> None:
    learner = make_learner(model, lora=LORA)
    learner.train(saver=Saver(tmp_path))
    assert store.committed(tmp_path) == [2]
    state, extra = store.read(tmp_path, 2, learner.cluster.states)
    assert_same(host(state), host(learner.cluster.states))
    assert extra["facts"]["run.seed"] == 3 and extra["metrics"]["reward/mean"] > 0
    assert extra["data"]["sources"]["train"]["index"] == 8
