"""Every mistake in a configuration is an error that names the key, what was got, where it was written, and the nearest name.

Locks: unknown keys at any depth and from any source; strict types; bounds; all mistakes at once; no partial guess. (B125, R53)
"""

import json
from pathlib import Path

import pytest

from burnish.config.errors import ConfigError, UserError
from burnish.config.loader import load_config

PLANTED = {
    "unknown section": ("trainig: {max_steps: 3}", "trainig: there is no such key; did you mean `training`?"),
    "unknown key, depth 2": ("training: {max_step: 3}", "training.max_step: there is no such key; did you mean `max_steps`?"),
    "unknown key, depth 3": (
        "training: {optimizer: {learning_ratee: 1.0}}",
        "training.optimizer.learning_ratee: there is no such key; did you mean `learning_rate`?",
    ),
    "unknown key in a list": ("rewards: [{fn: exact, wieght: 2}]", "rewards.0.wieght: there is no such key; did you mean `weight`?"),
    "unknown key under null's alternative": ("model: {lora: {rnk: 4}}", "model.lora.rnk: there is no such key; did you mean `rank`?"),
    "key of another section": ("max_steps: 3", "max_steps: there is no such key; did you mean `training.max_steps`?"),
    "key like no other": ("run: {zzz: 3}", "run.zzz: there is no such key; known here: folder, name, seed"),
    "dotted key in a file": ("training.max_steps: 3", "training.max_steps: there is no such key"),
    "text for a whole number": ("training: {max_steps: abc}", "training.max_steps: expected a whole number, got 'abc'"),
    "quoted number": ('training: {max_steps: "20"}', "training.max_steps: expected a whole number, got '20'"),
    "fraction for a whole number": ("training: {max_steps: 2.5}", "training.max_steps: expected a whole number, got 2.5"),
    "bool for a whole number": ("training: {batch_size: true}", "training.batch_size: expected a whole number, got true"),
    "bool for a number": ("algorithm: {epsilon: true}", "algorithm.epsilon: expected a number, got true"),
    "number for a bool": ("data: {shuffle: 1}", "data.shuffle: expected true or false, got 1"),
    "yes for a bool": ("data: {shuffle: yes}", "data.shuffle: expected true or false, got 'yes'"),
    "number for a text": ("model: {path: 3}", "model.path: expected a text, got 3"),
    "nan": ("training: {optimizer: {b1: .nan}}", "training.optimizer.b1: expected a finite number, got .nan"),
    "infinity": ("training: {optimizer: {learning_rate: 1e999}}", "training.optimizer.learning_rate: expected a finite number, got .inf"),
    "zero where positive": ("training: {max_steps: 0}", "training.max_steps: must be greater than 0, got 0"),
    "below the least": ("algorithm: {beta: -0.1}", "algorithm.beta: must be at least 0, got -0.1"),
    "above the most": ("rollout: {sampling: {top_p: 1.5}}", "rollout.sampling.top_p: must be at most 1, got 1.5"),
    "not one of the choices": (
        "training: {optimizer: {schedule: cosin}}",
        "training.optimizer.schedule: expected 'constant', 'linear' or 'cosine', got 'cosin'; did you mean `cosine`?",
    ),
    "neither branch of a union": ("training: {remat: 3}", "training.remat: expected true or false or 'auto' or 'nested', got 3"),
    "unknown axis": ("cluster: {actor: {axes: {dataa: 2}}}", "cluster.actor.axes.dataa: expected 'data', 'fsdp' or 'tp', got 'dataa'"),
    "value for a section": ("training: 5", "training: expected a mapping of options, got 5"),
    "empty section": ("training:", "training: expected a mapping of options, got null"),
    "mapping for a list": ("rewards: {fn: exact}", "rewards: expected a list, got a mapping"),
    "list for a value": ("training: {max_steps: [1]}", "training.max_steps: expected a whole number, got a list"),
    "missing key": ("rewards: [{weight: 2}]", "rewards.0.fn: is needed and not set"),
    "path in a run's name": ("run: {name: ../x}", "run.name: must match"),
    "keys that exclude each other": ("data: {train: [{path: a, recipe: b}]}", "data.train.0: a source needs exactly one of"),
    "keys that need each other": ("algorithm: {fixed_length: 10}", "algorithm: `fixed_length` goes with"),
    "option of another algorithm": (
        "algorithm: {name: grpo, gae_lambda: 0.9}",
        "algorithm.gae_lambda: there is no such key; it is an option of ppo",
    ),
    "option of another algorithm, misspelt": (
        "algorithm: {name: gspo, levle: token}",
        "algorithm.levle: there is no such key; did you mean `level`?",
    ),
    "mesh that doesn't exist": ("cluster: {rolout: {axes: {data: 2}}}", "cluster.rolout: there is no such key; did you mean `rollout`?"),
    "axis without devices": ("cluster: {actor: {axes: {data: 0}}}", "cluster.actor.axes.data: must be greater than 0, got 0"),
    "interpolation to nowhere": ('run: {seed: "${run.sed}"}', "run.seed: ${run.sed} names no key"),
    "interpolation to itself": ('run: {seed: "${run.seed}"}', "run.seed: refers to itself: run.seed"),
    "key written twice": ("run: {seed: 1, seed: 1}", "run.seed: the key is written twice, first in line 2"),
    "Python object": (
        "model: {path: !!python/object/apply:os.getcwd []}",
        "model.path: the tag !!python/object/apply:os.getcwd is refused",
    ),
    "file that can't be extended": ("extends: [3]", "extends: expected a file name or a list of file names"),
    "two ways to cut a batch": (
        "training: {tokens_per_device: 900, train_micro_batch_size: 2}",
        "training: `tokens_per_device` is 900 and",
    ),
    "null for a value": ("training: {max_steps: null}", "training.max_steps: expected a whole number, got null"),
}


