"""A run that stops and goes on is the run that never stopped: arrays, row ids and sampled ids, bitwise."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.checkpoint import store
from burnish.checkpoint.saver import Saver
from burnish.checkpoint.store import CheckpointError
from burnish.config.schema import CheckpointSection, LoraConfig
from burnish.models.model import Model
from burnish.observe.sinks import EvalReport, StepReport
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import assert_same, host, make_learner

pytestmark = pytest.mark.optimised  # equal bit for bit

STEPS = 20
LORA = LoraConfig(rank=2, alpha=4, targets=("q", "down"))
ROWS = [{"prompt": f"{i:02d}", "answer": str(i % 10)} for i in range(28)]
"""Seven batches of four: the epoch ends with step 7."""
SETTINGS: dict[str, Any] = {
    "train_ds": ROWS,
    "training": {"max_steps": STEPS, "train_micro_batch_size": 2, "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"}},
    "algorithm": {"num_iterations": 2, "num_generations": 2, "beta": 0.1},
    "lora": LORA,
}
"""Two iterations a batch, each of two micro-batches: four passes, two updates, one cut in the middle of nothing."""
KEEP = CheckpointSection(every=1, keep_last=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


class Log:
    """A sink that keeps, of each step, which rows were drawn, what was sampled, and the metrics that don't measure time."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[Any, Any, Mapping[str, float]]] = {}
        self.evaluations: list[tuple[int, str]] = []

    def step(self, report: StepReport) -> None:
        timed = ("time/", "perf/", "memory/", "checkpoint/")
        numbers = {name: value for name, value in report.metrics.items() if not name.startswith(timed)}
        rows = [group.prompt.id for group in report.groups]
        self.steps[report.step] = rows, [t.ids.tolist() for group in report.groups for t in group.trajectories], numbers

    def evaluation(self, report: EvalReport) -> None:
        self.evaluations.append((report.step, report.label))

    def close(self) -> None:
        """Nothing is open."""


def unbroken(model: Model, folder: Path, **settings: Any) -> tuple[Any, Log]:
    """The states at the end of a run that saves every step in `folder`, and its log."""
    log = Log()
    learner = make_learner(model, sinks=[log], **{**SETTINGS, **settings})
    assert learner.train(saver=Saver(folder, KEEP)).steps == STEPS
    return host(learner.cluster.states), log


def go_on(model: Model | Path, folder: Path, step: int | None, **settings: Any) -> tuple[Any, Log]:
    log = Log()
    learner = make_learner(model, sinks=[log], **{**SETTINGS, **settings})
    started = learner.resume(folder, step)
    assert step is None or started == step
    result = learner.train(saver=Saver(folder, KEEP))
    assert (result.steps, len(result.history)) == (STEPS, STEPS - started)
    return host(learner.cluster.states), log


@pytest.fixture(scope="module")
def whole(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Log]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, *unbroken(model, folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "step", [6, 7, *(pytest.param(step, marks=pytest.mark.soak) for step in range(1, STEPS + 1) if step not in (6, 7))]
)
def test_r12_resume_at_each_step_is_bitwise_the_unbroken_run(model: Model, whole: tuple[Path, Any, Log], tmp_path: Path, step: int) -> None:
    """Before and at the border of an epoch (which ends with step 7), with two iterations a batch and gradients accumulated."""
    saved, states, log = whole
    shutil.copytree(saved, tmp_path / "checkpoints")
    resumed, its_log = go_on(model, tmp_path / "checkpoints", step)
    assert_same(resumed, states)
    assert its_log.steps == {n: seen for n, seen in log.steps.items() if n > step}
    assert store.committed(tmp_path / "checkpoints") == list(range(1, STEPS + 1))
    assert not list((tmp_path / "checkpoints").glob("*.set-aside")), "later checkpoints were made again"


