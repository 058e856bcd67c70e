"""Preference losses: from log-probs of whole answers to one loss a pair, or an answer, in one table.

Owns what an answer is worth to a loss (`Score`), how the difference of two worths becomes a loss (`Link`), and the named pairs of both:
`sigmoid` (DPO, cDPO), `robust`, `ipo`, `hinge`, `simpo`, `cpo`, `orpo`; and `Kto`, which learns from answers one by one. Pure functions of
sums: of an answer's own tokens and no others, so a prompt can't enter. Doesn't own the models that give the log-probs, nor the update.

| loss | worth of an answer, s | loss of h = s(chosen) - s(rejected) | beside it |
|---|---|---|---|
| sigmoid | log π/π_ref | -log σ(β h), smoothed | |
| robust | log π/π_ref | the same without bias under flipped labels | |
| ipo | log π/π_ref | (h - 1 / 2β)² | |
| hinge | log π/π_ref | max(0, 1 - β h) | |
| simpo | (log π) / tokens | -log σ(β h - margin) | |
| cpo | log π | -log σ(β h) | chosen's -(log π) / tokens |
| orpo | log odds of exp((log π) / tokens) | -β log σ(h) | chosen's -(log π) / tokens |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from burnish.config.preference import AnyPreferenceConfig, NormalisedConfig
from burnish.pytree import pytree
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics, clean

PerAnswer = Float[Array, " N"]
_SURE = -1e-6
"""A mean log-prob above this counts as this: an answer that is certain has no finite odds, and no gradient."""


@pytree
class Answers:
    """N answers: the log-probs of each one's own tokens, summed, under the policy now and the reference; and how many tokens those are.

    An answer of 0 tokens isn't there (it lies in another micro-batch): its sums are 0 and it is in no mean.
    """

    logps: PerAnswer
    ref_logps: PerAnswer | None
    tokens: PerAnswer

    @property
    def present(self) -> Bool[Array, " N"]:
        return self.tokens > 0

    def per_token(self) -> Answers:
        """Means in place of sums: length normalisation, as if every answer had one token."""
        share = 1.0 / jnp.maximum(self.tokens, 1.0)
        ref_logps = None if self.ref_logps is None else self.ref_logps * share
        return Answers(self.logps * share, ref_logps, jnp.minimum(self.tokens, 1.0))


def answer_sums(batch: TokenBatch, values: Float[Array, "R M"]) -> PerAnswer:
    """Sums over the scored tokens of each episode of a batch, by its number; 0 for those that lie in other micro-batches."""
    summed = jnp.ravel(clean(values, jnp.asarray(batch.mask)))
    return jax.ops.segment_sum(summed, jnp.ravel(jnp.asarray(batch.sequences)), num_segments=batch.num_sequences)


def answers(batch: TokenBatch, logps: Float[Array, "R M"], ref_logps: PerAnswer | None = None) -> Answers:
    """The answers of a batch. logps: of its scored tokens. ref_logps: the reference's, summed already."""
    return Answers(answer_sums(batch, logps), ref_logps, answer_sums(batch, jnp.ones_like(logps)))


# -------------------------------------------------------------------------------------------------------- what an answer is worth

Score = Callable[[Answers], PerAnswer]


def log_ratio(x: Answers) -> PerAnswer:
    """log π(y|x) - log π_ref(y|x): the implicit reward of DPO, divided by β."""
    if x.ref_logps is None:
        raise ValueError("this loss compares with a reference, whose log-probs weren't given")
    return x.logps - jax.lax.stop_gradient(x.ref_logps)


def log_prob(x: Answers) -> PerAnswer:
    """log π(y|x)."""
    return x.logps


def mean_log_prob(x: Answers) -> PerAnswer:
    """log π(y|x) / |y|."""
    return x.per_token().logps


def log_odds(x: Answers) -> PerAnswer:
    """log p / (1 - p) of p = exp(log π(y|x) / |y|)."""
    mean = jnp.minimum(mean_log_prob(x), _SURE)
    return mean - jnp.log(-jnp.expm1(mean))


# ----------------------------------------------------------------------------------------- what a difference of two worths costs

Link = Callable[[PerAnswer], PerAnswer]


