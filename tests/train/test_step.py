"""Locks one update: how a batch was cut or laid out can't change it, and it happens wholly or not at all.

R15, R16, R17, R19, R61 are rows of the fault matrix; B023, B111, B119 probes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config.algorithms import GRPOConfig
from burnish.config.optimizer import OptimizerConfig
from burnish.rl.algorithms import from_config
from burnish.rl.losses import Mean, reinforce, with_entropy_bonus
from burnish.rl.off_policy import rejecting
from burnish.train.optim import make_optimizer
from burnish.train.score import make_score
from burnish.train.state import NonFiniteError, init_state, leaf_names, read_metrics, stop_if_nonfinite
from burnish.train.step import MicroBatch, Steps, Totals, make_apply, make_steps

from .tiny_updates import CONFIG, LORA, base, batch, equal, groups, on_host, pairs, steps_of


def totals(steps: Steps, state, frozen, micros: list[MicroBatch]) -> Totals:
    summed = steps.zeros(state.trainable, frozen, micros[0])
    for micro in micros:
        summed = steps.accumulate(summed, state.trainable, frozen, micro)
    return summed


def gradients_of(summed: Totals) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(summed.gradients)
    return {n: np.asarray(g) / float(summed.loss.weight) for n, g in zip(leaf_names(summed.gradients), leaves, strict=True)}


def assert_close(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, e in expected.items():
        assert np.linalg.norm(ours[name] - e) <= 1e-5 * np.linalg.norm(e) + 1e-8, name
        assert np.linalg.norm(e) > 1e-4, f"{name} has hardly a gradient: nothing is tested"


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_cutting_a_batch_changes_neither_loss_nor_gradient_r61_b023(aggregation):
    whole = batch(layout="padded")
    steps, state, frozen = steps_of(algorithm=GRPOConfig(aggregation=aggregation))
    expected = totals(steps, state, frozen, [MicroBatch(whole)])
    assert whole.mask.shape[0] == 8
    for cuts in ([4, 4], [1] * 8, [1, 4, 1, 1, 1]):
        edges = np.cumsum([0, *cuts])
        micros = [MicroBatch(jax.tree.map(lambda x, a=a, b=b: x[a:b], whole)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        cut = totals(steps, state, frozen, micros)
        np.testing.assert_allclose(cut.loss.value(), expected.loss.value(), rtol=1e-5, atol=1e-6)
        assert_close(gradients_of(cut), gradients_of(expected))


def test_metrics_of_micro_batches_are_those_of_the_whole():
    """Means and the effective sample size are summed in parts, extremes joined; not one of them is a mean of means."""
    whole = batch(layout="padded")
    halves = [MicroBatch(jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], whole)) for i in (0, 1)]
    found = []
    for micros in ([MicroBatch(whole)], halves):
        steps, state, frozen = steps_of()
        _, report = steps.apply(state, totals(steps, state, frozen, micros))
        found.append(read_metrics(report))
    expected, cut = ({name: metric.result() for name, metric in metrics.items()} for metrics in found)
    assert cut == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert {found[0][f"policy/ratio_{kind}"].reduction for kind in ("min", "max")} == {"min", "max"}
    assert 0 < expected["mismatch/mean"] < expected["mismatch/max"]
    assert 0 < expected["mismatch/ess"] < 1


def steps_with(**changes):
    """Steps of GRPO's record with some of its values replaced."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), total_updates=10)
    algorithm = dataclasses.replace(from_config(GRPOConfig()), **changes)
    steps = make_steps(CONFIG, algorithm, optimizer, lora_scale=LORA.alpha / LORA.rank, head_chunk=8)
    return steps, init_state(pairs(), optimizer), base()


