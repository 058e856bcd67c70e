"""A run from the command line whose server is killed (R29): it goes on within the budget, and ends plainly beyond it."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import LORA, write_task

DOUBLE = Path(__file__).with_name("vllm_double.py")


def servers() -> list[int]:
    """Processes of doubles that this process has started and that live."""
    children = {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    return [pid for pid in children if str(DOUBLE).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Killer(threading.Thread):
    """Kills a server in the middle of steps, `kills` times, each when it has served a step since it came up."""

    def __init__(self, metrics: Path, kills: int) -> None:
        super().__init__(daemon=True)
        self._metrics, self._kills, self.killed, self.over = metrics, kills, list[int](), False

    def run(self) -> None:
        while len(self.killed) < self._kills and not self.over:
            steps, alive = self._steps(), [pid for pid in servers() if pid not in self.killed]
            while alive and not self.over and self._steps() <= steps:
                time.sleep(0.01)
            time.sleep(0.1)  # of the 0.4 s that the next step's answers take
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)
            time.sleep(0.01)

    def _steps(self) -> int:
        return len(self._metrics.read_text().splitlines()) if self._metrics.is_file() else 0


@pytest.mark.parametrize("kills", [1, 2])
def test_a_run_whose_server_is_killed(tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "model", config=tiny_config(width=16), alphabet="0123456789")
    config = write_task(tmp_path / "task", tmp_path / "model")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{DOUBLE}" --latency 0.4 --vocabulary 12 "$@"\n')
    program.chmod(0o755)
    run = tmp_path / "runs" / "first"
    options = {"python": str(program), "restarts": 1}
    killer = Killer(run / "metrics.jsonl", kills)
    killer.start()
    changes = ["rollout.engine=vllm", f"rollout.options={json.dumps(options)}", "training.max_steps=6", "data.eval=[]"]
    code = main(["train", str(config), f"run.folder={tmp_path / 'runs'}", *LORA, *changes])
    killer.over = True
    killer.join(10)
    said = capsys.readouterr().err
    status = json.loads((run / "status.json").read_text())
    assert len(killer.killed) == kills and servers() == []
    if kills == 1:
        assert code == 0 and status["state"] == "complete" and len((run / "metrics.jsonl").read_text().splitlines()) == 6
    else:
        assert code == 1 and status["state"] == "failed"
        assert "failed 2 times and may be brought back 1 times: the server was killed by SIGKILL" in said
