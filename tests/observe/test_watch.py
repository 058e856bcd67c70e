"""`burnish watch`: from the folder alone, to the end of the run, without touching it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.observe.run_folder import RunFolder
from tests.observe.made_runs import write_run


def test_it_says_how_a_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "made", steps=9, episodes=8, tokens=4)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "made  complete" and shown[1].endswith("ETA 0:00") and "step 9/9" in shown[1]
    assert any(line.startswith("trainer") for line in shown) and any(line.startswith("sampling") for line in shown)
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_it_follows_a_run_to_its_end_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.cli.watch.EVERY_S", 0.02)
    folder = RunFolder(tmp_path, "live")

    def steps() -> None:
        with folder, folder.metrics_path.open("a") as file:
            for step in (1, 2, 3):
                file.write(json.dumps({"step": step, "reward/mean": step / 4}) + "\n")
                file.flush()
                time.sleep(0.05)

    work = threading.Thread(target=steps)
    work.start()
    assert main(["watch", str(folder.path)]) == 0
    work.join()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("· ")[2] for line in said] == ["reward 0.250", "reward 0.500", "reward 0.750"]
