"""Advice names settings that exist: whatever reads as one, in the rules and in the pages that explain them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from burnish.config.algorithms import AnyAlgorithmConfig
from burnish.config.schema import Config
from burnish.config.tuning import PreferenceConfig

ROOT = Path(__file__).resolve().parents[2]
FILES = ["burnish/observe/health.py", "burnish/observe/bottlenecks.py", "docs/troubleshooting.md", "docs/observability.md"]
SECTIONS = "model|data|rewards|environment|agent|algorithm|rollout|cluster|training|checkpoint|observe|run"
SETTING = re.compile(rf"(?<![\w./])((?:{SECTIONS})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*)(?![\w/(])")
NOT_SETTINGS = (".md", ".py", ".jsonl", ".json", ".pftrace", ".yaml", ".html")


def exists(path: str) -> bool:
    models: list[type[BaseModel]] = [Config, PreferenceConfig]
    for key in path.split("."):
        if key.isdecimal():
            continue
        found = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        if not found:
            return False
        models = [model for annotation in found for model in inside(annotation)]
    return True


def inside(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in inside(part)]


@pytest.mark.parametrize("file", FILES)
def test_every_setting_that_is_named_exists(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    named = {name for name in SETTING.findall(text) if not name.endswith(NOT_SETTINGS)}
    assert len(named) >= 3 and [name for name in sorted(named) if not exists(name)] == []


def test_the_check_sees_one_that_doesnt() -> None:
    assert not exists("algorithm.entropy_coef") and exists("algorithm.critic.warmup_steps") and exists("training.optimizer.learning_rate")
    assert SETTING.findall("raise rollout.slots; see data.train, not observe/trace.py") == ["rollout.slots", "data.train"]
    assert get_args(AnyAlgorithmConfig)
