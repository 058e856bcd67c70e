"""`burnish train --resume` as a person meets it: killed, stopped, finished, misused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from burnish.checkpoint import store
from burnish.observe.run_folder import read_status
from tests.cli.runs import LORA, Shell, finish, outcome, start_train, write_task

pytestmark = [pytest.mark.optimised, pytest.mark.timeout(480)]  # equal bit for bit; two runs in processes of their own

STEPS = 5


def options(*more: str) -> list[str]:
    return [*LORA, f"training.max_steps={STEPS}", "checkpoint.every=1", *more]


def start(task: Path, *more: str, faults: str = "") -> subprocess.Popen[str]:
    return start_train(task, *options(*more), faults=faults)


def wait_for_step(run: Path, step: int, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while step not in store.committed(run / "checkpoints"):
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Mapping[str, Any]:
    """The outcome of the run that nothing happens to. It has other folders: names of rows must not depend on where a task lies."""
    task = write_task(tmp_path_factory.mktemp("unbroken"), model_folder)
    code, _, err = finish(start(task, f"run.folder={task.parent / 'runs'}"))
    assert code == 0, err
    return outcome(task.parent / "runs" / "first")


@pytest.mark.slow
@pytest.mark.parametrize("point", ["save.after_arrays@step=3", "save.after_commit@step=2", "engine.step@version=3"])
def test_r01_killed_and_gone_on_with_it_is_the_unbroken_run(task: Path, unbroken: Mapping[str, Any], point: str) -> None:
    code, _, err = finish(start(task, faults=f"{point}:kill"))
    assert code == -signal.SIGKILL, err
    run = Path("runs/first")
    assert read_status(run)["state"] == "failed" and "was killed" in read_status(run)["cause"]
    code, out, err = finish(start(task, "--resume"))
    assert code == 0, err
    assert "going on after step 2" in out or "going on after step 3" in out
    assert outcome(run) == unbroken
    assert read_status(run)["state"] == "complete"


@pytest.mark.slow
def test_r59_hash_seed_locale_zone_folder_and_threads_change_no_bit(task: Path, unbroken: Mapping[str, Any]) -> None:
    """The unbroken run has another working directory, and as many threads as there are cores; this one has one core."""
    odd = {"PYTHONHASHSEED": "7", "LC_ALL": "C", "LANG": "C", "TZ": "Pacific/Kiritimati"}
    child = start_train(task, *options(), variables=odd)
    os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})  # before it has imported jax, which counts them
    code, _, err = finish(child)
    assert code == 0, err
    assert outcome(Path("runs/first")) == unbroken


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_it_starts_over_in_its_folder(task: Path, unbroken: Mapping[str, Any]) -> None:
    """R63."""
    code, _, _ = finish(start(task, faults="save.before_commit@step=1:kill"))
    assert code == -signal.SIGKILL
    code, out, err = finish(start(task, "--resume"))
    assert code == 0 and "no checkpoint yet: starting from the beginning" in out, err
    assert outcome(Path("runs/first")) == unbroken


@pytest.mark.slow
def test_sigterm_saves_the_last_step_and_the_run_goes_on(task: Path, unbroken: Mapping[str, Any]) -> None:
    """Nothing was due to be saved: `every` is beyond the end. The kept configuration is as good as the first."""
    run = Path("runs/first")
    child = start(task, "checkpoint.every=100")
    while not (run / "metrics.jsonl").is_file() or len((run / "metrics.jsonl").read_text().splitlines()) < 2:
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    code, _, err = finish(child)
    assert code == 75, err
    (step,) = store.committed(run / "checkpoints")
    assert 2 <= step < STEPS and f"stopped by SIGTERM after step {step}; step {step} is saved: go on with --resume" in err
    status = read_status(run)
    assert (status["state"], status["exit_code"]) == ("failed", 75) and "SIGTERM" in status["cause"]
    code, out, err = finish(start(run / "config.yaml", "--resume"))
    assert code == 0 and f"going on after step {step}" in out, err
    assert outcome(run) == unbroken


@pytest.mark.slow
def test_r04_a_second_signal_ends_it_at_once(task: Path) -> None:
    """The save hangs, so that the first signal can't end the run."""
    run = Path("runs/first")
    child = start(task, faults="save.after_arrays@step=2:hang")
    wait_for_step(run, 1, child)
    while not (run / "checkpoints" / "2.partial").is_dir():
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert child.poll() is None, "it doesn't end before its save does"
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    code, _, err = finish(child)
    assert (code, time.monotonic() - begun < 5) == (130, True), err
    assert read_status(run)["exit_code"] == 130 and store.newest_intact(run / "checkpoints") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_first_step_is_told_apart_from_a_failure(task: Path, number: signal.Signals) -> None:
    child = start(task)
    assert child.stdout is not None
    while not child.stdout.readline().startswith("algorithm"):
        assert child.poll() is None, child.communicate()
    child.send_signal(number)
    code, _, err = finish(child)
    assert code == (130 if number is signal.SIGINT else 75), err
    assert "Traceback" not in err and not list(Path("runs/first").glob("checkpoints/*"))


