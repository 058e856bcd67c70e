"""What is asked of the models about a mini-batch before its updates, and the advantages that depend on the answers.

Owns the order: anchor, reference and values of every micro-batch, then, where the algorithm's advantage is a `TokenEstimator`, all its
episodes at once on the host; and the metrics of what comes out. Who computes the scores is the cluster, how advantages follow from them
`rl.credit`. The learner calls it once a mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burnish.observe.metrics import MetricCollector
from burnish.observe.sinks import TokenScores
from burnish.rl.algorithms import Algorithm
from burnish.rl.batch import TokenBatch, by_sequence, from_sequences, take_rows
from burnish.rl.cluster import RLCluster
from burnish.rl.credit import ScoredEpisode, TokenEstimator, TrajectoryKey, episode_keys, scored_episodes
from burnish.rl.layout import bucket
from burnish.rl.producer import Chunk
from burnish.sync.reshard import on_host
from burnish.train.step import MicroBatch
from burnish.train.value import ValueMicroBatch


class Scored(NamedTuple):
    """A micro-batch as the updates take it, and on the host. critic: None without one. [R, M] or None: reward_kl, the penalty in the
    rewards; teacher_gain, how much likelier a teacher finds an id than the policy does."""

    host: TokenBatch
    actor: MicroBatch
    critic: ValueMicroBatch | None
    reward_kl: np.ndarray | None
    teacher_gain: np.ndarray | None


def score(cluster: RLCluster, algorithm: Algorithm, chunks: Sequence[Chunk]) -> list[Scored]:
    """Everything that the updates of a mini-batch need.

    Log-probs are those of the policy that the step began with; values those of the critic now, which earlier mini-batches have taught.
    """
    asked = _ask(cluster, algorithm, chunks)
    with_critic = algorithm.value_loss is not None
    if not isinstance(algorithm.advantage, TokenEstimator):
        if with_critic:
            raise ValueError(_NO_RETURNS)
        return [_scored(found, found.chunk.batch, found.placed) for found in asked]
    credited = _credit(algorithm.advantage, asked, with_returns=with_critic)
    return [_scored(found, batch, cluster.place(batch)) for found, batch in zip(asked, credited, strict=True)]


class _Asked(NamedTuple):
    """A micro-batch on the devices, and what the models said about it, [R, M] each."""

    chunk: Chunk
    placed: TokenBatch
    old_logps: jax.Array | None
    ref_logps: jax.Array | None
    values: jax.Array | None
    values_after: jax.Array | None
    reward_kl: np.ndarray | None
    teacher_gain: np.ndarray | None


def _ask(cluster: RLCluster, algorithm: Algorithm, chunks: Sequence[Chunk]) -> list[_Asked]:
    needed, nobody = algorithm.scores_needed, [None] * len(chunks)
    host, placed = [chunk.batch for chunk in chunks], [cluster.place(chunk.batch) for chunk in chunks]
    by_policy = "old" in needed or "teacher" in needed or algorithm.reward_kl is not None
    policy = _logps(cluster, cluster.get_actor_per_token_logps, host, placed) if by_policy else nobody
    reference = _logps(cluster, cluster.get_ref_per_token_logps, host, placed) if "reference" in needed else nobody
    teacher = _logps(cluster, cluster.get_teacher_per_token_logps, host, placed) if "teacher" in needed else nobody
    asked = []
    for chunk, batch, scored, ref, taught in zip(chunks, placed, policy, reference, teacher, strict=True):
        old = jnp.asarray(batch.sampler_logps) if algorithm.old == "sampler" else scored if "old" in needed else None
        values, after = cluster.get_values(batch) if "values" in needed else (None, None)
        penalty = None
        if algorithm.reward_kl is not None and scored is not None and ref is not None:
            # Never the sampler's log-probs: a policy that is the reference would be charged for their rounding, and a group whose rewards
            # are otherwise equal divides by nothing but that.
            penalty = algorithm.reward_kl.beta * on_host(algorithm.reward_kl.estimator(scored, ref))
        gain = None if taught is None or scored is None else on_host(taught) - on_host(scored)
        asked.append(_Asked(chunk, batch, old, ref, values, after, penalty, gain))
    return asked


def _logps(
    cluster: RLCluster, score: Callable[[TokenBatch], jax.Array], host: Sequence[TokenBatch], placed: Sequence[TokenBatch]
) -> list[jax.Array]:
    """[R, M] for each micro-batch of a mini-batch: a pass for each, or for `training.compute_logps_micro_batch_size` prompts."""
    size = cluster.training_config.compute_logps_micro_batch_size
    if size is None:
        return [score(batch) for batch in placed]
    # Micro-batches that are counted in prompts hold one in a row. Rows that score nothing needn't be scored.
    rows = [(i, int(row)) for i, batch in enumerate(host) for row in np.flatnonzero(np.any(batch.mask, axis=1))]
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    num_rows = bucket(size, multiple=cluster.rows_multiple)
    answers = [score(cluster.place(take_rows(host, part, num_rows=num_rows))) for part in parts]
    out = [np.zeros(batch.mask.shape, np.float32) for batch in host]
    for part, answer in zip(parts, answers, strict=True):
        for (i, row), values in zip(part, on_host(answer), strict=False):
            out[i][row] = values[: out[i].shape[1]]
    return cluster.place([jnp.asarray(values) for values in out])


_NO_RETURNS = "a critic learns returns, and the algorithm's advantage gives none: use a TokenEstimator that does, such as gae"


def _credit(estimator: TokenEstimator, asked: Sequence[_Asked], *, with_returns: bool) -> list[TokenBatch]:
    """The host batches of a mini-batch with the advantages and returns of its episodes. with_returns: a critic needs the latter."""
    episodes: list[ScoredEpisode] = []
    present = [by_sequence(found.chunk.batch.mask, found.chunk.batch) for found in asked]
    for found, here in zip(asked, present, strict=True):
        batch = found.chunk.batch
        after = None if found.values_after is None else by_sequence(on_host(found.values_after), batch)
        episodes += scored_episodes(
            found.chunk.groups,
            here,
            values=None if found.values is None else by_sequence(on_host(found.values), batch),
            last_values=None if after is None else {i: float(values[-1]) for i, values in after.items()},
            kl=None if found.reward_kl is None else by_sequence(found.reward_kl, batch),
            teacher_gain=None if found.teacher_gain is None else by_sequence(found.teacher_gain, batch),
        )
    answers = {(e.group, e.sample): answer for e, answer in zip(episodes, estimator(episodes), strict=True)}
    credited = []
    for found, here in zip(asked, present, strict=True):
        batch, keys = found.chunk.batch, episode_keys(found.chunk.groups)
        mine = {i: answers[keys[i]] for i in here}
        changes = {"advantages": from_sequences({i: answer.advantages for i, answer in mine.items()}, batch)}
        returns = {i: answer.returns for i, answer in mine.items() if answer.returns is not None}
        if with_returns and len(returns) < len(mine):
            raise ValueError(_NO_RETURNS)
        if returns:
            changes["returns"] = from_sequences(returns, batch)
        credited.append(dataclasses.replace(batch, **changes))
    return credited


def _scored(found: _Asked, host: TokenBatch, batch: TokenBatch) -> Scored:
    critic = None if found.values is None else ValueMicroBatch(batch, found.values)
    return Scored(host, MicroBatch(batch, found.old_logps, found.ref_logps), critic, found.reward_kl, found.teacher_gain)


def token_scores(scored: Sequence[Scored], chunks: Sequence[Chunk], *, with_policy: bool) -> dict[TrajectoryKey, TokenScores]:
    """What the updates will see of each episode, for people. with_policy: the anchor's log-probs too, where it was asked for them."""
    found = {}
    for part, chunk in zip(scored, chunks, strict=True):
        keys, anchor = episode_keys(chunk.groups), part.actor.old_logps
        policy = by_sequence(on_host(anchor), part.host) if with_policy and anchor is not None else {}
        for number, advantages in by_sequence(part.host.advantages, part.host).items():
            found[keys[number]] = TokenScores(advantages, policy.get(number))
    return found


# ------------------------------------------------------------------------------------------------------------------------- metrics


def record_chunks(metrics: MetricCollector, chunks: Sequence[Chunk]) -> None:
    """What the producer counted and timed."""
    for chunk in chunks:
        for name, count in chunk.counts.items():
            metrics.sum(name, count)
    metrics.sum("time/rollout_seconds", sum(chunk.rollout_seconds for chunk in chunks))


def record_credit(metrics: MetricCollector, scored: Sequence[Scored]) -> None:
    """The advantages that the updates will see, over scored tokens, and the KL penalty in the rewards."""
    for part in scored:
        mask = np.asarray(part.host.mask)
        advantages = np.asarray(part.host.advantages)[mask]
        metrics.mean("advantage/mean", advantages)
        metrics.mean("advantage/abs_mean", np.abs(advantages))
        metrics.max("advantage/max", advantages)
        metrics.min("advantage/min", advantages)
        if part.reward_kl is not None:
            metrics.mean("reward/kl_penalty", part.reward_kl[mask])
        if part.teacher_gain is not None:
            metrics.mean("teacher/reverse_kl", -part.teacher_gain[mask])
