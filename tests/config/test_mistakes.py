"""Every mistake in a configuration is an error that names the key, what was got, where it was written, and the nearest name.

Locks: unknown keys at any depth and from any source; strict types; bounds; all mistakes at once; no partial guess. (B125, R53)
"""

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
