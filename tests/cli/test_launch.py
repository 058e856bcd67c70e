"""The files that start several processes: as they stand in docs/scale.md, and what they do with a launcher that is a stand-in."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.runs import Shell

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CONFIG = [ROOT / "recipes" / "quickstart.yaml", "run.name=Big_run", "cluster.actor.axes={data: 2, fsdp: 8}"]
SIZES = ["--processes", "2", "--devices", "8"]
STANDINS = {
    "burnish": """env | grep "^BURNISH__CLUSTER" | sort > "$TOLD/$BURNISH__CLUSTER__DISTRIBUTED__PROCESS_ID"
echo "$@" > "$TOLD/arguments"
exit $CODE""",
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" > "$TOLD/requeued"; fi',
    "srun": 'shift; SLURM_PROCID=0 "$@"; first=$?; SLURM_PROCID=1 "$@" || exit $?; exit $first',
}


def rendered(shell: Shell, launcher: str) -> str:
    code, out, err = shell("launch", launcher, *CONFIG, *SIZES)
    assert (code, err) == (0, "")
    return out.replace(f"{ROOT}/", "")


@pytest.mark.parametrize("launcher", ["slurm", "jobset"])
def test_the_file_is_the_one_in_the_docs(shell: Shell, launcher: str) -> None:
    name = {"slurm": "slurm.sh", "jobset": "jobset.yaml"}[launcher]
    expected = (GOLDEN / name).read_text()
    assert rendered(shell, launcher) == expected
    assert f"```text\n{expected}```" in (ROOT / "docs" / "scale.md").read_text()


def carry_out(program: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    """What every process was told, the arguments of the last, the exit code and whether the job went back to the queue."""
    commands, told = folder / "bin", folder / "told"
    for place in (commands, told):
        place.mkdir(exist_ok=True)
    for name, text in STANDINS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod((commands / name).stat().st_mode | stat.S_IXUSR)
    around = {"PATH": f"{commands}:{os.environ['PATH']}", "TOLD": str(told), "CODE": "0", **environment}
    ended = subprocess.run(program, cwd=folder, env=around, capture_output=True, text=True)
    assert ended.stderr == ""
    found = {path.name: path.read_text().splitlines() for path in told.iterdir()}
    for path in told.iterdir():
        path.unlink()
    return found | {"code": ended.returncode}


def settings(coordinator: str, index: int) -> list[str]:
    start = "BURNISH__CLUSTER__DISTRIBUTED__"
    return [f"{start}COORDINATOR={coordinator}", f"{start}NUM_PROCESSES=2", f"{start}PROCESS_ID={index}"]


TRAIN = "train recipes/quickstart.yaml run.name=Big_run cluster.actor.axes={data: 2, fsdp: 8}"


def test_slurms_file_starts_requeues_and_goes_on(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "44"}
    program = ["bash", str(GOLDEN / "slurm.sh")]
    first = carry_out(program, tmp_path, **slurm)
    assert first == {"0": settings("node7:8476", 0), "1": settings("node7:8476", 1), "arguments": [TRAIN], "code": 0}
    (tmp_path / "runs" / "Big_run").mkdir(parents=True)
    stopped = carry_out(program, tmp_path, **slurm, CODE="75")
    assert (stopped["arguments"], stopped["requeued"], stopped["code"]) == ([f"{TRAIN} --resume"], ["requeue 44"], 75)
    assert "requeued" not in (failed := carry_out(program, tmp_path, **slurm, CODE="1")) and failed["code"] == 1


def test_the_jobsets_pods_find_each_other_and_go_on(tmp_path: Path) -> None:
    document = yaml.safe_load((GOLDEN / "jobset.yaml").read_text())
    name = document["metadata"]["name"]
    assert (document["kind"], name) == ("JobSet", "big-run")
    [job] = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    [container] = spec["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    assert container["env"][-1]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    # A pod's host name is JOBSET-JOB-JOBINDEX-PODINDEX, its domain the jobset's name.
    host = f"{name}-{job['name']}-0-0.{name}"
    first = carry_out(container["command"], tmp_path, **values)
    assert first == {"1": settings(f"{host}:8476", 1), "arguments": [TRAIN], "code": 0}
    (tmp_path / "runs" / "Big_run").mkdir(parents=True)
    assert carry_out(container["command"], tmp_path, **values, CODE="75") | {"1": 0} == {
        "1": 0,
        "arguments": [f"{TRAIN} --resume"],
        "code": 75,
    }


def test_what_cannot_run_is_not_written(shell: Shell) -> None:
    code, out, err = shell("launch", "slurm", *CONFIG, "--processes", "3", "--devices", "8")
    assert (code, out) == (2, "") and "which 3 processes can't give in equal parts" in err
    code, out, err = shell("launch", "slurm", *CONFIG, "--processes", "0", "--devices", "8")
    assert (code, out) == (2, "") and "--processes is 0, and must be at least 1" in err
