"""The run folder: one owner, never two runs' files, and a status that says how the run ended even when it was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.observe.run_folder import RunFolder, RunFolderError, read_status

HOLD = """
import sys, time
from burnish.observe.run_folder import RunFolder
folder = RunFolder(sys.argv[1], "a", resume=len(sys.argv) > 2)
print("held", flush=True)
time.sleep(60)
"""


def hold(root: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def test_status_follows_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "a") as folder:
        assert read_status(folder.path)["state"] == "running"
        folder.write_config("run: {name: a}\n")
    status = read_status(tmp_path / "a")
    assert (status["state"], status["exit_code"], status["pid"]) == ("complete", 0, os.getpid())
    assert (tmp_path / "a" / "config.yaml").read_text() == "run: {name: a}\n"


@pytest.mark.parametrize(
    ("error", "exit_code", "cause"),
    [
        (ValueError("no such key"), 1, "ValueError: no such key"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt: "),
        (SystemExit(7), 7, "SystemExit: 7"),
    ],
)
def test_status_names_the_cause_of_a_failure(tmp_path: Path, error: BaseException, exit_code: int, cause: str) -> None:
    with pytest.raises(type(error)), RunFolder(tmp_path, "a"):
        raise error
    status = read_status(tmp_path / "a")
    assert (status["state"], status["exit_code"], status["cause"]) == ("failed", exit_code, cause)


def test_the_first_verdict_stands(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "a") as folder:
        folder.fail(exit_code=3, cause="reward is NaN")
    assert read_status(folder.path)["exit_code"] == 3


def test_r08_second_process_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    child = hold(tmp_path)
    try:
        for resume in (False, True):
            with pytest.raises(RunFolderError, match=f"in use by pid {child.pid} on host "):
                RunFolder(tmp_path, "a", resume=resume)
        assert read_status(tmp_path / "a")["state"] == "running"
    finally:
        end(child)


def test_r08_lock_of_a_killed_process_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = hold(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    end(child)
    status = read_status(tmp_path / "a")
    assert (status["state"], status["cause"]) == ("failed", f"process {child.pid} was killed")
    with RunFolder(tmp_path, "a", resume=True) as folder:
        assert f"left locked by pid {child.pid}" in capsys.readouterr().err
        assert read_status(folder.path)["state"] == "running"
    with RunFolder(tmp_path, "a", resume=True):
        assert capsys.readouterr().err == ""


def test_r08_same_process_is_refused_too(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "a"), pytest.raises(RunFolderError, match="in use by pid"):
        RunFolder(tmp_path, "a", resume=True)


def test_r08_lock_of_another_host_is_left_alone(tmp_path: Path) -> None:
    RunFolder(tmp_path, "a").complete()
    (tmp_path / "a" / "lock").write_text("pid 12 on host elsewhere\n")
    with pytest.raises(RunFolderError, match="pid 12 on host elsewhere.*delete its file `lock`"):
        RunFolder(tmp_path, "a", resume=True)
    assert (tmp_path / "a" / "lock").read_text() == "pid 12 on host elsewhere\n"


def test_r09_fresh_run_refuses_another_runs_files(tmp_path: Path) -> None:
    RunFolder(tmp_path, "a").complete()
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(RunFolderError, match=r"another run's files \(status.json.*choose another run.name"):
        RunFolder(tmp_path, "a")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert RunFolder(tmp_path, "a", resume=True).resumed


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run to resume"):
        RunFolder(tmp_path, "a", resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", "a;b", "$(id)", "a\nb", "", ".hidden", "n" * 101, "n" * 300])
def test_r52_names_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="run.name"):
        RunFolder(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


def test_r52_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(RunFolderError, match="is a link"):
        RunFolder(tmp_path / "runs", "a")
    assert list((tmp_path / "outside").iterdir()) == []


def test_unusable_root_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't make the run folder.*set run.folder"):
        RunFolder(tmp_path / "file", "a")


def test_status_is_never_half_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "a") as folder:
        assert [p.name for p in sorted(folder.path.iterdir())] == ["lock", "status.json"]
        assert json.loads((folder.path / "status.json").read_text())["state"] == "running"