def logistic(h: PerAnswer, /, *, beta: float, margin: float = 0.0, label_smoothing: float = 0.0) -> PerAnswer:
    """-(1 - ε) log σ(β h - margin) - ε log σ(-(β h - margin)): cross-entropy where a label is wrong with probability ε."""
    x = beta * h - margin
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(x) - label_smoothing * jax.nn.log_sigmoid(-x)


def unbiased_logistic(h: PerAnswer, /, *, beta: float, label_smoothing: float) -> PerAnswer:
    """(-(1 - ε) log σ(β h) + ε log σ(-β h)) / (1 - 2ε): its mean over flipped labels is -log σ(β h) of the right ones."""
    right, wrong = jax.nn.log_sigmoid(beta * h), jax.nn.log_sigmoid(-beta * h)
    return (label_smoothing * wrong - (1 - label_smoothing) * right) / (1 - 2 * label_smoothing)


def squared(h: PerAnswer, /, *, beta: float) -> PerAnswer:
    """(h - 1 / 2β)²: a target for the difference, where the logistic has none."""
    return jnp.square(h - 1 / (2 * beta))


def hinged(h: PerAnswer, /, *, beta: float) -> PerAnswer:
    """max(0, 1 - β h): no gradient once the difference is 1 / β."""
    return jnp.maximum(0.0, 1 - beta * h)


def scaled_logistic(h: PerAnswer, /, *, beta: float) -> PerAnswer:
    """-β log σ(h)."""
    return -beta * jax.nn.log_sigmoid(h)


# ------------------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class PairLoss:
    """A loss of (chosen, rejected): `link` of the difference of their `score`, plus `nll` times the chosen's mean negative log-prob.

    Your own is such a record. needs_reference: whether `score` reads the reference's log-probs.
    """

    score: Score
    link: Link
    nll: float = 0.0
    needs_reference: bool = True

    def __call__(self, both: Answers, /) -> tuple[Mean, Metrics]:
        """The mean over the pairs of `both`, whose answers alternate: chosen, rejected; and what is measured on the way."""
        chosen, rejected = (jax.tree.map(lambda x, i=i: x[i::2], both) for i in (0, 1))
        there = chosen.present & rejected.present
        worth, other = self.score(chosen), self.score(rejected)
        losses = self.link(worth - other) - self.nll * mean_log_prob(chosen)
        metrics: Metrics = {
            "preference/accuracy": _mean((worth > other).astype(worth.dtype), there),
            "preference/margin": _mean(worth - other, there),
            "preference/chosen": _mean(worth, there),
            "preference/rejected": _mean(other, there),
        }
        return _mean(losses, there), jax.lax.stop_gradient(metrics)

    def length_normalised(self) -> PairLoss:
        """The same loss of means over tokens (in Tülu 3, arXiv:2411.15124, for DPO): differences, and with them β, are per token."""
        return dataclasses.replace(self, score=lambda x: self.score(x.per_token()))


