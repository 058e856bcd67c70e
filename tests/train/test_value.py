"""Locks the critic: values before and after each id whatever the layout, one update whatever the cut, learning what it is shown."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.optimizer import OptimizerConfig
from burnish.models import scalar_head
from burnish.models.attention import Visibility
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import Params, draw
from burnish.rl.aggregate import sequence_mean, token_mean
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import clipped_value
from burnish.train.optim import Optimizer, make_optimizer
from burnish.train.state import TrainState, init_state, leaf_names
from burnish.train.step import Steps
from burnish.train.value import ValueMicroBatch, make_value_steps, make_values, read_value_metrics

from .tiny_updates import CONFIG, batch, equal, groups, on_host

values_of = make_values(CONFIG)


@cache
def critic() -> Params:
    """Large enough weights for values to differ from token to token, by about as much as the returns do."""
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, draw(scalar_head.spec(CONFIG), jax.random.key(2)))
    return params | {"score": 0.2 * jax.random.normal(jax.random.key(3), params["score"].shape)}


def with_returns(one: TokenBatch) -> TokenBatch:
    """Returns that are a function of the id and its episode, so that they don't depend on the layout."""
    returns = jnp.where(one.mask, jnp.sin(one.target_ids.astype(jnp.float32)) + one.sequences.astype(jnp.float32) / 8, jnp.nan)
    return dataclasses.replace(one, returns=returns)


def micro(one: TokenBatch) -> ValueMicroBatch:
    return ValueMicroBatch(with_returns(one), values_of(critic(), one)[0])


@cache
def _compiled(aggregate=token_mean, clip: float | None = 0.2, learning_rate: float = 1e-2) -> tuple[Steps[ValueMicroBatch], Optimizer]:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=learning_rate), total_updates=10)
    return make_value_steps(CONFIG, partial(clipped_value, clip=clip), aggregate, optimizer), optimizer


def steps_of(**options) -> tuple[Steps[ValueMicroBatch], TrainState]:
    steps, optimizer = _compiled(**options)
    return steps, init_state(critic(), optimizer)


def by_episode(array: jax.Array, one: TokenBatch) -> dict[int, np.ndarray]:
    """Entries of each episode in order."""
    kept, of = np.asarray(array)[np.asarray(one.mask)], np.asarray(one.sequences)[np.asarray(one.mask)]
    return {int(index): kept[of == index] for index in np.unique(of)}


