"""Sinks for other people's trackers: TensorBoard, Weights & Biases, trackio, MLflow, and any Python function.

Owns the translation only; each package is imported when its sink is made. A tracker may need the network, so its sink belongs into a
`Background`: a thread of its own with a bounded queue, which a tracker that hangs fills up, while the run goes on.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.observe.sinks import EvalReport, Sink, StepReport

QUEUED = 1000
"""Reports that wait for a tracker; more are dropped, and counted."""
CLOSE_S = 10.0
"""How long a tracker gets at the end to take what still waits."""


class Background:
    """Delivers metrics to a sink from a thread of its own; nothing here ever waits for it, but `close`, for `CLOSE_S` at most.

    Episodes stay behind. A sink that raises is named on stderr and gets nothing more. dropped: reports that found no room.
    """

    def __init__(self, sink: Sink, *, close_s: float = CLOSE_S) -> None:
        self._sink, self._close_s = sink, close_s
        self._reports: queue.Queue[StepReport | EvalReport | None] = queue.Queue(QUEUED)
        self.dropped = 0
        self._failed = False
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {type(sink).__name__}", daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        self._put(StepReport(report.step, report.max_steps, report.metrics))

    def evaluation(self, report: EvalReport) -> None:
        self._put(EvalReport(report.step, report.label, report.metrics))

    def close(self) -> None:
        self._put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive() or self.dropped:
            left = f"{self.dropped} reports were dropped" if self.dropped else "it is still busy"
            print(f"burnish: {type(self._sink).__name__} was too slow: {left}", file=sys.stderr)
            self.dropped = 0

    def _put(self, report: StepReport | EvalReport | None) -> None:
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self.dropped += 1

    def _deliver(self) -> None:
        try:
            while (report := self._reports.get()) is not None:
                if isinstance(report, StepReport):
                    self._sink.step(report)
                else:
                    self._sink.evaluation(report)
            self._sink.close()
        except Exception as error:  # the third of the borders at which an error is data
            name = type(self._sink).__name__
            print(f"burnish: {name} failed and is left out from here on: {type(error).__name__}: {error}", file=sys.stderr)


class CallbackSink:
    """Calls `fn(step, metrics)` after each step and each evaluation."""

    def __init__(self, fn: Callable[[int, Mapping[str, float]], object]) -> None:
        self._fn = fn

    def step(self, report: StepReport) -> None:
        self._fn(report.step, report.metrics)

    def evaluation(self, report: EvalReport) -> None:
        self._fn(report.step, report.metrics)

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardSink(CallbackSink):
    """Event files in `folder`, by the names of the metrics (extra `tensorboard`)."""

    def __init__(self, folder: Path) -> None:
        self._writer = package("tensorboardX").SummaryWriter(str(folder))
        super().__init__(self._write)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(CallbackSink):
    """A run of Weights & Biases (extra `wandb`); `WANDB_MODE=offline` keeps it in `folder`, `WANDB_PROJECT` and the like are theirs."""

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = package("wandb").init(dir=str(folder), name=name, config=dict(config))
        super().__init__(lambda step, metrics: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        self._run.finish()


class TrackioSink(CallbackSink):
    """A run of trackio, in its own database; `TRACKIO_DIR` says where. It wants another huggingface-hub than the extra `hf`: no extra."""

    def __init__(self, *, name: str, config: Mapping[str, Any]) -> None:
        # The run itself: which one is current is known to the thread that made it only.
        self._run = package("trackio").init(project="burnish", name=name, config=dict(config), embed=False)
        super().__init__(lambda step, metrics: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        self._run.finish()


class MLflowSink(CallbackSink):
    """A run of MLflow (extra `mlflow`); `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` say where."""

    def __init__(self, *, name: str, config: Mapping[str, Any]) -> None:
        mlflow = package("mlflow", "mlflow-skinny")
        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "burnish"))
        self._run_id = self._client.create_run(experiment.experiment_id, run_name=name).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in _flat(config)]
        for start in range(0, len(params), 100):  # as many as one request may hold
            self._client.log_batch(self._run_id, params=params[start : start + 100])
        super().__init__(self._write)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(_plain(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def make_tracker(kind: str, folder: Path, *, config: Mapping[str, Any]) -> Background:
    """The sink of a tracker by its name in `observe.trackers`. folder: the run's. Raises UserError where its package isn't there."""
    name = folder.name
    match kind:
        case "tensorboard":
            return Background(TensorBoardSink(folder / "tensorboard"))
        case "wandb":
            return Background(WandbSink(folder, name=name, config=config))
        case "trackio":
            return Background(TrackioSink(name=name, config=config))
        case "mlflow":
            return Background(MLflowSink(name=name, config=config))
    raise ValueError(f"there is no tracker {kind!r}")


def package(name: str, install: str | None = None) -> Any:
    """The module `name`. Raises UserError, with what to install, where it can't be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"observe.trackers needs {name}, which can't be imported ({error}): pip install {install or name}") from error


def _flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        found += _flat(value, here) if isinstance(value, Mapping) else [(here, value)]
    return found


def _plain(name: str) -> str:
    """MLflow takes letters, digits and a few signs."""
    return "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in name)


__all__ = ["Background", "CallbackSink", "MLflowSink", "TensorBoardSink", "TrackioSink", "WandbSink", "make_tracker", "package"]