@pytest.mark.slow
def test_rejected_tokens_leave_loss_and_denominator():
    """The update is that of a batch without them; with all of them rejected there is none."""
    one = batch()
    odd = one.mask & (jnp.arange(one.mask.shape[1], dtype=jnp.int32)[None] % 2 == 1)
    far = dataclasses.replace(one, sampler_logps=jnp.where(odd, -30.0, one.sampler_logps))
    steps, state, frozen = steps_with(reject=functools.partial(rejecting, level="token", low=0.0, high=1e6))
    state, report = steps.update(state, frozen, [MicroBatch(far)], count=1)
    metrics = read_metrics(report)
    plain, expected, frozen = steps_of()
    expected, report = plain.update(expected, frozen, [MicroBatch(dataclasses.replace(one, mask=one.mask & ~odd))], count=1)
    for name in ("policy/loss", "policy/entropy", "policy/ratio_mean", "optim/grad_norm"):
        ours, theirs = metrics[name], read_metrics(report)[name]
        assert (ours.total, ours.weight) == pytest.approx((theirs.total, theirs.weight), rel=1e-5, abs=1e-6), name
    assert metrics["policy/entropy"].weight == float(jnp.sum(one.mask & ~odd))
    assert metrics["mismatch/rejected_fraction"].result() == pytest.approx(float(jnp.sum(odd) / jnp.sum(one.mask)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.trainable, expected.trainable)

    nothing = dataclasses.replace(one, sampler_logps=jnp.full_like(one.sampler_logps, -30.0))
    state, report = steps.update(state, frozen, [MicroBatch(nothing)], count=1)
    metrics = read_metrics(report)
    assert (int(state.updates), int(state.skipped), int(state.nonfinite)) == (1, 1, 0)
    assert metrics["mismatch/rejected_fraction"].result() == 1.0
    assert "policy/ratio_max" not in metrics and metrics["mismatch/max"].result() > 20


@pytest.mark.slow
def test_an_entropy_bonus_has_a_gradient_only_if_the_algorithm_asks_for_it():
    flat = batch(advantage=0.0)
    bonus = with_entropy_bonus(reinforce, coefficient=1.0)
    steps, state, frozen = steps_with(loss=bonus)
    state, report = steps.update(state, frozen, [MicroBatch(flat)], count=1)
    assert (int(state.updates), int(state.skipped)) == (0, 1)
    before = read_metrics(report)["policy/entropy"].result()
    steps, state, frozen = steps_with(loss=bonus, entropy_gradient=True)
    for _ in range(5):
        state, report = steps.update(state, frozen, [MicroBatch(flat)], count=1)
    assert int(state.updates) == 5
    assert read_metrics(report)["policy/entropy"].result() > before + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_layouts_give_the_same_gradient_of_every_leaf(lora):
    steps, state, frozen = steps_of(lora=lora)
    expected = gradients_of(totals(steps, state, frozen, [MicroBatch(batch(layout="padded"))]))
    for other in (batch(layout="shared"), batch(layout="packed", row_tokens=24), batch(layout="shared", row_tokens=64)):
        assert_close(gradients_of(totals(steps, state, frozen, [MicroBatch(other)])), expected)


def test_one_micro_batch_is_what_an_accumulation_of_one_is():
    micro = MicroBatch(batch())
    steps, state, frozen = steps_of()
    alone, report = steps.update(state, frozen, [micro], count=1)
    steps, state, frozen = steps_of()
    parts, other = steps.apply(state, totals(steps, state, frozen, [micro]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), alone, parts)
    assert read_metrics(report).keys() == read_metrics(other).keys()


def test_ratio_is_one_and_kl_zero_on_policy():
    """Reference = policy = anchor: ratio exactly 1, KL exactly 0."""
    one = batch()
    steps, state, frozen = steps_of(algorithm=GRPOConfig(beta=0.1))
    logps = make_score(CONFIG, lora_scale=LORA.alpha / LORA.rank)(base(), state.trainable, one)
    metrics = read_metrics(steps.update(state, frozen, [MicroBatch(one, None, logps)], count=1)[1])
    assert metrics["policy/ratio_mean"].result() == 1.0
    assert abs(metrics["policy/kl"].result()) < 1e-10
    assert 0 < metrics["policy/entropy"].result() < np.log(CONFIG.vocab_size)


def test_values_at_padding_and_a_far_reference_leave_everything_finite_r17():
    one = batch()
    steps, state, frozen = steps_of(algorithm=GRPOConfig(beta=0.1))
    padding_is_nan = jnp.where(one.mask, -1.0, jnp.nan)
    far = jnp.where(one.mask, -100.0, -jnp.inf)
    poisoned = dataclasses.replace(one, advantages=jnp.where(one.mask, one.advantages, jnp.nan), sampler_logps=padding_is_nan)
    state, report = steps.update(state, frozen, [MicroBatch(poisoned, padding_is_nan, far)], count=1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert all(np.isfinite(m.result()) for m in read_metrics(report).values())
    assert int(state.updates) == 1


def after_real_updates(**options):
    """Steps and a state with moments, after three real updates."""
    steps, state, frozen = steps_of(weight_decay=0.1, schedule="linear", **options)
    for seed in range(3):
        state, _ = steps.update(state, frozen, [MicroBatch(batch(groups(seed=seed)))], count=1)
    assert int(state.updates) == 3
    return steps, state, frozen


def test_the_global_norm_is_clipped_before_the_rule():
    """Lion without memory moves by sign and remembers the gradient: 6 = |(3, 3, 3, 3)| is clipped to 1, which makes halves of them."""
    config = OptimizerConfig(name="lion", learning_rate=1.0, b1=0.0, b2=0.0, max_grad_norm=1.0)
    optimizer = make_optimizer(config, total_updates=1)
    state = init_state({"q": jnp.zeros((1, 2, 2))}, optimizer)
    two = jnp.full((), 2.0)
    after, report = make_apply(optimizer)(state, Totals({"q": jnp.full((1, 2, 2), 6.0)}, Mean(two, two), {}))
    (moment,) = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.shape == (1, 2, 2)]
    np.testing.assert_allclose(moment, 0.5)
    np.testing.assert_allclose(after.trainable["q"], -1.0)
    assert read_metrics(report)["optim/grad_norm"].result() == 6.0


@pytest.mark.parametrize("nothing", ["equal rewards", "nothing scored"])
def test_without_a_signal_nothing_moves_r19(nothing):
    steps, state, frozen = after_real_updates()
    flat = batch(advantage=0.0) if nothing == "equal rewards" else dataclasses.replace(batch(), mask=jnp.zeros_like(batch().mask))
    before = on_host(state)
    after, report = steps.update(state, frozen, [MicroBatch(flat)], count=1)
    equal((after.trainable, after.opt_state, after.updates), (before.trainable, before.opt_state, before.updates))
    assert (int(after.skipped), int(after.nonfinite)) == (1, 0)
    assert read_metrics(report)["optim/skipped_updates"].result() == 1.0


@pytest.mark.parametrize(("poison", "where"), [(jnp.nan, "gradient"), (jnp.inf, "gradient"), (jnp.nan, "loss")])
def test_a_nonfinite_number_skips_the_whole_update_r15_b119(poison, where):
    steps, state, frozen = after_real_updates()
    one = batch()
    before = on_host(state)
    if where == "loss":
        one = dataclasses.replace(one, advantages=jnp.full_like(one.advantages, poison))
        after, report = steps.update(state, frozen, [MicroBatch(one)], count=1)
    else:
        summed = totals(steps, state, frozen, [MicroBatch(one)])
        summed.gradients["down"]["b"] = summed.gradients["down"]["b"].at[0, 0, 0].set(poison)
        after, report = steps.apply(state, summed)
        bad = [n for n, flag in zip(leaf_names(after.trainable), report.nonfinite_leaves.tolist(), strict=True) if flag]
        assert bad == ["down.b"]
    equal((after.trainable, after.opt_state, after.updates), (before.trainable, before.opt_state, before.updates))
    assert (int(after.skipped), int(after.nonfinite)) == (1, 1)
    after, _ = steps.update(after, frozen, [MicroBatch(batch())], count=1)
    assert (int(after.updates), int(after.skipped), int(after.nonfinite)) == (4, 1, 0)


def test_too_many_nonfinite_updates_in_a_row_stop_the_run_r16():
    steps, state, frozen = steps_of()
    before = on_host(state.trainable)
    bad = dataclasses.replace(batch(), advantages=jnp.full_like(batch().advantages, jnp.nan))
    for step in (1, 2):
        state, report = steps.update(state, frozen, [MicroBatch(bad)], count=1)
        stop_if_nonfinite(state, report, limit=3, step=step)
    state, report = steps.update(state, frozen, [MicroBatch(bad)], count=1)
    with pytest.raises(NonFiniteError, match=r"3 non-finite updates in a row, the last at step 3, in .*down\.b.*none was applied"):
        stop_if_nonfinite(state, report, limit=3, step=3)
    equal(state.trainable, before)


def test_schedules_count_updates_not_micro_batches_b111():
    steps, state, frozen = steps_of(learning_rate=1.0, warmup_updates=4)
    rows = batch(layout="padded")
    halves = [MicroBatch(jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], rows)) for i in (0, 1)]
    rates = []
    for _ in range(4):
        state, report = steps.update(state, frozen, halves, count=2)
        rates.append(read_metrics(report)["optim/learning_rate"].result())
    np.testing.assert_allclose(rates, [0.0, 0.25, 0.5, 0.75])