def mistakes(path: Path | None = None, *overrides: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, environ)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.parametrize("text, message", PLANTED.values(), ids=PLANTED.keys())
def test_r53_a_mistake_in_a_file_says_key_fault_and_line(tmp_path: Path, text: str, message: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"# a comment\n{text}\n")
    (mistake,) = mistakes(file)
    assert mistake.startswith(message)
    assert mistake.endswith(f"[{file}:2]")


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "a/b", "/etc", "a;touch x", "$(id)", "`id`", "a b", "a\nb", "ab\n", "-rf", ".hidden", "", "a" * 101, "a" * 300, "é"],
)
def test_r52_a_runs_name_that_could_leave_the_folder_or_a_line_is_refused(tmp_path: Path, name: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"run:\n  name: {json.dumps(name)}\n")
    (mistake,) = mistakes(file)
    assert mistake.startswith("run.name: must match ^[A-Za-z0-9]") and mistake.endswith(f"[{file}:2]")
    assert len(mistake) < 250 + len(str(file)) and "\n" not in mistake
    assert len(mistakes(BURNISH__RUN__NAME=json.dumps(name))) == 1


def test_r53_every_mistake_of_one_file_is_reported_at_once(tmp_path: Path):
    """Thirteen of them, from a typo at the top to one inside a list, each on its own line."""
    texts = """
trainig: {max_steps: 3}
model: {lora: {rnk: 4}}
data: {shuffle: 1, prompt_ky: x}
rewards: [{fn: exact, wieght: 2}, {weight: .nan}]
rollout: {slots: true, sampling: {temprature: 1}}
training: {batch_size: "8", optimizer: {learning_ratee: 1e-4}}
run: {seed: "${run.sed}", name: ../x}
"""
    file = tmp_path / "run.yaml"
    file.write_text(texts.lstrip())
    found = mistakes(file)
    where = {line.partition(":")[0]: int(line.rpartition(":")[2].rstrip("]")) for line in found}
    assert where == {
        "trainig": 1,
        "model.lora.rnk": 2,
        "data.prompt_ky": 3,
        "data.shuffle": 3,
        "rewards.0.wieght": 4,
        "rewards.1.fn": 4,
        "rewards.1.weight": 4,
        "rollout.slots": 5,
        "rollout.sampling.temprature": 5,
        "training.batch_size": 6,
        "training.optimizer.learning_ratee": 6,
        "run.seed": 7,
        "run.name": 7,
    }
    names = ("training", "rank", "prompt_key", "weight", "temperature", "learning_rate", "run.seed")
    assert [name for name in names if f"did you mean `{name}`?" not in str(found)] == []


@pytest.mark.parametrize(
    "variable, message",
    [
        ("BURNISH__TRAINING_MAX_STEPS", "training_max_steps: there is no such key"),
        ("BURNISH__TRAINING__MAX_STEP", "training.max_step: there is no such key; did you mean `max_steps`?"),
        ("BURNISH__OPTIMIZER__NAME", "optimizer: there is no such key; did you mean `training.optimizer`?"),
        ("BURNISH_TRAINING__MAX_STEPS", "is no variable of burnish's; did you mean `BURNISH__TRAINING__MAX_STEPS`?"),
        ("BURNISH___TRAINING__MAX_STEPS", "is no variable of burnish's; did you mean `BURNISH__TRAINING__MAX_STEPS`?"),
        ("burnish_training__max_steps", "is no variable of burnish's; did you mean `BURNISH__TRAINING__MAX_STEPS`?"),
    ],
)
def test_r53_a_variable_that_sets_nothing_is_a_mistake(variable: str, message: str):
    (mistake,) = mistakes(None, **{variable: "3"})
    assert mistake.startswith(message) and mistake.endswith(f"[environment {variable}]")


