"""Whether an update takes its micro-batches one by one, as their episodes are complete, or begins when all of them are.

Owns that rule, for the producer, which hands them on, the learner, which takes them, and the forecast, which draws it. No option: it
follows from where the roles live, the algorithm and the sizes, and it changes no number, only when things happen.
"""

from __future__ import annotations

from burnish.rl.algorithms import Algorithm
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.credit import TokenEstimator


def streams(algorithm: Algorithm, plan: BatchPlan, *, apart: bool, num_processes: int = 1) -> bool:
    """Whether gradients of the first groups of an update are taken while its last are sampled.

    apart: engine and actor have no device in common; else their programs would take turns, and sampling would last longer by what
    training takes. It must be known beforehand how many micro-batches there are, and no number may depend on more than one of them:
    advantages of the whole mini-batch, scoring passes over several micro-batches and groups that are replaced wait for all of it;
    processes agree on whole mini-batches.
    """
    alone = algorithm.advantage_scope == "group" and not isinstance(algorithm.advantage, TokenEstimator)
    return (
        apart
        and num_processes == 1
        and plan.train_micro is not None
        and plan.train_micro < plan.mini_batch
        and plan.train_micro % (plan.logps_micro or plan.train_micro) == 0
        and alone
        and algorithm.zero_signal != "resample"
    )


__all__ = ["streams"]
