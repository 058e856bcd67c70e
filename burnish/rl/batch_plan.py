"""How the sizes of a step fit together: what divides what, and what follows.

Owns the arithmetic of `training.*` sizes, all in prompts, counted before each is repeated `num_generations` times. No jax. The learner
reads every count from here; `print(plan.table())` shows them all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable

from burnish.config.errors import UserError
from burnish.config.schema import RolloutConfig, TrainingConfig


@runtime_checkable
class Repeats(Protocol):
    """What an algorithm, as a configuration or as a record, says about counts."""

    @property
    def num_generations(self) -> int: ...

    @property
    def num_iterations(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes in prompts, as they hold after defaults; one completion a generation, so rows are prompts × num_generations.

    batch: drawn for a step. mini_batch: for an update. train_micro: for a forward-backward pass, a matter of memory only; None where
    `tokens_per_device` bounds the tokens of a pass instead, so that how many passes an update takes depends on lengths. logps_micro:
    for a pass that scores log-probs, None likewise. rollout: handed to the engine together; under continuous batching that bounds how
    much waits, while how many sequences decode at once is `rollout.slots`.
    """

    batch: int
    mini_batch: int
    train_micro: int | None
    tokens_per_device: int | None
    rollout: int
    logps_micro: int | None
    num_generations: int
    num_iterations: int
    max_staleness: int = 0

    @classmethod
    def from_config(cls, training: TrainingConfig, algorithm: Repeats, rollout: RolloutConfig) -> BatchPlan:
        """Fill in defaults and check what must divide what. Raises `UserError` that names both numbers and a size that would do."""
        batch, tokens = training.batch_size, training.tokens_per_device
        mini_batch = training.mini_batch_size or batch
        train_micro = None if tokens is not None else training.train_micro_batch_size or mini_batch
        plan = cls(
            batch=batch,
            mini_batch=mini_batch,
            train_micro=train_micro,
            tokens_per_device=tokens,
            rollout=training.rollout_micro_batch_size or batch,
            logps_micro=training.compute_logps_micro_batch_size or train_micro,
            num_generations=algorithm.num_generations,
            num_iterations=algorithm.num_iterations,
            max_staleness=rollout.max_staleness,
        )
        _check_divides("mini_batch_size", plan.mini_batch, "batch_size", plan.batch)
        if plan.train_micro is not None:
            _check_divides("train_micro_batch_size", plan.train_micro, "mini_batch_size", plan.mini_batch)
        _check_divides("rollout_micro_batch_size", plan.rollout, "batch_size", plan.batch)
        if plan.logps_micro is not None:
            _check_divides("compute_logps_micro_batch_size", plan.logps_micro, "mini_batch_size", plan.mini_batch)
        if tokens is not None:
            _check_context(tokens, rollout)
        if rollout.weights == "lent" and plan.max_staleness:
            raise UserError(
                f"rollout.weights is lent and rollout.max_staleness is {plan.max_staleness}: an update takes the weights back while later "
                "steps' episodes need them. Use rollout.weights copy, or max_staleness 0"
            )
        if rollout.weights == "lent" and plan.num_mini_batches > 1:
            raise UserError(
                f"rollout.weights is lent and a step has {plan.num_mini_batches} mini-batches: an update takes the weights back "
                f"while episodes of the next mini-batch need them. Use rollout.weights copy, or training.mini_batch_size {plan.batch}"
            )
        return plan

    @property
    def num_mini_batches(self) -> int:
        return self.batch // self.mini_batch

    @property
    def updates_per_step(self) -> int:
        return self.num_mini_batches * self.num_iterations

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches whose gradients are summed for one update; None where that depends on lengths."""
        return None if self.train_micro is None else self.mini_batch // self.train_micro

    @property
    def service(self) -> int:
        """Prompts that are sampled and scored before any goes on: the least common multiple of the two sizes, so both come out even."""
        return math.lcm(self.rollout, self.logps_micro or self.mini_batch)

    @property
    def queue_size(self) -> int:
        """Places between producer and trainer: an update's chunks, each once an iteration, and one kept for the end of the stream; for
        each version that sampling may be behind, a step's chunks more.

        With `tokens_per_device` as if each prompt were a micro-batch: where there are more, the producer waits for the trainer.
        """
        update = (self.accumulation_steps or self.mini_batch) * self.num_iterations
        return update * (1 + self.max_staleness * self.num_mini_batches) + 1

    def table(self) -> str:
        """The plan as text, a size a line: prompts, rows, what it is."""
        sizes = [
            ("batch_size", self.batch, f"a step: {self.num_mini_batches} mini-batches, {self.updates_per_step} updates"),
            ("mini_batch_size", self.mini_batch, f"an update: {self.accumulation_steps or 'some'} micro-batches accumulated"),
            ("train_micro_batch_size", self.train_micro, "a forward-backward pass"),
            ("rollout_micro_batch_size", self.rollout, "handed to the engine together; it decodes rollout.slots at once"),
            ("compute_logps_micro_batch_size", self.logps_micro, "a scoring pass: log-probs of old policy and reference"),
            ("(service batch)", self.service, "sampled and scored before any goes on"),
        ]
        lines = [f"{'training.':<31}{'prompts':>8}{'rows':>8}"]
        lines += [f"{name:<31}{size:>8}{size * self.num_generations:>8}  {meaning}" for name, size, meaning in sizes if size is not None]
        if self.tokens_per_device is not None:
            cut = f"{self.tokens_per_device} tokens on each device: a forward-backward pass, as many an update as its lengths need"
            lines.append(f"{'tokens_per_device':<47}  {cut}")
        lines.append(f"{self.num_generations} generations a prompt, {self.num_iterations} iterations, a queue of {self.queue_size}")
        lines.append(
            "Under continuous batching a size says what is waited for, not what runs together: rollout.slots episodes decode at once, the "
            "next begins as one ends, and groups go on in drawn order as they are complete."
        )
        return "\n".join(lines)


def _check_context(tokens: int, rollout: RolloutConfig) -> None:
    """A row can't be cut inside an episode."""
    longest = rollout.longest_sequence
    if longest > tokens:
        raise UserError(
            f"training.tokens_per_device is {tokens}, but an episode may have {longest} tokens (rollout.max_episode_tokens, or "
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.sampling.max_tokens {rollout.sampling.max_tokens}) and lies "
            f"on one device: use tokens_per_device {longest} or more, or lower those limits"
        )


def _check_divides(name: str, size: int, whole_name: str, whole: int) -> None:
    if whole % size:
        fitting = max(d for d in range(1, min(size, whole) + 1) if whole % d == 0)
        larger = -(-whole // size) * size
        raise UserError(
            f"training.{name} is {size} and must divide training.{whole_name}, which is {whole}: use {name} {fitting}, or {whole_name} "
            f"{larger}"
        )
