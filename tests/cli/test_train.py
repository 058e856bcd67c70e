"""`burnish train`, and what becomes of what it made: the run's folder, `burnish eval`, `burnish chat`; and what bad input leads to."""

import io
import json
import re
from pathlib import Path

import pytest
import yaml

from burnish.config.loader import load_config
from burnish.observe.run_folder import read_status
from burnish.observe.trace_reader import read
from tests.cli.runs import Shell

pytestmark = pytest.mark.slow  # each test compiles programs of its own


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_a_run_leaves_what_it_promises_and_can_be_evaluated_and_talked_to(
    task: Path, shell: Shell, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["model.lora={rank: 2, targets: [q, v]}"] if lora else []
    code, out, _ = shell("train", task, *options, "checkpoint.every=1", "--run.seed=5")
    run, result = Path("runs/first"), "adapter" if lora else "model"
    assert code == 0
    assert f"2 steps done; {run / result} holds the result. Talk to it: burnish chat {run}" in out
    assert "greedy:" in out and "points (95 % interval" in out

    # the folder
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"reward/mean", "policy/ratio_mean", "mismatch/mean", "staleness/max", "perf/step_seconds"} <= lines[0].keys()
    episodes = (run / "transcripts" / "step_1.jsonl").read_text().splitlines()
    assert len(episodes) == 8
    assert {"rollout", "update", "sync"} <= {one.name for one in read(run / "trace.pftrace").slices}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2"]
    assert (run / result / ("adapter_model.safetensors" if lora else "model.safetensors")).is_file()
    evaluations = json.loads((run / "eval.json").read_text())["evaluations"]
    assert [(entry["label"], entry["step"], len(entry["outcomes"])) for entry in evaluations] == [("before", 0, 12), ("after", 2, 12)]
    status = read_status(run)
    assert (status["state"], status["exit_code"]) == ("complete", 0)
    assert (run / "lock").read_text() == "", "the folder is still locked"

    # its configuration means the same from anywhere
    kept = load_config(run / "config.yaml").config
    assert (kept.run.seed, kept.training.max_steps) == (5, 2)
    assert Path(kept.rewards[0].fn.rpartition(":")[0]).is_absolute()
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["seed"] == 5

    # evaluated by another command: the same number
    where = run.resolve()
    monkeypatch.chdir(task.parent.parent)
    code, out, _ = shell("eval", where)
    after = evaluations[1]["metrics"]
    assert code == 0
    for label in ("greedy", "T=1"):
        assert f"{label}: {100 * after[f'eval/{label}/accuracy']:.1f} % of 6" in out

    # talked to
    monkeypatch.setattr("sys.stdin", io.StringIO("12\n/new\n12\n\n"))
    code, out, _ = shell("chat", where, "--max-tokens", "4")
    first, second = out.splitlines()[1:3]
    assert code == 0 and first == second and len(first) <= 4

    # and not overwritten
    monkeypatch.chdir(where.parent.parent)
    code, _, err = shell("train", task)
    assert code == 2 and "another run's files" in err


def test_eval_of_a_configuration_is_the_untrained_model_in_one_process(task: Path, shell: Shell) -> None:
    code, out, _ = shell("eval", task, "cluster.distributed={coordinator: 'node0:1', num_processes: 2, process_id: 1}")
    assert code == 0 and "greedy: " in out and "% of 6" in out
    assert not Path("runs").exists()


