"""Two processes that are one run make the updates of one process, of the same rows in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.checkpoint.saver import Saver
from burnish.config.errors import UserError
from burnish.rl.fleet import Fleet
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.distributed.processes import finish, free_port, start
from tests.distributed.worker import measure
from tests.rl.runs import make_learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVALUATED = [{"prompt": text, "answer": "1"} for text in ("5", "66", "7")]
RUNS: dict[str, dict[str, Any]] = {
    # Pieces of every weight in both processes; two updates a step; a reference, an anchor and moments that wait in the host's memory.
    "every weight": {
        "cluster": {"actor": {"axes": {"fsdp": 4}}, "offload_to_cpu": ["actor", "reference"]},
        "training": {"max_steps": 2, "mini_batch_size": 2},
        "algorithm": {"beta": 0.1},
    },
    # Three prompts a step for two processes, handed out one by one, so one of them has nothing to sample each time; lengths differ, rows of
    # padding fill up; and of ten rows the last isn't a whole batch.
    "adapter": {
        "cluster": {"actor": {"axes": {"data": 2, "tp": 2}}, "canary": True},
        "lora": {"rank": 2, "alpha": 4, "targets": ["q", "down"]},
        "training": {"max_steps": 5, "batch_size": 3, "rollout_micro_batch_size": 1, "tokens_per_device": 64, "compare": True},
        "eval_ds": EVALUATED,
        "once": True,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789+", scale=5.0)
    return folder


def of_one_process(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"cluster": {"actor": {}}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {who: tmp_path_factory.mktemp(who) for who in ("alone", "both")}


@pytest.fixture(scope="module")
def alone(model: Path, saved: dict[str, Path]) -> dict[str, Any]:
    """Each run on one device of this process."""
    runs = {name: of_one_process(run) for name, run in RUNS.items()}
    runs["every weight"] |= {"save": str(saved["alone"])}
    return {name: measure(model, run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def both(model: Path, saved: dict[str, Path], alone: dict[str, Any]) -> dict[str, Any]:
    """Each run in two processes, and the rest of the one that this process has saved."""
    runs = {
        "every weight": RUNS["every weight"] | {"save": str(saved["both"])},
        "adapter": RUNS["adapter"],
        "resumed": RUNS["every weight"] | {"save": str(saved["alone"]), "resume": 1},
    }
    port = free_port()

    def process(index: int) -> list[str]:
        distributed = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": index}
        return ["-m", "tests.distributed.worker", json.dumps({"model": str(model), "distributed": distributed, "runs": [*runs.values()]})]

    ended = finish([start(process(0)), start(process(1))], timeout_s=200)
    assert [code for code, _, _ in ended] == [0, 0], [err[-3000:] for _, _, err in ended]
    found = dict(zip(runs, json.loads(ended[0][1].splitlines()[-1]), strict=True))
    return found


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["rows"] == expected["rows"] and found["lengths"] == expected["lengths"]
    for name, values in expected["updates"].items():
        np.testing.assert_allclose(
            found["updates"][name], values, rtol=1e-4 if name == "optim/grad_norm" else 1e-5, atol=1e-5, err_msg=name
        )
    for step, values in zip(found["metrics"], expected["metrics"], strict=True):
        assert step == pytest.approx(values, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(alone: dict[str, Any], both: dict[str, Any], name: str) -> None:
    assert_same_run(both[name], alone[name])
    first_of_steps = both[name]["apart"][:: 2 if name == "every weight" else 1]
    assert max(first_of_steps) < 1e-5, "an engine that missed a sync would differ from the policy"
    assert len({*np.round(alone[name]["updates"]["policy/loss"], 6)}) == len(alone[name]["updates"]["policy/loss"]) > 2


def test_a_process_short_of_rows_and_the_end_of_the_data(both: dict[str, Any], alone: dict[str, Any]) -> None:
    assert [len(rows) for rows in both["adapter"]["rows"]] == [3, 3, 3], "three steps of the five, and the tenth row is left"
    assert len({*both["adapter"]["lengths"]}) > 2
    assert both["adapter"]["evaluations"] == {str(step): ways for step, ways in alone["adapter"]["evaluations"].items()}


def test_a_run_goes_on_in_another_number_of_processes(model: Path, both: Any, alone: Any, saved: dict[str, Path]) -> None:
    def rest(run: dict[str, Any]) -> dict[str, Any]:
        return {
            "rows": run["rows"][1:],
            "lengths": run["lengths"][16:],
            "updates": {name: values[2:] for name, values in run["updates"].items()},
            "metrics": run["metrics"][1:],
        }

    assert_same_run(both["resumed"], rest(alone["every weight"]))
    resumed = measure(model, of_one_process(RUNS["every weight"]) | {"save": str(saved["both"]), "resume": 1})
    assert_same_run(resumed, rest(both["every weight"]))


def test_a_saver_of_other_processes_is_refused(model: Path, tmp_path: Path) -> None:
    """Each process would write for itself."""
    with make_learner(model) as learner, pytest.raises(UserError, match="the saver is of other processes than the cluster"):
        learner.train(saver=Saver(tmp_path, fleet=Fleet()))