@pytest.mark.parametrize(
    "options",
    [{"layout": "padded"}, {"layout": "shared"}, {"layout": "packed", "row_tokens": 24}, {"layout": "shared", "row_tokens": 64}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_values_are_those_of_each_episode_alone(options):
    """Before the id: the prompt's last column for a first id, however many completions share it. After: the id's own column."""
    one = batch(**options)
    before, after = (by_episode(values, one) for values in values_of(critic(), one))
    plain = jax.jit(partial(token_scalars, CONFIG))
    for index, trajectory in enumerate(t for group in groups() for t in group.trajectories):
        ids = jnp.zeros((1, 16), jnp.int32).at[0, : len(trajectory.ids)].set(trajectory.ids)
        rule = Visibility((jnp.arange(16, dtype=jnp.int32)[None] < len(trajectory.ids)).astype(jnp.int32), jnp.zeros_like(ids))
        alone = np.asarray(plain(critic(), ids, jnp.arange(16, dtype=jnp.int32)[None], rule))[0]
        own = np.flatnonzero(trajectory.sampled)
        np.testing.assert_allclose(before[index], alone[own - 1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(after[index], alone[own], rtol=1e-5, atol=1e-5)
    assert np.std(np.concatenate(list(before.values()))) > 0.1, "all values are alike: nothing is tested"


def test_a_value_is_that_after_the_id_before_and_padding_is_zero():
    one = batch(layout="packed", row_tokens=24)
    before, after = values_of(critic(), one)
    for mine, next_ in zip(by_episode(after, one).values(), by_episode(before, one).values(), strict=True):
        np.testing.assert_array_equal(mine[:-1], next_[1:])
    padding = np.logical_not(one.mask)
    assert padding.any() and not np.asarray(before)[padding].any() and not np.asarray(after)[padding].any()


def gradients_of(steps: Steps[ValueMicroBatch], state: TrainState, micros: list[ValueMicroBatch]) -> dict[str, np.ndarray]:
    summed = steps.zeros(state.trainable, None, micros[0])
    for one in micros:
        summed = steps.accumulate(summed, state.trainable, None, one)
    return {
        name: np.asarray(g) / float(summed.loss.weight)
        for name, g in zip(leaf_names(summed.gradients), jax.tree.leaves(summed.gradients), strict=True)
    }


def assert_close(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, e in expected.items():
        assert np.linalg.norm(ours[name] - e) <= 1e-5 * np.linalg.norm(e) + 1e-8, name
        assert np.linalg.norm(e) > 1e-4, f"{name} has hardly a gradient: nothing is tested"


@pytest.mark.slow
def test_cut_and_layout_leave_the_gradient_of_every_leaf():
    steps, state = steps_of(aggregate=sequence_mean)
    whole = micro(batch(layout="padded"))
    expected = gradients_of(steps, state, [whole])
    halves = [jax.tree.map(lambda x, a=a: x[a : a + 4], whole) for a in (0, 4)]
    for cut in (halves, [micro(batch(layout="shared", row_tokens=64))]):
        assert_close(gradients_of(steps, state, cut), expected)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_squared_error():
    """At the values that the step began with, clip or none: (v - R) / number of tokens, through the head: sum of errors times hidden."""
    steps, state = steps_of()
    one = micro(batch(layout="padded"))
    error = np.where(one.batch.mask, one.old_values - one.batch.returns, 0.0)
    gradients = gradients_of(steps, state, [one])
    numeric = []
    for sign in (1, -1):
        moved = critic() | {"score": critic()["score"].at[0, 3].add(sign * 1e-2)}
        numeric.append(np.asarray(values_of(moved, one.batch)[0]))
    slope = (numeric[0] - numeric[1]) / 2e-2
    np.testing.assert_allclose(gradients["score"][0, 3], (error * slope).sum() / np.asarray(one.batch.mask).sum(), rtol=1e-3)


@pytest.mark.slow
def test_updates_lower_the_error_to_what_cannot_be_known():
    """Samples of one prompt have different returns before their first id, where the critic sees the prompt alone: that error stays."""
    steps, state = steps_of()
    one = micro(batch(layout="padded"))
    losses, explained = [], []
    for _ in range(40):
        state, report = steps.update(state, None, [one._replace(old_values=values_of(state.trainable, one.batch)[0])], count=1)
        metrics = read_value_metrics(report)
        losses.append(metrics["critic/loss"].result())
        explained.append(metrics["critic/explained_variance"].result())
    first = np.asarray(one.batch.returns)[:, 0].reshape(2, 4)  # by group
    floor = 0.5 * np.square(first - first.mean(axis=1, keepdims=True)).sum() / np.asarray(one.batch.mask).sum()
    assert losses[0] > 5 * floor and floor < losses[-1] < 1.1 * floor
    assert explained[0] < 0 and explained[-1] > 0.6


def test_the_report_of_an_update_is_that_of_its_micro_batches():
    """Explained variance by numpy over all tokens; a whole batch, halves, and the critic's own names."""
    steps, state = steps_of()
    whole = micro(batch(layout="padded"))
    halves = [jax.tree.map(lambda x, a=a: x[a : a + 4], whole) for a in (0, 4)]
    mask = np.asarray(whole.batch.mask)
    returns, values = (np.asarray(x, np.float64)[mask] for x in (whole.batch.returns, whole.old_values))
    state, report = steps.update(state, None, halves, count=2)
    metrics = {name: metric.result() for name, metric in read_value_metrics(report).items()}
    assert set(metrics) == {
        f"critic/{name}"
        for name in ("loss", "value_mean", "return_mean", "squared_error", "clip_fraction", "explained_variance")
        + ("grad_norm", "learning_rate", "skipped_updates")
    }
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-4)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), rel=1e-5)
    assert metrics["critic/loss"] == pytest.approx(0.5 * np.mean((values - returns) ** 2), rel=1e-4)
    assert (metrics["critic/clip_fraction"], metrics["critic/learning_rate"]) == (0.0, pytest.approx(1e-2))


def test_returns_that_do_not_vary_have_no_explained_variance():
    steps, state = steps_of()
    one = batch(layout="padded")
    constant = ValueMicroBatch(dataclasses.replace(one, returns=jnp.full_like(one.returns, 0.7)), values_of(critic(), one)[0])
    assert "critic/explained_variance" not in read_value_metrics(steps.update(state, None, [constant], count=1)[1])


def test_without_a_scored_id_nothing_moves():
    steps, state = steps_of()
    one = micro(batch(layout="padded"))
    before = on_host(state)
    state, _ = steps.update(state, None, [one._replace(batch=dataclasses.replace(one.batch, mask=jnp.zeros_like(one.batch.mask)))], count=1)
    equal((state.trainable, state.opt_state, state.updates), (before.trainable, before.opt_state, before.updates))
