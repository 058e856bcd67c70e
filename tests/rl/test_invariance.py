"""Locks that how a mini-batch was laid out can't change an update: every loss with every mean, cut and padded in every way, in float64.

A micro-batch is some rows of a batch, with the counts of whole episodes and groups. Cuts, widths and what stands at padding must leave
the accumulated value and gradient as they are, to 1e-9. Groups lie across cuts, rows hold several episodes, one row holds none.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from burnish.rl.aggregate import fixed_length_mean, prompt_mean, sequence_mean, token_mean
from burnish.rl.batch import Scores, TokenBatch
from burnish.rl.kl import k1, k2, k3, with_kl
from burnish.rl.losses import Mean, cispo, clipped, clipped_value, dppo, gmpo, gspo, reinforce, sapo, with_entropy_bonus
from burnish.rl.off_policy import rejecting, weighted

from .batches import scored

MEANS = {
    "token": token_mean,
    "sequence": sequence_mean,
    "fixed": functools.partial(fixed_length_mean, length=10),
    "prompt": prompt_mean,
}


def rejecting_first(loss, **options):
    """As the training step does it: the batch of the loss is also that of the mean."""

    def rejected(scores, batch):
        kept, _ = rejecting(scores, batch, **options)
        return loss(scores, kept)[0], kept

    return rejected


def value_loss(scores, batch):
    return clipped_value(scores.logps, scores.old_logps, batch, clip=0.2)


LOSSES = {
    "clipped": clipped,
    "dual_clip": functools.partial(clipped, epsilon_high=0.28, dual_clip=1.3),
    "gspo": functools.partial(gspo, epsilon=0.1, epsilon_high=0.1),
    "gspo_token": functools.partial(gspo, level="token", epsilon=0.1, epsilon_high=0.1),
    "cispo": functools.partial(cispo, epsilon=0.2, epsilon_high=0.2),
    "sapo": sapo,
    "dppo_tv": functools.partial(dppo, threshold=0.05),
    "dppo_kl": functools.partial(dppo, divergence="kl", threshold=0.02),
    "gmpo": functools.partial(gmpo, log_clip=0.2),
    "reinforce": reinforce,
    "clipped+k1": with_kl(clipped, beta=0.1, estimator=k1),
    "clipped+k2": with_kl(clipped, beta=0.1, estimator=k2),
    "clipped+k3": with_kl(clipped, beta=0.1, estimator=k3),
    "clipped+entropy": with_entropy_bonus(clipped, coefficient=0.1),
    "weighted": weighted(clipped, cap=1.2),
    "weighted_sequence": weighted(reinforce, level="sequence", mode="mask"),
    "weighted_geometric": weighted(gspo, level="geometric", cap=1.05),
    "value": value_loss,
}
REJECTING = {
    "token": rejecting_first(clipped, level="token", low=0.8, high=1.25),
    "sequence": rejecting_first(clipped, level="sequence", low=0.6, high=1.6),
    "geometric": rejecting_first(gspo, level="geometric", low=0.9, high=1.1),
}

WIDTH = 6
EPISODES = [[4, 2], [1], [3, 3], [], [6], [2, 1, 2], [5], [2]]
"""Lengths of the episodes in each row, in order; then padding."""
GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
"""Group of each episode: the first fills rows 0 and 1, the second lies in rows 2, 4 and 5, the third in 5, 6 and 7."""
CUTS = {
    "1x8": [(0, 8)],
    "2x4": [(0, 4), (4, 8)],
    "8x1": [(i, i + 1) for i in range(8)],
    "ragged": [(0, 1), (1, 5), (5, 6), (6, 7), (7, 8)],
}
"""First and last row of each micro-batch."""
RUNS = [
    ("1x8", {8: WIDTH}),
    ("1x8", {8: 9}),
    ("1x8", {8: 16}),
    ("2x4", {4: 9}),
    ("8x1", {1: 16}),
    ("ragged", {4: 9, 1: 16}),
]
"""Cuts, and the padded width of their micro-batches by rows. Five shapes, as each costs 5 s of compilation."""


def pieces(size: int) -> list[tuple[int, int]]:
    return sorted({piece for cut in CUTS.values() for piece in cut if piece[1] - piece[0] == size})


@functools.cache
def case(width: int, filling: float) -> tuple[TokenBatch, Scores]:
    """The batch and its scores, on the host, in float64; only padding depends on the arguments."""
    rng = np.random.default_rng(0)
    mask, sequences, prompts = (np.zeros((8, width), dtype) for dtype in (bool, np.int32, np.int32))
    number = 0
    for row, lengths in enumerate(EPISODES):
        at = 0
        for length in lengths:
            here = (row, slice(at, at + length))
            mask[here], sequences[here], prompts[here] = True, number, GROUPS[number]
            at, number = at + length, number + 1

    def floats(low: float, high: float) -> np.ndarray:
        drawn = np.pad(rng.uniform(low, high, (8, WIDTH)), ((0, 0), (0, width - WIDTH)))
        return np.where(mask, drawn, filling)

    old = floats(-2.0, -0.5)
    floated = {"advantages": floats(-2, 2), "returns": floats(-2, 0), "sampler_logps": old + floats(-0.5, 0.5)}
    batch = dataclasses.replace(scored(mask, sequences=sequences, prompts=prompts), **floated)
    scores = Scores(logps=old + floats(-0.4, 0.4), old_logps=old, ref_logps=old + floats(-0.4, 0.4), entropy=floats(0.1, 2))
    return batch, scores


@jax.jit
def averaged(values, batch: TokenBatch) -> dict:
    """Per mean: the gradient of its total by the values, and total and weight. One program for all losses."""

    def total(x, mean):
        whole = mean(x, batch)
        return whole.total, whole

    return {name: jax.grad(functools.partial(total, mean=mean), has_aux=True)(values) for name, mean in MEANS.items()}


def measure(loss, size: int, width: int, filling: float) -> dict[tuple[int, int], dict[str, tuple[np.ndarray, Mean]]]:
    """Of each micro-batch of a size, per mean: the gradient of its total by the log-probs, and total and weight."""

    def of_one(part: TokenBatch, scores: Scores) -> dict:
        def per_token(logps):
            values, second = loss(dataclasses.replace(scores, logps=logps), part)
            return values, second if isinstance(second, TokenBatch) else part

        values, pull, kept = jax.vjp(per_token, scores.logps, has_aux=True)
        return {name: (pull(slope)[0], whole) for name, (slope, whole) in averaged(values, kept).items()}

    rows = [jax.tree.map(lambda x, piece=piece: x[slice(*piece)], case(width, filling)) for piece in pieces(size)]
    found = jax.device_get(jax.vmap(of_one)(*jax.tree.map(lambda *x: np.stack(x), *rows)))
    return {piece: jax.tree.map(lambda x, i=i: x[i], found) for i, piece in enumerate(pieces(size))}


def accumulated(parts: list[dict[str, tuple[np.ndarray, Mean]]]) -> dict[str, tuple[np.ndarray, float]]:
    """Per mean the gradient and the value: summed over micro-batches and divided once."""
    found = {}
    for name in MEANS:
        slopes, means = zip(*(part[name] for part in parts), strict=True)
        total, weight = (sum(getattr(mean, field) for mean in means) for field in ("total", "weight"))
        found[name] = np.concatenate([slope[:, :WIDTH] for slope in slopes]) / weight, total / weight
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loss", (LOSSES | REJECTING).values(), ids=LOSSES | REJECTING)
def test_every_cut_width_and_padding_gives_one_gradient_and_value_B023_B031_R61(loss):
    with jax.enable_x64(True):
        expected = accumulated([measure(loss, 8, WIDTH, 0.0)[0, 8]])
        shapes = {shape for _, widths in RUNS for shape in widths.items()}
        measured = {shape: measure(loss, *shape, np.nan) for shape in shapes}
    mask = case(WIDTH, 0.0)[0].mask
    for name, (slope, _) in expected.items():
        assert slope.dtype == np.float64 and np.abs(slope).max() > 1e-3 and (slope[~mask] == 0).all(), name
    beyond = [slope[:, WIDTH:] for found in measured.values() for part in found.values() for slope, _ in part.values()]
    assert all((slope == 0).all() for slope in beyond)
    for cut, widths in RUNS:
        parts = [measured[end - start, widths[end - start]][start, end] for start, end in CUTS[cut]]
        for name, (slope, value) in accumulated(parts).items():
            where = f"{name} mean, cut {cut}, widths {widths}"
            np.testing.assert_allclose(slope, expected[name][0], atol=1e-9, rtol=0, err_msg=where)
            assert value == pytest.approx(expected[name][1], abs=1e-9), where
