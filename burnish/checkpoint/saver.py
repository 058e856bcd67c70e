"""When a run saves, what it keeps, and how little it waits for it.

Owns the thread that writes, one save at a time; retries and their count; which old checkpoints go. The form on disk is `store`'s, what is
saved the caller's. A save costs the caller a copy of the arrays to the host; the rest happens beside the next steps.

A save that fails is reported and counted, the checkpoints before it stay, and the next step's end tries again with its own state.
After `MAX_FAILURES` in a row the run ends, as it could no longer be resumed; `finish` returns only once the last state is committed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoint import store
from burnish.checkpoint.store import CheckpointError
from burnish.config.errors import UserError, suggest
from burnish.config.schema import CheckpointSection
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.fleet import ALONE, Fleet, leaders

log = logging.getLogger(__name__)

MAX_FAILURES = 3
_PAUSES_S = (0.5, 2.0)
"""Before the second and the third try of a save that nothing comes after."""
METRICS = "metrics"
"""Key of `extra` for the numbers that `keep_best` chooses by."""


class Saver:
    """Saves the steps of one run under `folder`, as `config` says.

    fleet: the processes whose arrays are saved: all call the same in the same order, and the first writes, in a folder that all of them
    see. Raises UserError at once where nothing could be written there, whatever the reason.
    """

    def __init__(self, folder: Path, config: CheckpointSection = CheckpointSection(), *, fleet: Fleet = ALONE) -> None:
        self.folder = folder
        self._config, self.fleet = config, fleet
        if fleet.leads:
            self._open()
        self._thread: threading.Thread | None = None
        self._unsaved: tuple[int, dict[str, np.ndarray], Mapping[str, Any]] | None = None
        self._failures = 0
        self._failure: Exception | None = None
        self._metrics: dict[str, Metric] = {}
        self._metrics_lock = threading.Lock()
        self._last_save = time.monotonic()
        self._given = 0
        self._warned = False

    def _open(self) -> None:
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"checkpoints can't be written to {folder}: {error.strerror}; set run.folder to a writable place") from error
        store.clean(folder)

    @property
    def committed_step(self) -> int:
        """The newest step that is on disk; 0 where none is."""
        return max(store.committed(self.folder), default=0)

    @property
    def newest_step(self) -> int:
        """The newest step that is on disk or on its way, as the first process knows it."""
        return leaders(self.fleet, "learner", max(self._given, self.committed_step))

    def is_due(self, step: int) -> bool:
        """Whether the configuration wants a checkpoint of `step`, or an earlier one is still owed."""
        minutes = (time.monotonic() - self._last_save) / 60
        by_count = self._config.every is not None and step % self._config.every == 0
        by_time = self._config.every_minutes is not None and minutes >= self._config.every_minutes
        return leaders(self.fleet, "learner", by_count or by_time or self._failures > 0)

    def check_metrics(self, evaluations: Collection[str]) -> None:
        """Refuse to keep the best by an evaluation's metric that is none of `evaluations`, the names of all that the run will make."""
        best = self._config.keep_best
        if best is not None and best.metric.startswith("eval/") and best.metric not in evaluations:
            known = suggest(best.metric, evaluations) or (
                f"; it makes {', '.join(sorted(evaluations))}" if evaluations else "; it makes none"
            )
            raise UserError(f"checkpoint.keep_best.metric is `{best.metric}`, which this run's evaluations don't measure{known}")

    def save(self, step: int, tree: Any, extra: Mapping[str, Any]) -> None:
        """Copy the arrays of `tree` to the host and start writing; waits for the save before this one.

        extra: JSON values. Raises CheckpointError once `MAX_FAILURES` saves in a row have failed.
        """
        with span("save.wait", step=step):
            self._wait()
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(f"{self._failures} saves to {self.folder} failed in a row, the last: {self._failure}") from self._failure
        with span("save.copy", step=step):
            arrays = store.snapshot(tree, keep=self.fleet.leads)
        self._last_save, self._given = time.monotonic(), step
        if not self.fleet.leads:
            return
        self._unsaved = step, arrays, extra
        self._thread = threading.Thread(target=self._try, name="checkpoint")  # no daemon: the process doesn't end before it does
        self._thread.start()

    def finish(self) -> None:
        """Return when everything given to `save` is committed. Raises CheckpointError where the last of it can't be."""
        self._wait()
        for pause in _PAUSES_S:
            if self._unsaved is None:
                return
            time.sleep(pause)
            self._try()
        if self._unsaved is not None:
            step = self._unsaved[0]
            raise CheckpointError(
                f"step {step} could not be saved to {self.folder}: {self._failure}; step {self.committed_step} is the last that is"
            ) from self._failure

    def take_metrics(self) -> dict[str, Metric]:
        """What happened since the last call, by metric name."""
        with self._metrics_lock:
            metrics, self._metrics = self._metrics, {}
        return metrics

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try(self) -> None:
        """Write what is unsaved; on the writing thread, or on the caller's where nothing runs beside it."""
        assert self._unsaved is not None, "started with something to save"
        step, arrays, extra = self._unsaved
        with span("save.write", step=step) as taken:
            try:
                store.write(self.folder, step, arrays, extra)
            except Exception as error:
                self._failures, self._failure = self._failures + 1, error
                log.warning("step %d could not be saved (try %d): %s: %s", step, self._failures, type(error).__name__, error)
                self._record({"checkpoint/failed_saves": Metric("sum", 1.0)})
                return
        self._unsaved, self._failures = None, 0
        self._record({"checkpoint/saves": Metric("sum", 1.0), "checkpoint/seconds": Metric("last", taken.seconds)})
        try:
            for old in self._superseded():
                store.delete(self.folder, old)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", error)

    def _record(self, metrics: Mapping[str, Metric]) -> None:
        with self._metrics_lock:
            for name, metric in metrics.items():
                self._metrics[name] = self._metrics[name].merge(metric) if name in self._metrics else metric

    def _superseded(self) -> list[int]:
        """The committed steps that no rule keeps."""
        config, steps = self._config, store.committed(self.folder)
        if config.keep_last is None:
            return []
        kept = set(steps[-config.keep_last :])
        if config.keep_every is not None:
            kept |= {step for step in steps if step % config.keep_every == 0}
        if config.keep_best is not None:
            best = config.keep_best
            sign = 1.0 if best.mode == "max" else -1.0
            measured = {step: store.read_extra(self.folder, step).get(METRICS, {}) for step in steps}
            if not self._warned and not any(best.metric in metrics for metrics in measured.values()):
                self._warned = True
                nearest = suggest(best.metric, measured[steps[-1]])
                log.warning("checkpoint.keep_best.metric: no checkpoint has a metric `%s`, so none is kept for it%s", best.metric, nearest)
            values = {step: sign * _number(metrics.get(best.metric)) for step, metrics in measured.items()}
            ranked = sorted((step for step in steps if not math.isnan(values[step])), key=lambda step: (values[step], step))
            kept |= set(ranked[-best.count :])
        return [step for step in steps if step not in kept]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
