"""Metrics: reductions by hand, any grouping gives the same, nothing that is recorded can end a run."""

import itertools
import math
import threading

import numpy as np
import pytest

from burnish.observe.metrics import UNREADABLE, Metric, MetricCollector


def test_each_reduction_by_hand() -> None:
    collector = MetricCollector()
    for value, weight in ((1.0, 3.0), (5.0, 1.0)):
        collector.mean("loss", value, weight=weight)
        collector.sum("tokens", value)
        collector.max("ratio_max", value)
        collector.min("ratio_min", value)
        collector.last("rate", value)
    assert collector.take() == {"loss": 2.0, "rate": 5.0, "ratio_max": 5.0, "ratio_min": 1.0, "tokens": 6.0}
    assert collector.take() == {}


def test_every_value_of_an_array_counts() -> None:
    collector = MetricCollector()
    collector.mean("length", [2, 4, 9])
    collector.mean("length", np.int32(1))
    collector.mean("truncated", np.array([True, False]))
    collector.max("longest", np.array([[2.0], [7.0]]))
    assert collector.take() == {"length": 4.0, "longest": 7.0, "truncated": 0.5}


def test_device_values_are_read() -> None:
    import jax.numpy as jnp

    collector = MetricCollector()
    collector.mean("loss", jnp.float32(0.5))
    collector.mean("half", jnp.asarray(1.5, jnp.bfloat16))
    assert collector.take() == {"half": 1.5, "loss": 0.5}


def test_partial_results_merge_to_the_global_mean_not_the_mean_of_means() -> None:
    parts = [Metric("mean", 1.0, 4.0), Metric("mean", 7.0, 2.0), Metric("mean", 0.0, 0.0)]
    for order in itertools.permutations(parts):
        collector = MetricCollector()
        for part in order:
            collector.merge({"loss": part})
        assert collector.take() == {"loss": 8.0 / 6.0}


def test_a_mean_over_nothing_is_not_shown_as_a_number() -> None:
    collector = MetricCollector()
    collector.mean("loss", 3.0, weight=0.0)
    collector.mean("other", [])
    assert collector.take() == {}
    assert math.isnan(Metric("mean", 0.0, 0.0).result())


def test_b129_strings_nan_empties_and_objects_do_not_end_the_step() -> None:
    collector = MetricCollector()
    for name, value in {"a": "text", "b": math.nan, "c": [], "d": object(), "e": [[1], [2, 3]], "f": None, "g": {"x": 1}}.items():
        collector.mean(name, value)
    collector.mean("b", 1.0)
    taken = collector.take()
    assert math.isnan(taken.pop("b"))
    assert taken == {"b/nan_count": 1.0, UNREADABLE: 5.0}


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_shows_in_every_reduction_in_either_order(order: tuple[float, float]) -> None:
    collector = MetricCollector()
    for value in order:
        collector.sum("sum", value)
        collector.max("max", value)
        collector.min("min", value)
    taken = collector.take()
    assert all(math.isnan(taken[name]) and taken[f"{name}/nan_count"] == 1 for name in ("sum", "max", "min"))


def test_one_name_has_one_reduction() -> None:
    collector = MetricCollector()
    collector.mean("loss", 1.0)
    with pytest.raises(ValueError, match="loss: .*mean.*sum"):
        collector.sum("loss", 1.0)


def test_threads_lose_nothing() -> None:
    collector, taken = MetricCollector(), []

    def work() -> None:
        for _ in range(500):
            collector.sum("count", 1)
            collector.mean("one", 1.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(collector.take())
    taken.append(collector.take())
    assert sum(t.get("count", 0.0) for t in taken) == 4000
    assert all(t.get("one", 1.0) == 1.0 for t in taken)
