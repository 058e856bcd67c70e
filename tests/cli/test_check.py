"""`burnish check`: what it tells of a run, what it finds wrong, its exit codes, and its time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.rl.forecast.units import parse_rate, parse_size, size
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.cli.runs import Shell

ROOT = Path(__file__).resolve().parents[2]
TITLES = ("Run\n", "Batches", "Placement", "Memory of each device", "Programs, bytes", "Sync of the weights", "One step", "What would fail")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with nothing but its architecture."""
    folder: Path = tmp_path_factory.mktemp("bare")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789+")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


@pytest.fixture
def small(bare: Path) -> list[str]:
    sizes = ["rollout.max_prompt_tokens=8", "rollout.sampling.max_tokens=8", "training.batch_size=4", "algorithm.num_generations=2"]
    return [f"model.path={bare}", "model.precision=f32", "rollout.slots=4", *sizes]


def test_all_is_told_of_a_folder_without_weights_tokenizer_or_data(shell: Shell, small: list[str]) -> None:
    code, out, err = shell("check", *small, "--device-memory", "1GiB")
    assert (code, err) == (0, "")
    places = [out.index(f"{title}") for title in TITLES]
    assert places == sorted(places) and out.endswith("What would fail\n  nothing that can be told from here\n")
    assert "Notes\n  - 7 of 8 devices have no role" in out and "Nothing crosses" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "a mesh that cuts through a head": (["cluster.actor={axes: {tp: 4}}"], "cluster.actor: tp=4 doesn't divide num_kv_heads=2"),
        "a mesh that doesn't divide the vocabulary": (
            ["cluster.rollout={axes: {fsdp: 3}}"],
            "cluster.rollout: the mesh {'fsdp': 3} doesn't divide:\n    - embed: embed 16 by fsdp=3",
        ),
        "a reference that isn't there": (["cluster.reference={devices: 1}"], "cluster.reference gives devices to a role that this run"),
        "more devices than there are": (["--devices", "2", "cluster.actor={devices: 3}"], "needs 3 devices, this process has 2 devices"),
        "too little memory": (["--device-memory", "200KiB"], "--device-memory allows 200 KiB"),
        "sizes that don't divide": (["training.mini_batch_size=3"], "use mini_batch_size 2"),
        "a model that isn't there": (["model.path=nowhere"], "no model at 'nowhere'"),
        "a warm-up without an end": (["training.optimizer={schedule: cosine, warmup_updates: 100}"], "has no room after a warm-up of 100"),
    }.values(),
)
def test_what_would_fail_is_told_with_exit_code_2(shell: Shell, small: list[str], changes: list[str], message: str) -> None:
    code, out, _ = shell("check", *small, *changes)
    assert code == 2 and message in out.partition("What would fail")[2]


def test_without_a_configuration_it_is_the_model_that_is_missing(shell: Shell) -> None:
    code, out, _ = shell("check")
    assert code == 2 and "Batches\n" in out and "`model.path` isn't set" in out.partition("What would fail")[2]


def test_several_mistakes_are_told_together_and_what_can_be_told_is(shell: Shell, small: list[str]) -> None:
    code, out, _ = shell("check", *small, "training.mini_batch_size=3", "cluster.actor={axes: {tp: 4}}")
    assert code == 2 and "use mini_batch_size 2" in out and "cluster.actor: tp=4" in out and "Placement\n  role" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.max_step=1"], "did you mean `max_steps`?"),
        (["--device-memory", "95"], "--device-memory '95' isn't a size"),
        (["--link-speed", "5GiB"], "--link-speed '5GiB' isn't a rate"),
        (["--devices", "9"], "jax has started in this process already, with 8 devices"),
        (["--devices", "0"], "--devices 0: there must be at least one"),
    ],
)
def test_a_wrong_question_is_an_error(shell: Shell, small: list[str], arguments: list[str], message: str) -> None:
    code, out, err = shell("check", *small, *arguments)
    assert (code, out) == (2, "") and message in err


def test_sizes_and_rates_are_read_and_written() -> None:
    assert [parse_size(text, option="") for text in ("95GiB", "80 GB", "1.5KiB")] == [95 * 2**30, 80 * 10**9, 1536]
    assert [parse_rate(text, option="") for text in ("100GB/s", "400Gbit/s", "1MiB/s")] == [1e11, 5e10, 2**20]
    assert [size(n) for n in (0, 1023, 1024, 15 * 2**20, 4 * 2**30 + 2**29, 123 * 2**40)] == [
        "-",
        "1023 B",
        "1.00 KiB",
        "15.0 MiB",
        "4.50 GiB",
        "123 TiB",
    ]
    with pytest.raises(UserError, match="isn't a rate"):
        parse_rate("0GB/s", option="--link-speed")


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(("name", "weights"), [("llama31-8b", "8.03"), ("qwen3-32b", "32.8")])
def test_large_models_are_planned_on_64_devices_that_are_not_here_in_seconds(name: str, weights: str) -> None:
    argv = ["-m", "burnish", "check", f"recipes/scale/{name}.yaml", "--devices", "64", "--device-memory", "95GiB"]
    start = time.monotonic()
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    taken = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{weights} billion weights" in done.stdout and all(title in done.stdout for title in TITLES)
    assert taken < 60, "8 s where nothing else runs"