@pytest.mark.parametrize("lora", [True, False])
def test_updates_raise_the_log_probs_of_what_is_rewarded(lora):
    one = batch(advantage=1.0)
    steps, state, frozen = steps_of(lora=lora)
    mine, untouched = on_host(state.trainable), on_host(base())
    score = make_score(CONFIG, lora_scale=LORA.alpha / LORA.rank)

    def mean_logp(state) -> float:
        logps = score(base(), state.trainable, one) if lora else score(state.trainable, None, one)
        return float(jnp.mean(logps, where=one.mask))

    before = mean_logp(state)
    for _ in range(40):
        state, _ = steps.update(state, frozen, [MicroBatch(one)], count=1)
    assert mean_logp(state) > before + 0.5
    equal(base(), untouched)
    equal(pairs() if lora else base(), mine)  # and the caller's leaves weren't donated with the state


def test_updates_at_learning_rate_zero_change_nothing():
    steps, state, frozen = steps_of(learning_rate=0.0)
    before = on_host(state.trainable)
    state, _ = steps.update(state, frozen, [MicroBatch(batch())], count=1)
    equal(state.trainable, before)


def test_masters_must_be_float32():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pairs())
    with pytest.raises(ValueError, match=r"must be float32 masters, got down\.a bfloat16"):
        init_state(low, make_optimizer(OptimizerConfig(), total_updates=1))


def test_an_update_of_no_micro_batches_is_an_error():
    steps, state, frozen = steps_of()
    with pytest.raises(ValueError, match="an update of 2 micro-batches got none"):
        steps.update(state, frozen, [], count=2)
