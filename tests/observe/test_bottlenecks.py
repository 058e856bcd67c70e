"""Where the time goes: arithmetic on intervals, shares equal to the trace's own bytes, and runs whose trouble is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.models.model import Model
from burnish.observe.bottlenecks import Intervals, analyse, split
from burnish.observe.run_folder import RunFolder
from burnish.observe.trace_reader import Slice, Timeline, read
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.observe.traces import ALPHABET, traced_learner


def test_intervals() -> None:
    a = Intervals([(0, 10), (8, 20), (30, 40), (5, 5)])
    b = Intervals([(15, 35)])
    assert a.pairs == [(0, 20), (30, 40)] and a.seconds == 30e-9
    assert a.both(b).pairs == [(15, 20), (30, 35)] and b.both(a).pairs == a.both(b).pairs
    assert a.without(b).pairs == [(0, 15), (35, 40)] and b.without(a).pairs == [(20, 30)]
    assert a.without(Intervals()).pairs == a.pairs and a.without(a).pairs == []


def test_each_moment_counts_for_the_first_cause_that_applies() -> None:
    second = 10**9
    causes = {"engine": Intervals([(0, 4 * second)]), "environment": Intervals([(2 * second, 7 * second)])}
    assert split(Intervals([(second, 10 * second)]), causes) == {"engine": 3.0, "environment": 3.0, "other": 3.0}


def made(*slices: tuple[str, str, int, int, int]) -> Timeline:
    """(name, lane, depth, start, end) in seconds."""
    second, groups = 10**9, {"main": "threads", "producer": "threads", "engine": "devices"}
    made = [
        Slice(name, groups.get(lane, "episodes"), lane, sum(map(ord, lane)), start * second, end * second, depth)
        for name, lane, depth, start, end in slices
    ]
    return Timeline(sorted(made, key=lambda one: (one.start_ns, one.depth)), {})


def test_a_run_that_was_worked_out_by_hand() -> None:
    """Two steps of 20 s; the first is left out. Of the second the trainer waits 12: for the engine 6, an environment 4, else 2."""
    found = analyse(
        made(
            *(("step", "main", 1, 0, 20), ("sync", "main", 2, 18, 20)),
            *(("step", "main", 1, 20, 40), ("wait", "main", 2, 20, 32), ("score", "main", 2, 32, 33), ("update", "main", 2, 33, 38)),
            *(("sync", "main", 2, 38, 40), ("rollout", "producer", 0, 20, 31), ("gate.wait", "producer", 0, 31, 40)),
            *(("decode", "engine", 0, 20, 23), ("decode", "engine", 0, 26, 29), ("queued", "queue 001", 0, 30, 32)),
            *(("env.step", "episode 001", 1, 22, 27), ("env.step", "episode 002", 1, 29, 30)),
        )
    )
    assert found.steps == 1 and found.step_s == 20.0
    assert {name: share for name, share in found.trainer.items() if share} == {"score": 0.05, "update": 0.25, "sync": 0.1, "wait": 0.6}
    assert {name: round(share, 9) for name, share in found.waits_for.items() if share} == {"engine": 0.3, "environment": 0.2, "other": 0.1}
    assert found.rollout["rollout"] == 0.55 and found.rollout["gate.wait"] == 0.45 and found.engine_busy == 0.3
    assert found.hidden == pytest.approx(2 / 6) and found.queue == 0.1 and found.sync_s == 2.0
    assert found.path == [("engine", 6.0), ("environment", 4.0), ("hand-over", 2.0), ("score", 1.0), ("update", 5.0), ("sync", 2.0)]
    assert [(f.name, f.alarm) for f in found.findings] == [("overlap", False)]


def test_a_run_on_rows_has_no_rollout_and_rules_of_its_own() -> None:
    """Two steps of 20 s, of which 7 for rows, and of these 5 for the reference's log-probs. The one that finds no rows isn't counted."""
    found = analyse(
        made(
            *(("step", "main", 1, 0, 20), ("update", "main", 2, 5, 20), ("step", "main", 1, 20, 40), ("prepare", "main", 2, 20, 27)),
            *(("data", "main", 3, 20, 21), ("score", "main", 3, 21, 26), ("update", "main", 2, 27, 40), ("step", "main", 1, 40, 41)),
        )
    )
    assert found.steps == 1 and not found.samples and found.path == [("prepare", 2.0), ("score", 5.0), ("update", 13.0)]
    assert {name: share for name, share in found.trainer.items() if share} == {"prepare": 0.1, "score": 0.25, "update": 0.65}
    assert [(f.name, f.alarm) for f in found.findings] == [("reference", True)]


def test_a_trace_without_a_whole_step_is_said_so() -> None:
    with pytest.raises(UserError, match="no step that has ended"):
        analyse(made(("step", "main", 1, 0, 20)))


# --------------------------------------------------------------------------------------------------------- through the real learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet=ALPHABET, scale=2.0)
    return Model.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "diagnosed"),
    [
        ({"env_s": 0.5, "max_concurrency": 8}, "environment"),
        ({"update_s": 3.0}, "trainer"),
        ({"sync_s": 1.5}, "sync"),
        ({"row_s": 0.4}, "data"),
        ({"update_s": 1.6, "env_s": 0.35}, None),
    ],
)
def test_a_run_that_is_bad_in_a_known_way_is_told_so(
    model: Model, tmp_path: Path, trouble: dict[str, float], diagnosed: str | None
) -> None:
    with RunFolder(tmp_path, "run") as folder:
        traced_learner(model, folder, steps=2, **trouble).train()  # type: ignore[arg-type]
    options = {"rollout": {"slots": 16, "max_staleness": 0}, "environment": {"limits": {"max_concurrency": trouble.get("max_concurrency")}}}
    found = analyse(read(folder.trace_path), options)
    assert [alarm.name for alarm in found.alarms[:1]] == ([] if diagnosed is None else [diagnosed]), found  # the largest share first
    if diagnosed == "environment":
        assert "raise environment.limits.max_concurrency from 8 to about" in found.alarms[0].text
