"""`docs/configuration.md`, written from the models: every key with its type, default, bounds and meaning.

Owns the page and how types read. What keys mean stands under the fields themselves. Called by `burnish config docs`; a test compares the
committed page with what is written here.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from burnish.config import documents
from burnish.config.algorithms import AlgorithmConfig, AnyAlgorithmConfig, ClippedConfig
from burnish.config.engines import OPTIONS, FolderServersConfig, ServersConfig
from burnish.config.preference import AnyPreferenceConfig
from burnish.config.schema import Config
from burnish.config.tuning import DistillationConfig, PreferenceConfig, RewardModelConfig, RowsTrainingConfig, SFTConfig

ALGORITHMS: tuple[type[AlgorithmConfig], ...] = get_args(get_args(AnyAlgorithmConfig)[0])
"""The models between which `algorithm.name` chooses."""
LOSSES: tuple[type[BaseModel], ...] = get_args(get_args(AnyPreferenceConfig)[0])
"""Those between which `loss.name` chooses."""

HEAD = """\
# Configuration

A run is one configuration: a YAML file, changed from the environment and the command line, checked as a whole before anything is
loaded. `burnish config docs` writes this page from the models in `burnish/config/`.

## Where values come from

Four sources, each laid over the one before, key by key: a source that sets one key of a section leaves its siblings as they were.

1. **Defaults**, in the tables below.
2. **A file**, and before it the files that it `extends`: a name or a list of names, relative to the file; later ones win.
3. **The environment**: `BURNISH__TRAINING__MAX_STEPS=20` sets `training.max_steps`. The prefix is `BURNISH__`, two underscores stand
   between keys, and the name is read in lower case.
4. **The command line**: `training.max_steps=20`, or `--training.max_steps=20`.

```bash
cat > small.yaml <<'END'
extends: recipes/quickstart.yaml
training: {max_steps: 5, optimizer: {learning_rate: 1e-4}}
run: {name: small}
END
BURNISH__TRAINING__BATCH_SIZE=4 burnish config show small.yaml rollout.sampling.temperature=0.8 'rewards=[{fn: numeric}]'
```

`burnish config show` prints every value with its source, `burnish config sizes` what the sizes of a step come to, and `burnish config
schema` the JSON schema, with which an editor completes and checks a file (`# yaml-language-server: $schema=burnish.schema.json` on its
first line).

- A key that both the environment and the command line set is an error: neither is the obvious winner.
- A list is replaced as a whole, or changed where a position is named: `rewards.0.weight=2`.
- `null` switches an optional section off; `{}` brings it in with its defaults.
- `algorithm.name` chooses which options there are. Where a source changes the name, what the sources before it set under `algorithm`
  goes, and a note on stderr lists it.
- An unknown key, a wrong type (`true` for a number, a text for a number, nan), a value out of bounds: all of them are reported at once,
  each with its path, where it was written, and the nearest name.
- YAML is read as version 1.2 has it: `1e-4` is a number, `on` and `yes` are texts. Tags, duplicate keys and alias bombs are refused.
- `${path.to.key}` takes the value of another key, whoever set it; inside a longer text it is written out. `$${` is a plain `${`.
  Nothing else is interpolated, the environment neither.
- Names of functions and classes: a bare name is one of burnish's own, `my_pkg.mod:name` is imported, `./file.py:name` is sought beside
  the configuration, then in the working directory.

```yaml
algorithm: {name: dapo, num_generations: 8}
training: {batch_size: 16, mini_batch_size: "${training.batch_size}"}
run: {name: "dapo-${run.seed}", seed: 3}
```

## Secrets

Values under keys such as `api_key`, `token`, `password`, `secret` or `authorization`, at any depth of `options`, are secrets: they
reach the function, and are written as `***` in `config show`, in the run's `config.yaml`, in errors and in transcripts. Give them in
the environment, where they are taken as they stand:

```bash
BURNISH__REWARDS='[{fn: numeric}]' BURNISH__REWARDS__0__OPTIONS__API_KEY='not shown' burnish config show | grep api_key
```

A run that goes on from its `config.yaml` needs them again and says which.

## Keys

`N` stands for a position in a list. A key without a default is needed where its section is used.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, info in Config.model_fields.items():
        found = list(rows(Config, only=name))
        meaning = "" if found[0][0] == name else f"\n{info.description}\n"
        parts.append(f"## `{name}`\n{meaning}")
        parts.append(_algorithms() if name == "algorithm" else _table(found))
        if name == "rollout":
            parts += _engines()
    return "\n".join([*parts, *_rows_runs()])


def _engines() -> Iterator[str]:
    """The options of each engine that isn't native; what several share stands once."""
    said: list[tuple[str, ...]] = []
    shared = (("`engine: vllm`, `sglang` and `burnish`", ServersConfig), ("`engine: vllm` and `sglang`", FolderServersConfig))
    headed = [(f"`rollout.options` of servers, {engines}", model) for engines, model in shared]
    for heading, model in [*headed, *((f"`rollout: {{engine: {engine}}}`", model) for engine, model in OPTIONS.items())]:
        own = [row for row in rows(model, prefix="rollout.options.") if row not in said]
        if own:
            yield f"### {heading}\n\n{model.__doc__}\n"
            yield _table(own)
        said += own


