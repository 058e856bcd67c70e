"""The loop of supervised and preference training: draw rows, update, report, evaluate, save.

Owns the loop and its end in every case. What is learned from a row is an `Objective`, the model a `TrainedPolicy`, the order of rows an
`ExampleStream`'s. A step is one update. Everything runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burnish.checkpoint import store
from burnish.checkpoint.saver import METRICS, Saver
from burnish.checkpoint.store import FACTS
from burnish.config.errors import UserError
from burnish.config.schema import RunSection
from burnish.config.tuning import RowsTrainingConfig
from burnish.data.example_stream import Encoder, ExampleStream, training_examples
from burnish.data.examples import Example, fit, mismatched
from burnish.data.source import Source, from_rows
from burnish.observe.metrics import MetricCollector
from burnish.observe.sinks import AFTER, BEFORE, EvalReport, Sink, Sinks, StepReport, json_numbers
from burnish.observe.trace import span
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import Mean
from burnish.text.codec import Codec
from burnish.train.compiles import keep_compiled, programs_compiled
from burnish.train.optim import make_optimizer
from burnish.train.preference import PerAnswer, answers, reference_point
from burnish.train.trainers.batches import micro_batches
from burnish.train.trainers.objective import Objective, RowsMicroBatch
from burnish.train.trainers.policy import TrainedPolicy

log = logging.getLogger(__name__)

EVALUATED = {
    "policy/loss": "eval/loss",
    "preference/accuracy": "eval/accuracy",
    "preference/margin": "eval/margin",
    "distillation/divergence": "eval/divergence",
    "distillation/nll": "eval/nll",
    "distillation/features": "eval/features",
    "distillation/attention": "eval/attention",
}
"""Names of an evaluation's metrics, by the names of those in training."""
COUNT = "eval/count"
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass
class RowsResult:
    """What a run did: the last step it made, metrics of each that this process made, evaluations by step. stopped: before its end."""

    steps: int = 0
    history: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    stopped: bool = False