@pytest.mark.slow
def test_b109_moments_counts_and_learning_rates_go_on(model: Model, whole: tuple[Path, Any, Log], tmp_path: Path) -> None:
    saved, _, log = shutil.copytree(whole[0], tmp_path / "checkpoints"), *whole[1:]
    rates = [log.steps[step][2]["optim/learning_rate"] for step in range(1, STEPS + 1)]
    assert rates == sorted(rates, reverse=True) and rates[0] > 5 * rates[-1] > 0, "a cosine over all updates"
    learner = make_learner(model, **SETTINGS)
    with learner:
        learner.resume(saved, 5)
        arrays = store.named_leaves(host(learner.cluster.states))
        extra = store.read_extra(saved, 5)
    assert int(arrays["actor.updates"]) + int(arrays["actor.skipped"]) == 10
    counts = [int(leaf) for name, leaf in arrays.items() if name.startswith("actor.opt_state") and name.endswith("count")]
    assert counts and set(counts) == {int(arrays["actor.updates"])}
    assert any(np.any(leaf) for name, leaf in arrays.items() if ".nu." in name)
    assert extra["metrics"]["optim/learning_rate"] == rates[4]


@pytest.mark.slow
def test_a_run_that_is_stopped_saves_its_last_whole_step_and_draws_the_rest_again(model: Model, tmp_path: Path) -> None:
    """Stopped by another thread while the fourth step's episodes play; `every` alone would have saved nothing."""
    small = {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 5}}
    log, whole_log = Log(), Log()
    whole = make_learner(model, sinks=[whole_log], **small)
    whole.train()
    playing = threading.Event()

    def digits_reward(completions: list[str], answer: list[str]) -> list[float]:
        if len(log.steps) == 3 and not playing.is_set():
            playing.set()
        return [float(text.count(gold)) + 0.1 * len(text) for text, gold in zip(completions, answer, strict=True)]

    stopped = make_learner(model, sinks=[log], reward=digits_reward, **small)
    stopper = threading.Thread(target=lambda: playing.wait(60) and stopped.stop())
    stopper.start()
    result = stopped.train(saver=Saver(tmp_path))
    stopper.join()
    assert result.stopped and result.steps in (3, 4) and store.committed(tmp_path) == [result.steps]
    rest = Log()
    resumed = make_learner(model, sinks=[rest], **small)
    assert resumed.resume(tmp_path) == result.steps
    assert not resumed.train(saver=Saver(tmp_path)).stopped
    assert_same(host(resumed.cluster.states), host(whole.cluster.states))
    assert log.steps | rest.steps == whole_log.steps


@pytest.mark.slow
def test_a_stop_before_the_first_step_claims_no_checkpoint(model: Model, tmp_path: Path) -> None:
    """R63."""
    learner = make_learner(model, **SETTINGS)
    learner.stop()
    result = learner.train(saver=Saver(tmp_path))
    assert (result.stopped, result.steps, store.committed(tmp_path)) == (True, 0, [])
    learner = make_learner(model, **SETTINGS)
    with learner:
        assert learner.resume(tmp_path) == 0


@pytest.mark.slow
def test_a_step_with_some_updates_applied_is_not_saved(model: Model, tmp_path: Path) -> None:
    """Stopped between the two updates of step 2: its state belongs to no step's end."""
    small = {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 3}}
    learner = make_learner(model, **small)
    update, calls = learner.cluster.update_actor, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["step"])
        if calls == [1, 1, 2]:
            learner.stop()
        return update(*args, **options)

    learner.cluster.update_actor = counted  # type: ignore[method-assign]
    result = learner.train(saver=Saver(tmp_path, CheckpointSection(every=1)))
    assert (result.stopped, result.steps, calls) == (True, 1, [1, 1, 2])
    assert store.committed(tmp_path) == [1]