def _rows_runs() -> Iterator[str]:
    """What `burnish sft` and `burnish dpo` read in place of the sections above."""
    yield """# Runs on rows of data

`burnish sft`, `dpo`, `distill` and `reward-model` read configurations of their own (`burnish config show --of sft`). `data`, `checkpoint`
and `run` are as above, for rows in place of prompts (`docs/sft-and-preference.md`, `docs/distillation.md`), and so is `model`; the others
are these.
"""
    yield _table(row for name in ("cluster", "observe") for row in rows(SFTConfig, only=name))
    yield f"## `training` of these runs\n\n{RowsTrainingConfig.__doc__}\n"
    common = list(rows(RowsTrainingConfig, prefix="training."))
    yield _table(common)
    for command, config in (("sft", SFTConfig), ("dpo", PreferenceConfig), ("reward-model", RewardModelConfig)):
        yield f"`burnish {command}` has this besides:\n"
        yield _table(row for row in rows(config, only="training") if row not in common)
    yield "## `teacher` and `distillation` of `burnish distill`\n"
    yield _table(row for name in ("teacher", "distillation") for row in rows(DistillationConfig, only=name))
    names = " or ".join(f"`{model.model_fields['name'].default}`" for model in LOSSES)
    yield f"## `loss` of `burnish dpo`\n\n{PreferenceConfig.model_fields['loss'].description}\n"
    yield _table([("loss.name", names, "`sigmoid`", "The loss, and so which other options there are.")])
    for model in LOSSES:
        yield f"### `loss: {{name: {model.model_fields['name'].default}}}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n"
        yield _table(row for row in rows(model, prefix="loss.") if row[0] != "loss.name")


def rows(
    model: type[BaseModel], *, prefix: str = "", default: BaseModel | None = None, only: str | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """(key, type with bounds, default, meaning) of every option in a model, those of the sections inside it after their section.

    default: the instance whose values are the defaults; None is what the class says.
    """
    for name, info in model.model_fields.items():
        if only is not None and name != only:
            continue
        key, value = prefix + name, _default(info) if default is None else getattr(default, name)
        inner = list(sections(info.annotation))
        if prefix or not (len(inner) == 1 and isinstance(value, BaseModel)):  # a section of the top level has a heading
            shown = "" if isinstance(value, BaseModel) else _written(value)
            yield key, kind(info.annotation, info.metadata), shown, info.description or ""
        many = "N." if get_origin(info.annotation) is tuple else ""
        for section in inner:
            yield from rows(section, prefix=f"{key}.{many}", default=value if isinstance(value, section) else None)


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The option models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections(argument)


def kind(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type in words, bounds included: `whole number > 0 or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(argument) for argument in arguments))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        inner = kind(arguments[0])
        return f"list of {'sections' if inner == 'section' else inner}"
    if origin is dict and arguments[1] is not Any:
        return f"mapping of {kind(arguments[0])} to {kind(arguments[1])}"
    words = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", dict: "mapping", type(None): "`null`"}
    name = words.get(origin or annotation, "section")
    return " ".join([name, *([", ".join(_bounds(metadata))] if any(_bounds(metadata)) else [])])


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
            continue
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"), ("pattern", "like")):
            bound = getattr(item, name, None)
            if bound is not None:
                yield f"{sign} `{bound}`" if name == "pattern" else f"{sign} {bound:g}" if bound < 2**20 else f"{sign} {bound}"


def _algorithms() -> str:
    """The options that all algorithms share, those of the clipped loss, then of each algorithm what is its own or has another default."""
    names = " or ".join(f"`{model.model_fields['name'].default}`" for model in ALGORITHMS)
    first = ("algorithm.name", names, "grpo", "The algorithm, and so which other options there are.")
    parts = ["Every algorithm has these:\n", _table([first, *rows(AlgorithmConfig, prefix="algorithm.")])]
    clipped = ", ".join(f"`{model.model_fields['name'].default}`" for model in ALGORITHMS if issubclass(model, ClippedConfig))
    parts += [f"Those with a clipped ratio ({clipped}) have these too:\n", _table(_own(ClippedConfig))]
    for model in ALGORITHMS:
        parts.append(f"### `algorithm: {{name: {model.model_fields['name'].default}}}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n")
        own = [row for row in _own(model) if row[0] != "algorithm.name"]
        parts += ["With its own options, or other defaults:\n", _table(own)] if own else []
    return "\n".join(parts)


def _own(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name in inspect.get_annotations(model):
        if name in model.model_fields:
            yield from rows(model, prefix="algorithm.", only=name)


def _default(info: FieldInfo) -> Any:
    return ... if info.is_required() else info.get_default(call_default_factory=True)


def _written(value: Any) -> str:
    """A default as a file would have it; nothing where the key is needed."""
    if value is ...:
        return ""
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key}: {documents.write(item)}' for key, item in value.items())}}}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(documents.write(item) for item in value)}]`"
    return f"`{documents.write(value)}`"


def _table(found: Any) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, words, default, meaning in found:
        cells = (f"`{key}`", words, default, " ".join(meaning.split()))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"