class Trainer:
    """Trains a policy by an objective.

    policy: called once the data were checked, as it loads weights. train_ds, eval_ds: an `ExampleStream` and examples, or rows, which are
    encoded by `codec`; evaluation reads its rows to their end. sinks: who hears of steps and evaluations.
    """

    def __init__(
        self,
        policy: Callable[[], TrainedPolicy],
        objective: Objective,
        *,
        codec: Codec,
        train_ds: ExampleStream | Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        training: RowsTrainingConfig = RowsTrainingConfig(),
        neftune_alpha: float | None = None,
        balance: float | None = None,
        precompute_reference: bool = False,
        run: RunSection = RunSection(),
        sinks: Sequence[Sink] = (),
    ) -> None:
        keep_compiled()
        self._objective, self._training, self._run = objective, training, run
        encoder = Encoder(objective.encode, codec, training.max_tokens, training.overlong)
        self._stream = (
            train_ds
            if isinstance(train_ds, ExampleStream)
            else training_examples([_source(train_ds, "train", objective)], encoder, seed=run.seed, batch_size=training.batch_size)
        )
        self._held_out = [] if eval_ds is None else _examples(eval_ds, encoder, objective)
        self.max_steps = check_rows(objective, training, self._stream, self._held_out, precompute_reference=precompute_reference)
        self._tokens = training.tokens_per_device or training.max_tokens * objective.sequences
        self.policy = policy()
        self.policy.prepare(objective, total_updates=self.max_steps, neftune_alpha=neftune_alpha, balance=balance)
        self._frozen = self.policy.frozen_digest(has_reference=objective.needs_reference)
        self._references: dict[str, np.ndarray] | None = None
        if precompute_reference:
            self._precompute()
        self._sinks, self._metrics = Sinks(sinks), MetricCollector()
        self._result, self._cursor = RowsResult(), self._stream.cursor()
        self._programs, self._stopping, self._closed = programs_compiled(), False, False

    # ---------------------------------------------------------------------------------------------------------------- the loop

    def train(self, *, on_step: Callable[[int], None] | None = None, saver: Saver | None = None) -> RowsResult:
        """Run to `training.max_steps`, to the end of the data, or until `stop`. saver: commits what it is due, and the last step.

        `on_step(step)` is called after each step. Closes the trainer, whatever the end is.
        """
        self._refuse_closed()
        training, result = self._training, self._result
        evaluates = training.compare or training.eval_every is not None
        if saver is not None:
            saver.check_metrics(self._evaluated if evaluates else ())
        try:
            if training.compare and result.steps == 0:
                self._evaluate(BEFORE)
            with span("run", steps=self.max_steps, after=result.steps):
                while result.steps < self.max_steps and not self._stopping and self._step():
                    if training.eval_every is not None and result.steps % training.eval_every == 0:
                        self._evaluate(f"step {result.steps}")
                    if saver is not None and saver.is_due(result.steps):
                        self._save(saver)
                    if on_step is not None:
                        on_step(result.steps)
            result.stopped = self._stopping
            if saver is not None and result.steps > saver.newest_step:
                self._save(saver)
            if training.compare and not self._stopping:
                self._evaluate(AFTER)
            if saver is not None:
                saver.finish()
            return result
        finally:
            self.close()

    def stop(self) -> None:
        """Ask the run to end after the step at hand, with it saved. Any thread, and a signal's handler, may call it."""
        self._stopping = True

    def _step(self) -> bool:
        """One update. False where the data have ended."""
        start, step = time.monotonic(), self._result.steps + 1
        with span("step", step=step - 1):
            with self._timed("prepare"):
                with span("data", rows=self._training.batch_size):
                    examples = self._stream.take(self._training.batch_size)
                if not examples:
                    return False
                batches = self._micro_batches(examples, step)
            with self._timed("update"):
                self._metrics.merge(self.policy.update(batches, count=len(batches), step=step))
            self._result.steps, self._cursor = step, self._stream.cursor()
            self._report(examples, time.monotonic() - start)
        return True

    def _report(self, examples: Sequence[Example], seconds: float) -> None:
        tokens = sum(example.num_tokens for example in examples)
        self._metrics.mean("length/row_mean", [example.num_tokens for example in examples])
        self._metrics.last("perf/step_seconds", seconds)
        self._metrics.last("perf/row_tokens_per_second", tokens / max(seconds, 1e-9))
        self._metrics.max("memory/host_peak_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / 2**20)
        metrics = self._metrics.take()
        metrics["perf/compiles"], self._programs = float(programs_compiled() - self._programs), programs_compiled()
        self._result.history.append(metrics)
        self._sinks.step(StepReport(self._result.steps, self.max_steps, metrics))

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        with span(phase, step=self._result.steps) as timed:
            yield
        self._metrics.sum(f"time/{phase}_seconds", timed.seconds)

    # ----------------------------------------------------------------------------------------------------------- micro-batches

    def _micro_batches(self, examples: Sequence[Example], step: int | None = None) -> list[RowsMicroBatch]:
        """A mini-batch with all that its loss needs. step: of an update, for its noise; None in an evaluation, which has none."""
        batches = self._placed(examples)
        references = self._reference_sums(examples, batches) if self._objective.needs_reference else [None] * len(batches)
        point = self._point(examples) if self._objective.needs_point else None
        key = None if step is None else jax.random.key_data(jax.random.fold_in(jax.random.key(self._run.seed), step))
        return [RowsMicroBatch(batch, ref, point, key) for batch, ref in zip(batches, references, strict=True)]

    def _placed(self, examples: Sequence[Example], *, tokens: int | None = None) -> list[TokenBatch]:
        batches = micro_batches(
            examples,
            tokens_per_device=tokens or self._tokens,
            rows_multiple=self.policy.rows_multiple,
            pairs_per_token=self.policy.model.config.pairs_per_token,
            size=self._training.batch_size,
        )
        return [self.policy.place(batch) for batch in batches]

    def _reference_sums(self, examples: Sequence[Example], batches: Sequence[TokenBatch]) -> list[PerAnswer]:
        if self._references is None:
            return [self.policy.reference_sums(batch) for batch in batches]
        known = np.zeros(batches[0].num_sequences, np.float32)
        found = np.concatenate([self._references[example.id] for example in examples])
        known[: len(found)] = found
        return [jnp.asarray(known)] * len(batches)

    def _precompute(self) -> None:
        """The reference's log-probs of every row, in the order of the data: a run that goes on computes the same numbers again."""
        self._references, size = {}, self._training.batch_size
        with span("precompute"):
            rows = [*self._stream.examples(), *self._held_out]
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                sums = sum(np.asarray(self.policy.reference_sums(batch)) for batch in self._placed(part))
                each = self._objective.sequences
                self._references |= {e.id: np.asarray(sums)[i * each : (i + 1) * each] for i, e in enumerate(part)}
        if not self._objective.needs_point:
            self.policy.forget_reference()

    def _point(self, examples: Sequence[Example]) -> jax.Array:
        """KTO's reference point: of the policy as it is before the update."""
        swapped = [fit(example, max_tokens=self._training.max_tokens, overlong="cut") for example in mismatched(examples)]
        total = Mean(jnp.zeros(()), jnp.zeros(()))
        # A row alone would meet its own answer.
        for batch in self._placed([e for e in swapped if e is not None]) if len(examples) > 1 else []:
            x = answers(batch, jnp.zeros(batch.mask.shape))
            total += reference_point(dataclasses.replace(x, logps=self.policy.sums(batch), ref_logps=self.policy.reference_sums(batch)))
        return jnp.maximum(total.value(), 0.0)

    # -------------------------------------------------------------------------------------------------------------- evaluation

    @property
    def _evaluated(self) -> set[str]:
        return {EVALUATED[name] for name in ("policy/loss", *self._objective.measured)} | {COUNT}

    def evaluate(self) -> dict[str, float]:
        """The loss over all held-out rows, and what else the objective measures. Trains on nothing, changes nothing."""
        self._refuse_closed()
        if not self._held_out:
            raise UserError("there are no held-out rows to evaluate: give eval_ds (data.eval)")
        sums: dict[str, Any] = {}
        size = self._training.batch_size
        with span("held out", rows=len(self._held_out)):
            for start in range(0, len(self._held_out), size):
                for micro in self._micro_batches(self._held_out[start : start + size]):
                    loss, measured = self.policy.measure(micro)
                    parts = {"policy/loss": loss} | {name: measured[name] for name in self._objective.measured}
                    sums = {name: mean if name not in sums else sums[name] + mean for name, mean in parts.items()}
        found = {EVALUATED[name]: float(mean.value()) for name, mean in sums.items()}
        return found | {COUNT: float(len(self._held_out))}

    def _evaluate(self, label: str) -> None:
        with self._timed("evaluate"):
            found = self.evaluate()
        self._result.evaluations[self._result.steps] = found
        self._sinks.evaluation(EvalReport(self._result.steps, label, found))

    # ----------------------------------------------------------------------------------------------------- save, and go on later

    def resume(self, checkpoints: Path, step: int | None = None) -> int:
        """Go on from a checkpoint as if the run had never stopped; call it before `train`. Returns the step, 0 where there is none yet.

        step: which; None takes the newest that is intact. Raises CheckpointError, with every difference, for that of another run.
        """
        self._refuse_closed()
        found = store.newest_intact(checkpoints) if step is None else step
        if found is None:
            return 0
        extra: dict[str, Any] = {}

        def read(like: Any) -> Any:
            nonlocal extra
            states, extra = store.read(checkpoints, found, like, facts=self._facts())
            return states

        self.policy.restore(read)
        self._result = RowsResult(found, evaluations={int(at): values for at, values in extra["evaluations"].items()})
        self._cursor = extra["data"]
        self._stream.restore(self._cursor)
        store.set_aside_after(checkpoints, found)
        return found

    def _save(self, saver: Saver) -> None:
        result = self._result
        measured = {**(result.history[-1] if result.history else {}), **result.evaluations.get(result.steps, {})}
        evaluations = {str(at): json_numbers(values) for at, values in result.evaluations.items()}
        blob = {FACTS: self._facts(), "data": self._cursor, "evaluations": evaluations, METRICS: json_numbers(measured)}
        with self._timed("save"):
            saver.save(result.steps, self.policy.states, blob)
        self._metrics.merge(saver.take_metrics())

    def _facts(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that stopped, beyond the shapes of its arrays."""
        return {
            "objective": self._objective.name,
            "run.seed": self._run.seed,
            "training.batch_size": self._training.batch_size,
            "precision": self.policy.precision,
            "adapter's scale": self.policy.scale,
            "digest of the frozen weights": self._frozen,
        }

    # ------------------------------------------------------------------------------------------------------------------ the end

    def export(self, folder: Path) -> Path:
        """Write what was trained to `adapter/` or `model/`; returns which."""
        return self.policy.export(folder)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this trainer is closed (train() closes it at its end); make a new one")

    def close(self) -> None:
        """Close the sinks. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._sinks.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def check_rows(
    objective: Objective,
    training: RowsTrainingConfig,
    stream: ExampleStream,
    held_out: Sequence[Example],
    *,
    precompute_reference: bool = False,
) -> int:
    """How many steps the run makes: `training.max_steps`, or what the data's epochs give. Raises UserError for what can't be trained so."""
    if objective.needs_point and training.batch_size < 2:
        raise UserError(f"{objective.name} compares rows of one update, so training.batch_size must be 2 or more, got 1")
    if (training.eval_every is not None or training.compare) and not held_out:
        raise UserError("training.eval_every and training.compare need held-out rows: give eval_ds (data.eval)")
    if precompute_reference and not objective.needs_reference:
        raise UserError(f"training.precompute_reference is set, and the loss {objective.name} compares with no reference: leave it out")
    if precompute_reference and stream.num_rows is None:
        raise UserError("training.precompute_reference needs data whose rows can be counted; these are read as they come")
    steps = min(training.max_steps, stream.num_batches(training.batch_size) or training.max_steps)
    make_optimizer(training.optimizer, total_updates=steps)  # for its check of the schedule
    return steps


def _source(data: Iterable[Any], name: str, objective: Objective) -> Source:
    return data if isinstance(data, Source) else from_rows(data, name=name, reader=objective.reader)


def _examples(data: Iterable[Any], encoder: Encoder, objective: Objective) -> list[Example]:
    """Rows encoded; what are examples already stays as it is."""
    if isinstance(data, Sequence) and data and all(isinstance(item, Example) for item in data):
        return list(data)
    return encoder.all(_source(data, "eval", objective))


__all__ = ["COUNT", "RowsResult", "Trainer", "check_rows"]