@pytest.mark.parametrize("variable", ["BURNISH_CACHE", "BURNISH_FAULTS", "BURNISHED__X", "MY_BURNISH__X"])
def test_other_variables_are_let_be(variable: str):
    assert load_config(None, [], {variable: "3"}).config == load_config(None, [], {}).config


def test_a_mistake_on_the_command_line_quotes_the_argument():
    expected = "training.max_steps: expected a whole number, got 'abc' [command line training.max_steps=abc]"
    assert mistakes(None, "training.max_steps=abc") == [expected]


def test_a_mistake_in_the_environment_names_the_variable():
    expected = "rollout.slot: there is no such key; did you mean `slots`? [environment BURNISH__ROLLOUT__SLOT]"
    assert mistakes(BURNISH__ROLLOUT__SLOT="3") == [expected]


def test_b125_nested_typos_on_the_command_line_are_errors_with_the_path():
    found = mistakes(None, "--training.optimizer.learning_ratee=1e-5", "--algorithm.nmu_generations=4", "--optimizer.lr=1e-5")
    assert [line.split(" [")[0] for line in found] == [
        "algorithm.nmu_generations: there is no such key; did you mean `num_generations`?",
        "optimizer: there is no such key; did you mean `training.optimizer`?",
        "training.optimizer.learning_ratee: there is no such key; did you mean `learning_rate`?",
    ]


def test_all_mistakes_of_all_sources_come_at_once(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {lora: {rank: 0}}\nrun: {seed: -1, seed: 2}\n")
    found = mistakes(file, "data.shufle=true", "nothing", BURNISH__TRAINING__MAX_STEPS="many")
    assert len(found) == 5
    for part in (
        "an override is written KEY=VALUE, e.g. training.max_steps=20 [command line nothing]",
        f"run.seed: the key is written twice, first in line 2 [{file}:2]",
        "data.shufle: there is no such key; did you mean `shuffle`? [command line data.shufle=true]",
        f"model.lora.rank: must be greater than 0, got 0 [{file}:1]",
        "training.max_steps: expected a whole number, got 'many' [environment BURNISH__TRAINING__MAX_STEPS]",
    ):
        assert part in found


def test_keys_that_exclude_each_other_name_both_writers(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  aggregation: fixed_length_mean\n  fixed_length: 100\n")
    (mistake,) = mistakes(file, "algorithm.aggregation=token_mean")
    assert mistake.endswith(f"[{file}:1; command line algorithm.aggregation=token_mean]")


@pytest.mark.parametrize(
    "override, variable",
    [
        ("training.max_steps=3", "BURNISH__TRAINING__MAX_STEPS"),
        ("model.lora=null", "BURNISH__MODEL__LORA__RANK"),
        ("model.lora.rank=4", "BURNISH__MODEL__LORA"),
    ],
)
def test_a_key_set_by_environment_and_command_line_is_an_error_naming_both(override: str, variable: str):
    value = "{rank: 4}" if variable.endswith("LORA") else "4"
    (mistake,) = mistakes(None, override, **{variable: value})
    assert "is set by the environment and on the command line" in mistake
    assert mistake.endswith(f"[environment {variable}; command line {override}]")


def test_different_keys_of_a_section_may_come_from_environment_and_command_line():
    resolved = load_config(None, ["model.lora={rank: 4}"], {"BURNISH__MODEL__LORA__ALPHA": "8"})
    assert resolved.config.model.lora is not None
    assert (resolved.config.model.lora.rank, resolved.config.model.lora.alpha) == (4, 8.0)


def test_a_config_error_is_a_user_error_with_exit_code_2():
    with pytest.raises(UserError) as caught:
        load_config(None, ["x=1", "y=2"], {})
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("2 mistakes in the configuration:\n  x: ")


def test_a_long_value_is_cut_and_a_line_break_does_not_break_the_message():
    (mistake,) = mistakes(None, "training.max_steps=" + "a" * 500)
    assert "got 'aaa" in mistake and "aaa... [" in mistake
    (mistake,) = mistakes(None, "training.max_steps=a\nb")
    assert "\n" not in mistake