def test_data_beside_the_configuration_wins_over_the_working_directory(task: Path, shell: Shell) -> None:
    """As functions do, and as the run's own configuration says afterwards."""
    Path("eval.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    code, out, _ = shell("eval", task)
    assert code == 0 and "% of 6" in out


def replaced(task: Path, file: str, text: str) -> None:
    (task.parent / file).write_text(text)


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.path=nowhere", "there is no folder"),
        ("model.path=''", "`model.path` isn't set"),
        ("rewards=[{fn: './grade.py:not_a_function'}]", "expected a function"),
        ("rewards=[{fn: './grade.py:hit'}]", "did you mean `hits`"),
        ("rewards=[{fn: exakt}]", "did you mean `exact`"),
        ("rewards=[]", "name at least one reward"),
        ("rollout.max_prompt_tokens=2", "the prompts are too long"),
        ("rollout={max_prompt_tokens: 2, overlong_prompts: error}", "train.jsonl:0: the prompt has 4 tokens"),
        ("training.batch_size=11", "10"),
        ("training.mini_batch_size=3", "mini_batch_size is 3"),
        ("algorithm.num_generations=1", "num_generations is 1"),
        ("training.max_step=3", "did you mean `max_steps`"),
        ("training.optimizer.lerning_rate=3", "training.optimizer.lerning_rate"),
        ("cluster.actor.axes={data: 64}", "64"),
        ("data.eval=[]", "held-out"),
        ("data.train=[{path: nowhere.jsonl}]", "nowhere.jsonl"),
        ("reward_model={path: nowhere}", "rewards: no model at 'nowhere'"),
        ("reward_model={path: '${model.path}'}", "is a language model, which gives no score"),
        ("algorithm={name: ppo, critic: {warmup_steps: 2}}", "algorithm: the critic warms up for 2 steps"),
        (
            "algorithm={name: ppo, critic: {optimizer: {schedule: cosine, warmup_updates: 9}}}",
            "algorithm.critic.optimizer: a cosine schedule of 2 updates has no room after a warm-up of 9",
        ),
        ("algorithm={name: ppo, critic: {path: nowhere}}", "algorithm: no model at 'nowhere'"),
    ],
)
def test_what_cant_work_is_said_before_weights_are_loaded(task: Path, shell: Shell, override: str, message: str) -> None:
    """Exit code 2, plain text, and no run folder: the weights of this model can't even be read."""
    code, out, err = shell("train", task, f"model.path={broken_weights(task)}", *([override] if override else []))
    assert code == 2 and re.match("(note: .*\n)?error: ", err), err
    assert message in err and "Traceback" not in err and "weights" not in out
    assert not Path("runs").exists()


def broken_weights(task: Path) -> Path:
    """A copy of the model whose weights would raise when read."""
    model = Path(load_config(task).config.model.path)
    copy = task.parent / "broken"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(b"no tensors" if file.suffix == ".safetensors" else file.read_bytes())
    return copy


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("broken/config.json", '{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}', "MambaForCausalLM' isn't supported"),
        ("train.jsonl", "", "empty"),
        ("train.jsonl", '{"prompt": "1"}\n{"prompt": \n', "train.jsonl"),
        ("train.jsonl", '{"question": "1"}\n' * 5, "prompt"),
        ("grade.py", "def hits(completions, difficulty):\n    return [1.0 for _ in completions]\n", "difficulty"),
        ("grade.py", "import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("task.yaml", "model: [", "task.yaml"),
    ],
)
def test_files_that_cant_be_used_are_named_before_weights_are_loaded(task: Path, shell: Shell, file: str, text: str, message: str) -> None:
    model = broken_weights(task)
    replaced(task, file, text)
    code, _, err = shell("train", task, f"model.path={model}")
    assert (code, err.startswith("error: ")) == (2, True), err
    assert message in err and "Traceback" not in err
    assert not Path("runs").exists()


def test_weights_that_cant_be_read_leave_a_run_that_says_so(task: Path, shell: Shell) -> None:
    code, _, err = shell("train", task, f"model.path={broken_weights(task)}")
    assert code == 2 and err.startswith("error: model: ")
    status = read_status("runs/first")
    assert (status["state"], status["exit_code"]) == ("failed", 2) and "broken" in status["cause"]


def test_a_run_that_fails_says_why_in_its_folder(task: Path, shell: Shell) -> None:
    code, _, err = shell("train", task, "rewards=[{fn: './grade.py:raises'}]", "training.compare=false")
    assert code == 1 and "ZeroDivisionError: no tests were run (grade.py:6)" in err and "Traceback" not in err
    status = read_status("runs/first")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "no tests were run" in status["cause"]
    assert not Path("runs/first/model").exists()
    code, _, err = shell("chat", "runs/first")
    assert code == 2 and "hasn't finished" in err
