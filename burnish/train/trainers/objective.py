"""What is learned from a row: how it is read, which scores it needs, and the loss of a micro-batch.

Owns the record and its three kinds (supervised, pairs, labelled answers). The preference losses are `train.preference`; who scores and
updates is `trainers.policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from burnish.data.examples import Encode, SupervisedReader, labelled, pair, supervised
from burnish.data.source import RowReader
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean, Metrics, clean
from burnish.train.preference import Kto, PairLoss, answer_sums, answers


class RowsMicroBatch(NamedTuple):
    """What one forward-backward pass sees. N is the number of sequences of the whole mini-batch.

    reference: log-probs of whole answers under the reference, 0 for those in other micro-batches. point: KTO's z. key: of the step,
    for what is random in it; None where nothing is, as in an evaluation.
    """

    batch: TokenBatch
    reference: Float[Array, " N"] | None = None
    point: Float[Array, ""] | None = None
    key: UInt32[Array, " words"] | None = None


RowsLoss = Callable[[Float[Array, "R M"], RowsMicroBatch], tuple[Mean, Metrics]]
"""(log-probs of the scored tokens, micro-batch) → the loss, and what is measured on the way."""


@dataclass(frozen=True)
class Objective:
    """name: for errors and checkpoints. sequences: how many a row has. measured: the metrics of `loss` that an evaluation shows too."""

    name: str
    encode: Encode
    loss: RowsLoss
    reader: type[RowReader] = RowReader
    sequences: int = 1
    needs_reference: bool = False
    needs_point: bool = False
    measured: tuple[str, ...] = ()


def supervised_objective() -> Objective:
    """The mean negative log-likelihood of the trained tokens, over the whole mini-batch."""

    def loss(logps: Float[Array, "R M"], micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
        mask = jnp.asarray(micro.batch.mask)
        return Mean(-jnp.sum(clean(logps, mask)), jnp.sum(mask, dtype=jnp.float32)), {}

    return Objective("supervised", supervised, loss, SupervisedReader)


def preference_objective(name: str, loss: PairLoss | Kto) -> Objective:
    """Of pairs, or of labelled answers, by a loss of `train.preference`."""
    measured = ("preference/accuracy", "preference/margin")
    if isinstance(loss, Kto):
        kto = loss  # pyright forgets what `loss` is inside the function

        def of_answers(logps: Float[Array, "R M"], micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
            if micro.point is None:
                raise ValueError("KTO needs its reference point, which wasn't given")
            wanted = answer_sums(micro.batch, jnp.asarray(micro.batch.advantages)) > 0
            return kto(answers(micro.batch, logps, micro.reference), wanted, micro.point)

        return Objective(name, labelled, of_answers, needs_reference=True, needs_point=True, measured=measured[:1])
    pairs = loss

    def of_pairs(logps: Float[Array, "R M"], micro: RowsMicroBatch) -> tuple[Mean, Metrics]:
        return pairs(answers(micro.batch, logps, micro.reference))

    return Objective(name, pair, of_pairs, sequences=2, needs_reference=loss.needs_reference, measured=measured)
