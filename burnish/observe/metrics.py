"""Metrics: numbers that know how they combine, collected from many threads over one step.

Owns the reductions and the collector. Numpy, no jax: device values are read with `float`. Names are listed in `docs/metrics.md`; who
reads a step's metrics is in `sinks.py`.

A value that can't be read as numbers is counted in `observe/unreadable_values` instead of ending a run that cost hours; a NaN stays
visible, as the metric's value and with its count as `NAME/nan_count`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "min", "last"]

UNREADABLE = "observe/unreadable_values"


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial result: `total` of everything seen, as `reduction` says; `weight` is a mean's denominator; `num_nan` values were NaN.

    Merging is associative, so threads, micro-batches and hosts may be merged in any grouping; `last` takes the right operand.
    """

    reduction: Reduction
    total: float
    weight: float = 1.0
    num_nan: int = 0

    def merge(self, later: Metric) -> Metric:
        if self.reduction != later.reduction:
            raise ValueError(f"a metric recorded as {self.reduction} can't be merged with one recorded as {later.reduction}")
        return Metric(
            self.reduction,
            _combine(self.reduction, self.total, later.total),
            self.weight + later.weight,
            self.num_nan + later.num_nan,
        )

    def result(self) -> float:
        """The number to show; a mean over no weight is NaN."""
        if self.reduction != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan


def _combine(reduction: Reduction, first: float, second: float) -> float:
    match reduction:
        case "mean" | "sum":
            return first + second
        case "max" | "min" if math.isnan(first) or math.isnan(second):
            return math.nan  # Python's max and min would keep or lose it by position
        case "max":
            return max(first, second)
        case "min":
            return min(first, second)
        case "last":
            return second


class MetricCollector:
    """Collects one step's metrics; every method may be called from any thread.

    `value` is a number or an array-like of numbers, each of which counts. Recording one name in two ways is a mistake and raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def mean(self, name: str, value: object, *, weight: float = 1.0) -> None:
        """The mean over everything recorded, `weight` for each value."""
        if (values := self._read(value)) is not None:
            self.merge({name: _metric("mean", values.sum() * weight, values, weight * values.size)})

    def sum(self, name: str, value: object) -> None:
        if (values := self._read(value)) is not None:
            self.merge({name: _metric("sum", values.sum(), values)})

    def max(self, name: str, value: object) -> None:
        if (values := self._read(value)) is not None:
            self.merge({name: _metric("max", values.max(), values)})

    def min(self, name: str, value: object) -> None:
        if (values := self._read(value)) is not None:
            self.merge({name: _metric("min", values.min(), values)})

    def last(self, name: str, value: object) -> None:
        """The latest value wins: rates, sizes, versions."""
        if (values := self._read(value)) is not None:
            self.merge({name: _metric("last", values[-1], values[-1:])})

    def merge(self, metrics: Mapping[str, Metric]) -> None:
        """Add results that are already partly reduced, e.g. a loss's (total, weight)."""
        with self._lock:
            for name, metric in metrics.items():
                seen = self._metrics.get(name)
                try:
                    self._metrics[name] = metric if seen is None else seen.merge(metric)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    def take(self) -> dict[str, float]:
        """The step's results by name, sorted; starts the next step. Means over no weight are left out: nothing was measured."""
        with self._lock:
            metrics, self._metrics = self._metrics, {}
        results = {}
        for name, metric in metrics.items():
            if metric.reduction == "mean" and metric.weight == 0:
                continue
            results[name] = metric.result()
            if metric.num_nan:
                results[f"{name}/nan_count"] = float(metric.num_nan)
        return dict(sorted(results.items()))

    def _read(self, value: object) -> np.ndarray | None:
        """The numbers in `value`, flat, in float64; None when there are none."""
        try:
            numbers = np.asarray(value)
            if numbers.dtype.kind not in "OSUMmc":
                return numbers.astype(np.float64).ravel() if numbers.size else None
        except (TypeError, ValueError):
            pass
        self.merge({UNREADABLE: Metric("sum", 1.0)})
        return None


def _metric(reduction: Reduction, total: float, values: np.ndarray, weight: float = 1.0) -> Metric:
    return Metric(reduction, float(total), weight, int(np.isnan(values).sum()))
