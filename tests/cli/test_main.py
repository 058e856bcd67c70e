"""The command's shell: quick help without jax, exit codes, plain errors, overrides in both spellings."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.cli import main
from burnish.config.errors import BurnishError, UserError

HEAVY = ["jax", "jaxlib", "numpy", "optax", "pydantic", "rich", "yaml", "tokenizers"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_answers_in_half_a_second_best_of_five():
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "burnish", "--help"], capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - start)
        assert all(text in done.stdout for text in ("usage: burnish", *main.COMMANDS))
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("argv", [["--help"], ["config", "show", "--help"], *([command, "--help"] for command in main.COMMANDS)])
def test_help_imports_nothing_heavy(argv: list[str]):
    code = f"""
import sys
from burnish.cli.main import main
try:
    main({argv!r})
except SystemExit as end:
    assert end.code == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run_python(code).splitlines()[-1] == "[]"


def test_importing_burnish_and_its_configuration_imports_no_jax():
    code = "import sys, burnish; before = set(sys.modules); burnish.Config(); burnish.load_config()"
    assert run_python(f"{code}; print('jax' in sys.modules, 'pydantic' in before)").split() == ["False", "False"]


def test_config_show_prints_every_value_with_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("training:\n  batch_size: 2\n")
    assert main.main(["config", "show", str(file), "run.seed=1", "--training.max_steps=7", "model.path=x=y"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "max_steps: 7  # command line --training.max_steps=7" in lines
    assert "seed: 1  # command line run.seed=1" in lines
    assert f"batch_size: 2  # {file}:2" in lines
    assert 'path: "x=y"  # command line model.path=x=y' in lines
    assert "epsilon: 0.2  # default" in lines


@pytest.mark.parametrize(
    "argv",
    [
        ["run.seed=1", "--run.name=ab"],
        ["--run.seed=1", "run.name=ab"],
        ["run.seed=1", "--debug", "run.name=ab"],
    ],
)
def test_overrides_work_without_a_file_in_any_spelling_and_order(capsys: pytest.CaptureFixture[str], argv: list[str]):
    assert main.main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    assert "seed: 1  # command line" in out and "name: ab  # command line" in out


def test_an_override_with_blanks_and_dashes_is_one_value(capsys: pytest.CaptureFixture[str]):
    assert main.main(["config", "show", "--data.system_prompt=You are -- brief"]) == 0
    assert 'system_prompt: "You are -- brief"  #' in capsys.readouterr().out


def test_config_sizes_prints_the_plan_and_refuses_what_does_not_divide(capsys: pytest.CaptureFixture[str]):
    assert main.main(["config", "sizes", "training.batch_size=24", "training.train_micro_batch_size=4", "algorithm.num_generations=2"]) == 0
    said = capsys.readouterr().out
    assert "batch_size                           24      48  a step" in said and "train_micro_batch_size                4       8" in said
    assert main.main(["config", "sizes", "training.batch_size=24", "training.mini_batch_size=7"]) == 2
    assert "use mini_batch_size 6" in capsys.readouterr().err


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]):
    assert main.main(["config", "schema"]) == 0
    assert "training" in json.loads(capsys.readouterr().out)["properties"]


def test_bad_input_is_one_plain_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert main.main(["config", "show", "training.max_step=1"]) == 2
    captured = capsys.readouterr()
    expected = "error: training.max_step: there is no such key; did you mean `max_steps`? [command line training.max_step=1]\n"
    assert (captured.out, captured.err) == ("", expected)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]):
    assert main.main(["config", "show", "training.max_step=1", "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert main.main(["--debug", "config", "show", "training.max_step=1"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "COMMAND"),
        (["trian"], "trian"),
        (["config", "show", "--max-steps", "3"], "unrecognized arguments: --max-steps"),
        (["config", "schema", "run.seed=1"], "unrecognized arguments: run.seed=1"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str], argv: list[str], message: str):
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def ends_with(error: BaseException) -> int:
    """The exit code of a command, added for the test, that raises `error`."""

    def add_parser(subparsers: Any) -> None:
        subparsers.add_parser("fail")

    def run(args: argparse.Namespace) -> int:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "COMMANDS", {"fail": SimpleNamespace(add_parser=add_parser, run=run)})
        return main.main(["fail"])


def test_exit_codes_tell_bad_input_a_failed_run_and_an_interruption_apart(capsys: pytest.CaptureFixture[str]):
    assert ends_with(UserError("no such model folder")) == 2
    assert ends_with(BurnishError("the engine stopped")) == 1
    assert ends_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: no such model folder\nerror: the engine stopped\ninterrupted\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        ends_with(ZeroDivisionError())


def test_a_reader_that_stops_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "burnish", "config", "schema"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_colour_only_on_terminals(monkeypatch: pytest.MonkeyPatch):
    leader, follower = os.openpty()
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(follower, "w") as terminal:
        assert "\033[" in main._label(terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert main._label(terminal) == "error:"
    os.close(leader)
    with open(os.devnull, "w") as file:
        assert main._label(file) == "error:"
