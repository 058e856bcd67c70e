"""`docs/configuration.md` is what the models say: every key, each with a meaning; and the recipes are what the JSON schema allows."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import yaml
from pydantic import Field

from burnish.config.algorithms import AlgorithmConfig, AnyAlgorithmConfig, GSPOConfig, PPOConfig
from burnish.config.loader import json_schema
from burnish.config.mistakes import outline
from burnish.config.reference import LOSSES, kind, reference, rows, sections
from burnish.config.schema import Config, RolloutConfig, TrainingConfig
from burnish.config.section import Many, Positive
from burnish.config.tuning import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS: tuple[type[AlgorithmConfig], ...] = get_args(get_args(AnyAlgorithmConfig)[0])


def test_the_committed_page_is_what_the_models_say():
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == reference(), "run: burnish config docs > docs/configuration.md"


def test_every_field_of_every_section_has_a_meaning():
    models: set = set(CONFIGS.values())
    while inner := {m for model in models for info in model.model_fields.values() for m in sections(info.annotation)} - models:
        models |= inner
    assert set(ALGORITHMS) < models and len(models) > 25
    silent = [f"{m.__name__}.{name}" for m in models for name, info in m.model_fields.items() if not (info.description or "").strip()]
    assert silent == []


def test_every_key_of_every_algorithm_has_a_row_with_its_own_default():
    """A key that the branch's own table hasn't must be in one of the shared tables, with the branch's default."""
    page = reference()
    shared, *branches = re.split(r"^### `algorithm: \{name: (\w+)\}`$", page, flags=re.MULTILINE)
    own = dict(zip(branches[::2], branches[1::2], strict=True))
    own = {name: text.partition("\n## ")[0] for name, text in own.items()}
    every, clipped = shared.split("Those with a clipped ratio")
    for model in ALGORITHMS:
        name = model.model_fields["name"].default
        for key, words, default, meaning in rows(model, prefix="algorithm."):
            if key == "algorithm.name":
                continue
            row = f"| `{key}` | {words.replace('|', '')} | {default} |"
            where = own[name] if f"| `{key}` |" in own[name] else clipped if f"| `{key}` |" in clipped else every
            assert row in where and meaning, (name, row)


def test_every_other_key_has_a_row():
    page = reference()
    for path in outline(Config, {}):
        parts = path.split(".")
        head = "\\.(N\\.)?".join(map(re.escape, parts))
        assert len(parts) == 1 or re.search(rf"^\| `{head}` \|", page, re.MULTILINE), path


def test_every_key_of_the_runs_on_rows_has_a_row():
    shared, _, own = reference().partition("# Runs on rows of data")
    for config in (CONFIGS[command] for command in ("sft", "dpo", "distill", "reward-model")):
        for path in outline(config, {"loss": {"name": "sigmoid"}}):
            head = "\\.(N\\.)?".join(map(re.escape, path.split(".")))
            where = shared + own if path.split(".")[0] in ("model", "data", "checkpoint", "run") else own
            assert "." not in path or re.search(rf"^\| `{head}` \|", where, re.MULTILINE), path
    for loss in LOSSES:
        assert all(f"| `loss.{name}` |" in own for name in loss.model_fields)


@pytest.mark.parametrize(
    "annotation, words",
    [
        (Positive, "whole number > 0"),
        (Positive | None, "whole number > 0 or `null`"),
        (Annotated[float, Field(ge=0, lt=1)], "number ≥ 0, < 1"),
        (Annotated[int, Field(ge=0, lt=2**31)], "whole number ≥ 0, < 2147483648"),
        (Annotated[str, Field(pattern="^a$")], "text like `^a$`"),
        (bool | Literal["auto"], "`true` or `false` or `auto`"),
        (Many[str], "list of text"),
        (dict[str, Any], "mapping"),
        (dict[Literal["data", "tp"], Positive], "mapping of `data` or `tp` to whole number > 0"),
    ],
)
def test_types_read_as_words(annotation: Any, words: str):
    assert kind(annotation) == words


def test_defaults_are_those_of_the_instance_not_of_the_class():
    found = {key: default for key, _, default, _ in rows(PPOConfig, prefix="algorithm.")}
    assert found["algorithm.critic.optimizer.learning_rate"] == "`1e-05`" and found["algorithm.num_generations"] == "`1`"
    assert {key: default for key, _, default, _ in rows(GSPOConfig)}["epsilon"] == "`0.0003`"
    assert {key: default for key, _, default, _ in rows(TrainingConfig)}["optimizer.learning_rate"] == "`1e-06`"
    assert {key: default for key, _, default, _ in rows(RolloutConfig)}["sampling.stop_strings"] == "`[]`"


# ---------------------------------------------------------------------------------------------------------------- the JSON schema


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """What a value breaks of a schema, as far as our schema goes: references, unions, types, enumerations, closed objects, bounds."""
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    if "discriminator" in schema:
        branch = schema["discriminator"]["mapping"].get(value.get("name", "grpo"))
        return violations(value, {"$ref": branch}, root, path) if branch else [f"{path}: no branch {value['name']}"]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return [] if any(not violations(value, option, root, path) for option in options) else [f"{path}: {value!r} fits no alternative"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    wanted = schema.get("type")
    if wanted and (not isinstance(value, kinds[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        return [f"{path}: {value!r} is no {wanted}"]
    if "enum" in schema and value not in schema["enum"] or "const" in schema and value != schema["const"]:
        return [f"{path}: {value!r} isn't allowed"]
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return [f"{path}: {value!r} is too small"]
    found = []
    if isinstance(value, dict):
        known, open_ended = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{path}.{key}: missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            inner = known.get(key, open_ended)
            found += (
                [f"{path}.{key}: unknown"] if inner is False else violations(item, {} if inner is True else inner, root, f"{path}.{key}")
            )
    if isinstance(value, list):
        found += [fault for i, item in enumerate(value) for fault in violations(item, schema.get("items", {}), root, f"{path}.{i}")]
    return found


RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def plain(text: str) -> Any:
    """As an editor's checker reads it, with numbers as YAML 1.2 has them."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+"), list("-+0123456789."))
    return yaml.load(text, Loader)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_schema_accepts_every_recipe(recipe: Path):
    config = CONFIGS.get(recipe.name.partition("_")[0], Config)
    schema = json.loads(json_schema(config))
    assert violations(plain(recipe.read_text()), schema, schema) == []


@pytest.mark.parametrize(
    "text, fault",
    [
        ("training: {max_step: 3}", ".training.max_step: unknown"),
        ("trainig: {}", ".trainig: unknown"),
        ("training: {max_steps: 0}", ".training.max_steps: 0 is too small"),
        ("training: {max_steps: true}", ".training.max_steps: True is no integer"),
        ("algorithm: {name: grpo, gae_lambda: 0.9}", ".algorithm.gae_lambda: unknown"),
        ("algorithm: {name: grppo}", ".algorithm: no branch grppo"),
        ("rewards: [{weight: 2}]", ".rewards.0.fn: missing"),
        ("extends: 3", ".extends: 3 fits no alternative"),
    ],
)
def test_the_schema_finds_what_the_loader_would(text: str, fault: str):
    schema = json.loads(json_schema())
    assert violations(plain(text), schema, schema) == [fault]