@pytest.mark.slow
def test_b133_a_failed_last_save_isnt_a_success(task: Path) -> None:
    code, _, err = finish(start(task, "checkpoint.every=100", faults=f"save.after_arrays@step={STEPS}:raise"))
    assert code == 1 and f"step {STEPS} could not be saved" in err and "Traceback" not in err
    assert read_status("runs/first")["state"] == "failed"


@pytest.mark.slow
def test_a_finished_run_does_nothing_more_and_refuses_to_be_another(task: Path, shell: Shell) -> None:
    """R11, R09, and what may change: one run, made once."""
    code, _, err = shell("train", task, *options())
    assert code == 0, err
    run = Path("runs/first")

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def touched() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}

    before, times = files(), touched()
    # R11
    code, out, _ = shell("train", task, *options(), "--resume")
    assert (code, files() == before, touched() == times) == (0, True, True) and "is complete: nothing is left to do" in out
    # R09: a fresh run
    code, _, err = shell("train", task, *options())
    assert (code, files() == before) == (2, True) and "another run's files" in err and "--resume" in err
    # another run by its settings, each of them named
    code, _, err = shell("train", task, *options("run.seed=4", "algorithm.beta=0.5", "training.max_steps=9"), "--resume")
    assert (code, files() == before) == (2, True)
    assert "run.seed: was 0, is 4" in err and "algorithm.beta: was 0.0, is 0.5" in err and "max_steps" not in err
    # a step that isn't there
    code, _, err = shell("train", task, *options(), "--resume=44")
    assert (code, files() == before) == (2, True) and f"there is no checkpoint of step 44 in {run}; kept are 3, 4, 5" in err
    code, _, err = shell("train", task, *options(), "--resume=-1")
    assert (code, files() == before) == (2, True) and "neither a step" in err
    # fewer steps than it has made
    code, _, err = shell("train", task, *options("training.max_steps=3"), "--resume=4")
    assert (code, files() == before) == (2, True) and "training.max_steps is 3, and the run in" in err
    # checkpoints that were taken away
    (run / "checkpoints").rename("kept")
    code, _, err = shell("train", task, *options("training.max_steps=9"), "--resume")
    assert code == 2 and "has saved checkpoints, but none is left" in err
    Path("kept").rename(run / "checkpoints")
    assert files() == before
    # a folder that is no run's
    Path("runs/foreign").mkdir()
    Path("runs/foreign/notes").touch()
    code, _, err = shell("train", task, *options("run.name=foreign"), "--resume")
    assert code == 2 and "another run's files (notes)" in err
    # a folder that isn't there
    code, _, err = shell("train", task, *options("run.name=second"), "--resume")
    assert code == 2 and "there is no run to resume in" in err and not Path("runs/second").exists()
    # further than it was going to go, from a bare --resume before the file's name
    code, out, err = shell("train", "--resume", task, *options(f"training.max_steps={STEPS + 1}"))
    assert code == 0 and f"going on after step {STEPS}" in out, err
    assert f"changed since the start: training.max_steps: was {STEPS}, is {STEPS + 1}" in err
    assert store.committed(run / "checkpoints")[-1] == STEPS + 1
    # from an earlier one that is still kept, which makes the later ones again
    code, out, err = shell("train", task, *options(f"training.max_steps={STEPS + 1}"), "--resume", STEPS)
    assert code == 0 and f"going on after step {STEPS}" in out, err
    assert sorted(path.name for path in (run / "transcripts").iterdir()) == [f"step_{n}.jsonl" for n in range(1, STEPS + 2)]
    # under another name
    run.rename("runs/moved")
    code, out, err = shell("train", "runs/moved/config.yaml", f"training.max_steps={STEPS + 2}", "run.name=moved", "--resume")
    assert code == 0 and "run.name: was 'first', is 'moved'" in err
    run = Path("runs/moved")
    assert store.committed(run / "checkpoints")[-1] == STEPS + 2
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(range(1, STEPS + 3))


GRADE_WITH_KEY = """
def hits(completions, answer, *, api_key):
    assert api_key == "sesame-0123456789"
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_secrets_arent_kept_and_dont_stand_in_the_way(task: Path, shell: Shell) -> None:
    (task.parent / "grade.py").write_text(GRADE_WITH_KEY)
    secret = "rewards.0.options.api_key=sesame-0123456789"
    code, _, err = shell("train", task, *options(secret, "training.max_steps=1"))
    assert code == 0, err
    assert "sesame" not in Path("runs/first/config.yaml").read_text()
    code, _, err = shell("train", task, *options(secret, "training.max_steps=2"), "--resume")
    assert code == 0 and "api_key" not in err, err
    code, _, err = shell("train", "runs/first/config.yaml", "--resume", "training.max_steps=3")
    assert code == 2 and "rewards.0.options.api_key" in err and "give it again" in err
