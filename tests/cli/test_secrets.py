"""A canary among the options of a reward that fails with it in its words: it reaches the function and nothing that a run shows or keeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.config.loader import load_config
from burnish.observe.run_folder import read_status
from tests.cli.runs import Shell

CANARY = "sk-canary-91c2"
GRADE = """
def asks(completions, *, api_key):
    assert api_key == "sk-canary-" + "91c2"
    raise ConnectionError(f"401: the key {api_key!r} is refused")

def sometimes(completions, answer, *, api_key):
    if answer[0] in "02468":
        raise ConnectionError(f"401: {api_key}")
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def graded(task: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (task.parent / "grade.py").write_text(GRADE)
    monkeypatch.setenv("BURNISH__REWARDS__0__OPTIONS__API_KEY", CANARY)
    return task


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.name, path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fn, exit_code", [("asks", 1), ("sometimes", 0)])
def test_r54_no_output_of_a_run_has_a_secret(graded: Path, shell: Shell, fn: str, exit_code: int) -> None:
    (graded.parent / "over.yaml").write_text(f"extends: {graded.name}\nrewards: [{{fn: './grade.py:{fn}'}}]\n")
    code, out, err = shell("train", graded.parent / "over.yaml", "training.compare=false", "--debug")
    assert code == exit_code, err
    assert CANARY not in out + err
    found = dict(texts(Path("runs/first")))
    assert [name for name, text in found.items() if CANARY.encode() in text] == []
    assert b'api_key: "***"' in found["config.yaml"] and "status.json" in found
    if exit_code:
        assert "401: the key '***' is refused" in err and "401" in read_status("runs/first")["cause"]
    else:
        assert b"401: ***" in found["step_1.jsonl"] + found["step_2.jsonl"], "the transcript says why an episode has no reward"


def test_r54_a_kept_configuration_needs_its_secret_from_the_environment(
    graded: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, kept, _ = shell("config", "show", graded)
    assert code == 0 and CANARY not in kept
    (graded.parent / "config.yaml").write_text(kept)
    resolved = load_config(graded.parent / "config.yaml")
    assert resolved.config.rewards[0].options == {"api_key": CANARY}
    monkeypatch.delenv("BURNISH__REWARDS__0__OPTIONS__API_KEY")
    code, out, err = shell("train", graded.parent / "config.yaml")
    assert (code, out) == (2, "") and "rewards.0.options.api_key: is a secret that was written as ***: give it again" in err
    assert not Path("runs").exists()


def test_a_note_on_stderr_says_what_a_switch_of_the_algorithm_drops(task: Path, shell: Shell) -> None:
    code, out, err = shell("config", "show", task, "algorithm.name=rloo")
    assert code == 0 and "note:" not in out
    assert err == (
        "note: algorithm.name is now rloo [command line algorithm.name=rloo] and was grpo; what was set for that one no longer counts: "
        f"algorithm.num_generations [{task}:7]\n"
    )