def sigmoid(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """DPO: -log σ(β h), h the difference of log π/π_ref (Rafailov et al., 2023, arXiv:2305.18290).

    label_smoothing: the probability ε that a label is wrong; then it is cDPO (Mitchell, 2023, "A note on DPO with noisy preferences").
    """
    return PairLoss(log_ratio, partial(logistic, beta=beta, label_smoothing=label_smoothing))


def robust(*, beta: float = 0.1, label_smoothing: float = 0.1) -> PairLoss:
    """DPO without bias where labels are flipped with probability ε < 1/2 (Ray Chowdhury et al., 2024, arXiv:2403.00409)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"robust needs label_smoothing in [0, 0.5), the probability of a wrong label; got {label_smoothing}")
    return PairLoss(log_ratio, partial(unbiased_logistic, beta=beta, label_smoothing=label_smoothing))


def ipo(*, beta: float = 0.1) -> PairLoss:
    """(h - 1 / 2β)²: the difference is held at a finite value, however sure the labels are (Azar et al., 2023, arXiv:2310.12036).

    β is the paper's τ. Some implementations divide h by the answers' lengths: `length_normalised`.
    """
    return PairLoss(log_ratio, partial(squared, beta=beta))


def hinge(*, beta: float = 0.1) -> PairLoss:
    """max(0, 1 - β h): the calibration loss of SLiC (Zhao et al., 2023, arXiv:2305.10425), with log-ratios as RSO has it (2309.06657).

    Differs from the paper: SLiC compares log-probs, without a reference, and adds the chosen's cross-entropy.
    """
    return PairLoss(log_ratio, partial(hinged, beta=beta))


def simpo(*, beta: float = 2.0, margin: float = 1.0, label_smoothing: float = 0.0) -> PairLoss:
    """-log σ(β h - γ), h the difference of mean log-probs, without a reference (Meng et al., 2024, arXiv:2405.14734). margin: γ."""
    link = partial(logistic, beta=beta, margin=margin, label_smoothing=label_smoothing)
    return PairLoss(mean_log_prob, link, needs_reference=False)


def cpo(*, beta: float = 0.1, nll: float = 1.0, label_smoothing: float = 0.0) -> PairLoss:
    """-log σ(β h), h the difference of log-probs, plus the chosen's negative log-likelihood (Xu et al., 2024, arXiv:2401.08417).

    Differs from the paper: the likelihood is per token, so that `nll` weighs the same whatever the answers' lengths.
    """
    return PairLoss(log_prob, partial(logistic, beta=beta, label_smoothing=label_smoothing), nll=nll, needs_reference=False)


def orpo(*, beta: float = 0.1, nll: float = 1.0) -> PairLoss:
    """The chosen's negative log-likelihood a token, plus -β log σ of the log odds ratio (Hong et al., 2024, arXiv:2403.07691). β: λ."""
    return PairLoss(log_odds, partial(scaled_logistic, beta=beta), nll=nll, needs_reference=False)


# ----------------------------------------------------------------------------------------------------- answers one by one


@dataclass(frozen=True)
class Kto:
    """KTO: 1 - σ(β (r - z)) of a desirable answer, 1 - σ(β (z - r)) of an undesirable one, each weighted; r = log π/π_ref.

    z, the reference point, is what an answer that has nothing to do with its prompt is worth, never below 0: see `reference_point`.
    Source: Ethayarajh et al., 2024, arXiv:2402.01306. Differs from the paper: z is of the whole mini-batch, before its update, where the
    paper's is of each micro-batch: how a mini-batch is cut must not change the update.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, x: Answers, desirable: Bool[Array, " N"], point: Float[Array, ""], /) -> tuple[Mean, Metrics]:
        """The mean over the answers that are there, and what is measured on the way."""
        worth, there = log_ratio(x), x.present
        z = jnp.broadcast_to(jax.lax.stop_gradient(point), worth.shape)
        sign = jnp.where(desirable, 1.0, -1.0)
        weight = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = weight * (1 - jax.nn.sigmoid(self.beta * sign * (worth - z)))
        metrics: Metrics = {
            "preference/accuracy": _mean((sign * (worth - z) > 0).astype(worth.dtype), there),
            "preference/chosen": _mean(worth, there & desirable),
            "preference/rejected": _mean(worth, there & ~desirable),
            "preference/reference_point": _mean(z, there),
        }
        return _mean(losses, there), jax.lax.stop_gradient(metrics)


def reference_point(mismatched: Answers) -> Mean:
    """Sums of log π/π_ref over answers that stand behind other answers' prompts; add up micro-batches, then max(0, value) is KTO's z."""
    return _mean(log_ratio(mismatched), mismatched.present)


TABLE: dict[str, Callable[..., PairLoss | Kto]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
    "kto": Kto,
}
"""By the name in a configuration; their options are the fields there."""


def from_config(config: AnyPreferenceConfig) -> PairLoss | Kto:
    """The loss that a configuration's section describes."""
    loss = TABLE[config.name](**config.model_dump(exclude={"name", "length_normalised"}))
    normalised = isinstance(config, NormalisedConfig) and config.length_normalised
    return loss.length_normalised() if normalised and isinstance(loss, PairLoss) else loss


def _mean(values: PerAnswer, there: Bool[Array, " N"]) -> Mean:
    return Mean(jnp.sum(jnp.where(there, values, 0.0)), jnp.sum(there, dtype=values.dtype))