@pytest.mark.slow
def test_evaluations_before_the_stop_are_known_after_it(model: Model, tmp_path: Path) -> None:
    small = {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 2, "compare": True, "eval_every": 1}, "eval_ds": ROWS[:3]}
    whole = make_learner(model, **small).train(saver=Saver(tmp_path / "a", KEEP))
    log = Log()
    learner = make_learner(model, sinks=[log], **small)
    learner.resume(tmp_path / "a", 1)
    resumed = learner.train(saver=Saver(tmp_path / "a", KEEP))
    assert log.evaluations == [(2, "step 2"), (2, "after")]
    assert whole.evaluations.keys() == resumed.evaluations.keys() == {0, 1, 2}
    for step, ways in whole.evaluations.items():
        for label, evaluation in ways.items():
            np.testing.assert_array_equal(resumed.evaluations[step][label].rewards, evaluation.rewards)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_with_every_difference(model: Model, whole: tuple[Path, Any, Log], tmp_path: Path) -> None:
    other = LoraConfig(rank=3, alpha=9, targets=("q", "up"))
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0, seed=1)
    learner = make_learner(Model.load(tmp_path), **{**SETTINGS, "lora": other, "seed": 4, "train_ds": ROWS[:20]})
    before = sorted(path.name for path in whole[0].iterdir())
    with learner, pytest.raises(CheckpointError) as refused:
        learner.resume(whole[0])
    text = str(refused.value)
    for difference in (
        "run.seed: the checkpoint has 3, this run 4",
        "adapter's scale: the checkpoint has 2.0, this run 3.0",
        "digest of the frozen weights",
        "missing from the checkpoint: actor.trainable.up.a",
        "only in the checkpoint: actor.trainable.down.a",
        "actor.trainable.q.a: the checkpoint has float32[2, 16, 2], this run float32[2, 16, 3]",
    ):
        assert difference in text, text
    assert sorted(path.name for path in whole[0].iterdir()) == before


@pytest.mark.slow
def test_b105_a_stop_at_the_end_of_an_epoch_skips_nothing(model: Model, tmp_path: Path) -> None:
    """8 rows, batches of 4, saved at step 2: steps 3 and 4 go over the rows of epoch 2."""
    settings = {**SETTINGS, "train_ds": ROWS[:8], "training": {**SETTINGS["training"], "max_steps": 4}}
    log = Log()
    whole = make_learner(model, sinks=[log], **settings)
    whole.train(saver=Saver(tmp_path, KEEP))
    rest = Log()
    learner = make_learner(model, sinks=[rest], **settings)
    learner.resume(tmp_path, 2)
    learner.train()
    assert rest.steps == {step: log.steps[step] for step in (3, 4)}
    for steps in ((1, 2), (3, 4)):
        assert sorted(row for step in steps for row in log.steps[step][0]) == sorted(f"train:{i}" for i in range(8))


class Loader:
    """Rows that worker threads prepare ahead of need, as a data loader does."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[dict[str, str]]:
        if not self._workers:
            yield from (dict(row) for row in ROWS[:12])
            return
        with ThreadPoolExecutor(self._workers) as pool:
            yield from pool.map(dict, ROWS[:12])


@pytest.mark.slow
def test_r13_b107_the_rows_after_a_resume_dont_depend_on_who_loads_them(model: Model, tmp_path: Path) -> None:
    """burnish starts no loading workers of its own; a source that does is read up to its place before they start."""
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "max_steps": 5}}
    rows = []
    for workers in (0, 1, 2):
        folder, log = tmp_path / str(workers), Log()
        first = make_learner(model, sinks=[log], **{**settings, "train_ds": Loader(workers)})
        first.train(saver=Saver(folder, CheckpointSection(every=2)))
        rest = Log()
        learner = make_learner(model, sinks=[rest], **{**settings, "train_ds": Loader(workers)})
        assert learner.resume(folder, 2) == 2
        learner.train()
        assert rest.steps == {step: log.steps[step] for step in range(3, 6)}
        rows.append([log.steps[step][0] for step in range(1, 6)])
    assert rows[0] == rows[1] == rows[2]
    assert rows[0][3] == [f"train:{i}" for i in range(4)], "the second pass begins with step 4"


@pytest.mark.slow
def test_on_another_number_of_devices_it_goes_on_within_rounding(model: Model, whole: tuple[Path, Any, Log], tmp_path: Path) -> None:
    saved, states, _ = whole
    shutil.copytree(saved, tmp_path / "checkpoints")
    resumed, _ = go_on(model.folder, tmp_path / "checkpoints", STEPS - 2, axes={"data": 2})
    for name, leaf in store.named_leaves(states["actor"].trainable).items():
        np.testing.assert_allclose(store.named_leaves(resumed["actor"].trainable)[name], leaf, atol=1e-5, rtol=1e-5)
