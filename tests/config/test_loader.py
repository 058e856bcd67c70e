"""Four sources become one configuration, key by key, and every value knows its source.

Locks: the order of sources; that a partial override keeps its siblings (B125); that lists replace; that a tagged union starts afresh when
its tag changes; `extends`; interpolation; that what is written for a run reads back as the same configuration.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from burnish.config.errors import ConfigError
from burnish.config.loader import dump_config, json_schema, load, load_config
from burnish.config.schema import Config
from burnish.config.section import Section


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def at(config: BaseModel, path: str) -> Any:
    value: Any = config.model_dump()
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    return value


FULL = """
model: {path: some/model, lora: {rank: 4, alpha: 8, targets: [q, v]}}
data: {train: [{path: a.jsonl, weight: 2}, {recipe: r.py, options: {size: 10, ops: [1, 2]}}], prompt_key: question}
rewards: [{fn: exact, weight: 0.5, options: {strict: true}}, {fn: format}]
algorithm: {epsilon: 0.3, num_generations: 4}
rollout: {slots: 7, sampling: {temperature: 0.7, top_p: 0.9}}
cluster: {actor: {axes: {data: 2}}}
training: {max_steps: 11, optimizer: {name: lion, learning_rate: 1e-4, b2: 0.5}}
run: {name: full, seed: 3}
"""

PARTIAL = {
    "training.optimizer.learning_rate=1e-5": (1e-5, {"training.optimizer.b2": 0.5, "training.optimizer.name": "lion"}),
    "training.max_steps=20": (20, {"training.optimizer.learning_rate": 1e-4}),
    "model.lora.alpha=16": (16.0, {"model.lora.rank": 4, "model.lora.targets": ("q", "v"), "model.path": "some/model"}),
    "model.path=other": ("other", {"model.lora.rank": 4}),
    "rollout.sampling.top_k=5": (5, {"rollout.sampling.temperature": 0.7, "rollout.sampling.top_p": 0.9, "rollout.slots": 7}),
    "rollout.slots=9": (9, {"rollout.sampling.temperature": 0.7}),
    "algorithm.beta=0.1": (0.1, {"algorithm.epsilon": 0.3, "algorithm.num_generations": 4}),
    "cluster.actor.axes.fsdp=2": (2, {"cluster.actor.axes.data": 2}),
    "data.prompt_key=prompt": ("prompt", {"data.train.0.path": "a.jsonl"}),
    "data.train.1.options.size=99": (99, {"data.train.1.options.ops": [1, 2], "data.train.1.recipe": "r.py", "data.train.0.weight": 2.0}),
    "rewards.0.weight=3": (3.0, {"rewards.0.fn": "exact", "rewards.0.options.strict": True, "rewards.1.fn": "format"}),
    "run.seed=4": (4, {"run.name": "full"}),
}


@pytest.mark.parametrize("override", PARTIAL)
@pytest.mark.parametrize("source", ["command line", "environment", "file"])
def test_b125_a_partial_override_keeps_its_siblings(tmp_path: Path, override: str, source: str):
    base = write(tmp_path / "base.yaml", FULL)
    (key, _, text), (value, siblings) = override.partition("="), PARTIAL[override]
    if source == "command line":
        config = load_config(base, [override], {}).config
    elif source == "environment":
        config = load_config(base, [], {f"BURNISH__{key.upper().replace('.', '__')}": text}).config
    else:
        nested = text
        for part in reversed(key.split(".")):
            nested = f'{{"{part}": {nested}}}'
        config = load_config(write(tmp_path / "over.yaml", f"extends: base.yaml\n{nested[1:-1]}\n"), [], {}).config
    assert at(config, key) == value
    assert {path: at(config, path) for path in siblings} == siblings


def test_sources_override_in_order_and_provenance_says_so(tmp_path: Path):
    write(tmp_path / "base.yaml", "training: {max_steps: 1, batch_size: 1}\nrun: {seed: 1, name: base}\nalgorithm: {beta: 0.5}\n")
    file = write(tmp_path / "run.yaml", "extends: base.yaml\ntraining:\n  max_steps: 2\n  batch_size: 2\nrun: {seed: 2}\n")
    resolved = load_config(file, ["training.max_steps=4"], {"BURNISH__RUN__SEED": "3", "BURNISH_CACHE": "/x", "HOME": "/y"})
    expected = {
        "training.max_steps": (4, "command line training.max_steps=4"),
        "run.seed": (3, "environment BURNISH__RUN__SEED"),
        "training.batch_size": (2, f"{file}:4"),
        "run.name": ("base", f"{tmp_path / 'base.yaml'}:2"),
        "algorithm.beta": (0.5, f"{tmp_path / 'base.yaml'}:3"),
        "algorithm.epsilon": (0.2, "default"),
    }
    assert {key: (at(resolved.config, key), str(resolved.provenance[key])) for key in expected} == expected
    assert resolved.base == tmp_path


def test_provenance_covers_every_value_and_nothing_else(tmp_path: Path):
    resolved = load_config(write(tmp_path / "run.yaml", FULL), [], {})
    assert resolved.provenance.keys() >= {"rewards.0.fn", "rewards.0.options.strict", "data.train.1.options.ops.0", "model.lora.targets.1"}
    assert list(resolved.provenance) == [leaf for name, value in resolved.config.model_dump().items() for leaf in leaves_of(value, name)]
    assert resolved.provenance["rewards.0.timeout_s"].kind == "default"


def test_lists_replace_and_become_tuples(tmp_path: Path):
    resolved = load_config(write(tmp_path / "run.yaml", FULL), ["model.lora.targets=[o]", "rewards=[{fn: numeric}]"], {})
    assert resolved.config.model.lora is not None
    assert resolved.config.model.lora.targets == ("o",)
    assert [reward.fn for reward in resolved.config.rewards] == ["numeric"]
    assert str(resolved.provenance["rewards.0.weight"]) == "default"


def test_a_later_override_of_the_same_key_wins():
    assert load_config(None, ["run.seed=1", "--run.seed=2"], {}).config.run.seed == 2


def test_null_drops_a_section_and_an_empty_mapping_brings_its_defaults(tmp_path: Path):
    file = write(tmp_path / "run.yaml", FULL)
    assert load_config(file, ["model.lora=null"], {}).config.model.lora is None
    lora = load_config(None, ["model.lora={}"], {}).config.model.lora
    assert lora is not None and lora.rank == 16


def test_overrides_are_scalars_or_flow_collections_and_a_plain_text_is_taken_whole():
    overrides = [
        "data.system_prompt=Answer: yes # really",
        "training.optimizer.eps=1e-4",
        "data.chat_template_kwargs={a: [1, on], b: 'x y'}",
    ]
    config = load_config(None, [*overrides, "rollout.sampling.stop_strings=['\\n', \"\\n\"]", "run.name=true-ish"], {}).config
    assert config.data.system_prompt == "Answer: yes # really"
    assert config.training.optimizer.eps == 1e-4
    assert config.data.chat_template_kwargs == {"a": [1, "on"], "b": "x y"}
    assert config.rollout.sampling.stop_strings == ("\\n", "\n")


# Tagged unions: switching the tag replaces the siblings.


class Circle(Section):
    name: Literal["circle"] = "circle"
    radius: float = 1.0
    width: int = 1


class Square(Section):
    name: Literal["square"] = "square"
    side: float = 2.0
    width: int = 5


class Drawing(Section):
    shape: Annotated[Circle | Square, Field(discriminator="name")] = Circle(radius=3.0)
    size: int = 1


def test_b125_a_section_default_that_differs_from_its_class_survives_a_partial_override():
    assert load(Drawing, None, ["shape.width=7"], {}).config.shape == Circle(radius=3.0, width=7)


def test_switching_the_tag_of_a_union_replaces_its_siblings(tmp_path: Path):
    file = write(tmp_path / "a.yaml", "shape: {radius: 7, width: 9}\nsize: 4\n")
    drawing = load(Drawing, file, ["shape.side=3", "shape.name=square"], {})
    assert drawing.config == Drawing(shape=Square(side=3.0, width=5), size=4)
    assert str(drawing.provenance["shape.width"]) == "default"


def test_settings_that_a_switch_of_the_tag_drops_are_noted_with_both_writers(tmp_path: Path):
    file = write(tmp_path / "a.yaml", "shape:\n  radius: 7\n  width: 9\nsize: 4\n")
    (note,) = load(Drawing, file, ["shape.name=square", "shape.width=2"], {}).notes
    assert note == (
        "shape.name is now square [command line shape.name=square] and was circle; what was set for that one no longer counts: "
        f"shape.radius [{file}:2]"
    )
    over = write(tmp_path / "b.yaml", "extends: a.yaml\nshape: {name: square}\n")
    (note,) = load(Drawing, over, [], {}).notes
    assert note.startswith(f"shape.name is now square [{over}:2]") and note.endswith(f"shape.radius [{file}:2], shape.width [{file}:3]")


@pytest.mark.parametrize("overrides", [[], ["shape.name=circle"], ["shape.width=3"], ["shape={name: square, radius: 1}"]])
def test_what_drops_nothing_unseen_needs_no_note(tmp_path: Path, overrides: list[str]):
    file = write(tmp_path / "a.yaml", "shape: {name: circle, radius: 7}\n")
    if "square" in str(overrides):  # the old key is set again, so that it is an error and no silence
        with pytest.raises(ConfigError, match="shape.radius: there is no such key"):
            load(Drawing, file, overrides, {})
    else:
        assert load(Drawing, file, overrides, {}).notes == ()


def test_a_tag_on_the_command_line_keeps_what_the_environment_says_beside_it():
    """It was dropped without a word, as if it had belonged to the algorithm before."""
    resolved = load_config(None, ["algorithm.name=rloo"], {"BURNISH__ALGORITHM__BETA": "0.5"})
    assert (resolved.config.algorithm.name, resolved.config.algorithm.beta) == ("rloo", 0.5)
    assert resolved.provenance["algorithm.beta"].kind == "environment"
    with pytest.raises(ConfigError, match="algorithm.scale_rewards: there is no such key"):
        load_config(None, ["algorithm.name=rloo"], {"BURNISH__ALGORITHM__SCALE_REWARDS": "none"})


def test_naming_the_same_tag_keeps_the_siblings(tmp_path: Path):
    file = write(tmp_path / "a.yaml", "shape: {name: circle, width: 9}\n")
    assert load(Drawing, file, ["shape.name=circle"], {}).config.shape == Circle(radius=3.0, width=9)


def test_mistakes_in_a_union_name_the_branch_that_was_chosen():
    with pytest.raises(ConfigError) as caught:
        load(Drawing, None, ["shape.name=square", "shape.radus=1", "shape.sied=1"], {})
    found = [str(mistake).split(" [")[0] for mistake in caught.value.mistakes]
    assert found == [
        "shape.radus: there is no such key; known here: name, side, width",
        "shape.sied: there is no such key; did you mean `side`?",
    ]
    with pytest.raises(ConfigError, match=r"shape.name: expected 'circle', 'square', got 'sqare'; did you mean `square`\?"):
        load(Drawing, None, ["shape.name=sqare"], {})


# extends


def test_extends_takes_a_list_in_which_later_files_win(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "a.yaml", "run: {seed: 1, name: a}\n")
    write(tmp_path / "sub" / "c.yaml", "training: {batch_size: 3}\n")
    write(tmp_path / "sub" / "b.yaml", "extends: [c.yaml]\nrun: {seed: 2}\n")
    config = load_config(write(tmp_path / "run.yaml", "extends: [a.yaml, sub/b.yaml]\n"), [], {}).config
    assert (config.run.seed, config.run.name, config.training.batch_size) == (2, "a", 3)


def test_extends_refuses_cycles_missing_files_and_floods(tmp_path: Path):
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    with pytest.raises(ConfigError, match="extends itself, by way of a.yaml -> b.yaml"):
        load_config(write(tmp_path / "b.yaml", "extends: a.yaml\n").with_name("a.yaml"), [], {})
    file = write(tmp_path / "run.yaml", "run: {seed: 1}\nextends: bb.yaml\n")
    with pytest.raises(ConfigError, match=r"no configuration file .*bb.yaml; did you mean `b.yaml`\? \[.*run.yaml:2\]"):
        load_config(file, [], {})
    write(tmp_path / "f0.yaml", "run: {seed: 1}\n")
    for level in range(1, 20):
        write(tmp_path / f"f{level}.yaml", f"extends: [f{level - 1}.yaml, f{level - 1}.yaml]\n")
    with pytest.raises(ConfigError, match="brings in more than 50 files"):
        load_config(tmp_path / "f19.yaml", [], {})
    with pytest.raises(ConfigError, match="extends: expected a file name or a list of file names"):
        load_config(write(tmp_path / "bad.yaml", "extends: {a: 1}\n"), [], {})


def test_a_missing_file_names_the_nearest(tmp_path: Path):
    write(tmp_path / "quickstart.yaml", "")
    with pytest.raises(ConfigError, match=r"did you mean `quickstart.yaml`\? \[command line\]"):
        load_config(tmp_path / "quickstrat.yaml", [], {})


# Interpolation


def test_a_reference_takes_the_value_and_its_type_and_sees_overrides(tmp_path: Path):
    text = """
    training: {batch_size: "${algorithm.num_generations}", mini_batch_size: "${training.batch_size}"}
    data: {train: [{path: a.jsonl}], eval: "${data.train}", system_prompt: "lr ${training.optimizer.learning_rate}, $${plain}"}
    run: {name: "${data.train.0.path}-${run.seed}"}
    """
    resolved = load_config(write(tmp_path / "run.yaml", text), ["algorithm.num_generations=6", "run.seed=5"], {})
    config = resolved.config
    assert (config.training.batch_size, config.training.mini_batch_size) == (6, 6)
    assert config.data.eval == config.data.train and config.run.name == "a.jsonl-5"
    assert config.data.system_prompt == "lr 1e-06, ${plain}"
    assert str(resolved.provenance["data.eval.0.path"]) == f"{tmp_path / 'run.yaml'}:3"


REFERENCES = {
    "no such key": ("${trainin.max_steps}", "names no key; did you mean `training.max_steps`?"),
    "not closed": ("${run.seed", "${ names no key"),
    "code": ("${__import__('os')}", "names no key"),
    "environment": ("${oc.env:HOME}", "names no key"),
    "itself": ("${run.folder}", "refers to itself"),
    "a section inside a text": ("a ${training} b", "is no single value"),
}


@pytest.mark.parametrize("text, message", REFERENCES.values(), ids=REFERENCES.keys())
def test_a_bad_reference_is_a_mistake_with_its_source(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"run.folder={text}"], {})
    (mistake,) = caught.value.mistakes
    assert (mistake.path, mistake.source) == ("run.folder", f"command line run.folder={text}")
    assert message in mistake.message


def test_a_default_is_not_interpolated():
    class Plain(Section):
        pattern: str = "${x}"

    assert load(Plain, None, [], {}).config.pattern == "${x}"


def test_references_can_neither_blow_up_nor_recurse_without_end(tmp_path: Path):
    bomb = "\n".join(f'    k{i}: ["${{data.chat_template_kwargs.k{i + 1}}}", "${{data.chat_template_kwargs.k{i + 1}}}"]' for i in range(30))
    with pytest.raises(ConfigError, match="expand to too much"):
        load_config(write(tmp_path / "bomb.yaml", f"data:\n  chat_template_kwargs:\n{bomb}\n    k30: x\n"), [], {})
    with pytest.raises(ConfigError, match="refers to itself"):
        load_config(None, ["data.chat_template_kwargs={a: ['${data}']}"], {})


# What is written for a run reads back


def test_a_dump_reads_back_equal_and_names_sources(tmp_path: Path):
    overrides = ["run.seed=9", "data.system_prompt=a\n# b: 'c' \"d\" $${x}"]
    resolved = load_config(write(tmp_path / "run.yaml", FULL), overrides, {})
    assert resolved.config.data.system_prompt == "a\n# b: 'c' \"d\" ${x}"
    text = dump_config(resolved)
    again = load_config(write(tmp_path / "config.yaml", text), [], {})
    assert again.config == resolved.config
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 9  # command line run.seed=9" in lines
    assert f"- path: a.jsonl  # {tmp_path / 'run.yaml'}:3" in lines
    assert "beta: 0.0  # default" in lines


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_plain_value_survives_dump_and_load(tmp_path_factory: pytest.TempPathFactory, value: Any):
    config = Config.model_validate({"data": {"chat_template_kwargs": {"value": value}}})
    resolved = load_config(None, [], {})
    kwargs = {f"data.chat_template_kwargs.{leaf}": resolved.provenance["run.seed"] for leaf in leaves_of(value, "value")}
    dumped = dump_config(type(resolved)(config, resolved.provenance | kwargs, Path()))
    again = load_config(write(tmp_path_factory.mktemp("dump") / "c.yaml", dumped), [], {}).config
    assert again.data.chat_template_kwargs == {"value": value}


def leaves_of(value: Any, path: str) -> list[str]:
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    return [leaf for key, item in pairs for leaf in leaves_of(item, f"{path}.{key}")] if pairs else [path]


def test_the_defaults_and_the_quoted_types_are_a_valid_configuration():
    assert load_config(None, [], {}).config == Config()


def test_python_users_may_give_lists_where_the_schema_has_tuples_but_items_stay_strict():
    from burnish.config.schema import SamplingConfig

    assert SamplingConfig(stop_strings=["a"]).stop_strings == ("a",)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="valid string"):
        SamplingConfig(stop_strings=[3])  # pyright: ignore[reportArgumentType]


def test_the_json_schema_documents_options_and_extends():
    import json

    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False and "extends" in schema["properties"]
    steps = schema["$defs"]["TrainingConfig"]["properties"]["max_steps"]
    assert steps["type"] == "integer" and steps["exclusiveMinimum"] == 0 and "published" in steps["description"]
