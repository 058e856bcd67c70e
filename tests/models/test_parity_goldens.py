"""Logits and scores of tiny models of each family equal transformers' (fixtures; `make parity` makes them anew): RoPE scaling, biases,
windows, caps, experts included, and each of these shows in them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.config import LayerKind, ModelConfig, MoeConfig, RopeConfig
from burnish.models.families import FAMILIES
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import Params, capped, forward, head_matrix
from burnish.testing.tiny import write_recipe_model

GOLDEN = Path(__file__).parent / "golden"


LANGUAGE_MODELS = sorted(path.stem for path in GOLDEN.glob("*.json") if "logits" in json.loads(path.read_text()))


def logits_of(config: ModelConfig, params: Params, golden: dict[str, Any]) -> np.ndarray:
    tokens, positions = (jnp.asarray([golden[key]], jnp.int32) for key in ("tokens", "positions"))
    hidden = forward(config, params, tokens, positions, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens)))
    return np.asarray(capped(hidden[0] @ head_matrix(config, params).T, config.logit_cap))


def golden_model(name: str, folder: Path) -> tuple[dict[str, Any], ModelConfig, Params]:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    write_recipe_model(folder, golden["config"])
    return golden, *weights.load(folder)


def test_every_family_has_a_golden() -> None:
    families = {json.loads((GOLDEN / f"{name}.json").read_text())["config"]["model_type"] for name in LANGUAGE_MODELS}
    assert families == set(FAMILIES)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden, config, params = golden_model(name, tmp_path)
    np.testing.assert_allclose(logits_of(config, params, golden), np.asarray(golden["logits"]), atol=1e-4)


SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "a window in all layers": ("mistral", {"layer_kinds": ()}),
    "a window in upper layers": ("qwen2_windows", {"layer_kinds": (LayerKind(window=4),) * 2}),
    "a window in Phi-3": ("phi3", {"layer_kinds": ()}),
    "a layer that isn't rotated": ("smollm3", {"layer_kinds": ()}),
    "the base of RoPE": ("gemma", {"rope": RopeConfig(20_000.0)}),
    "stretched RoPE": ("olmo2", {"rope": RopeConfig(10_000.0)}),
    "attention's cap": ("gemma2", {"attention_cap": None}),
    "the logits' cap": ("gemma2", {"logit_cap": None}),
    "attention's scale": ("gemma2", {"attention_scale": None}),
    "which layers have a window": ("gemma2", {"layer_kinds": (LayerKind(), LayerKind(window=4))}),
    "the windowed layers' RoPE": ("gemma3", {"second_rope": RopeConfig(10_000.0)}),
    "how the other layers' RoPE is stretched": ("gemma3", {"rope": RopeConfig(10_000.0)}),
    "weights that aren't normalised": ("qwen3_moe", {"moe": MoeConfig(4, 2, normalised=True)}),
    "how many experts a token goes through": ("mixtral", {"moe": MoeConfig(4, 1, normalised=True)}),
}


@pytest.mark.parametrize("what", SHOWN)
def test_what_a_config_says_shows_in_the_logits(what: str, tmp_path: Path) -> None:
    """Without it, the same weights give other logits than transformers': the fixtures would notice."""
    name, change = SHOWN[what]
    golden, config, params = golden_model(name, tmp_path)
    difference = np.abs(logits_of(replace(config, **change), params, golden) - np.asarray(golden["logits"])).max()
    assert difference > 1e-2


@pytest.mark.parametrize("name", ["llama_classifier", "qwen2_classifier", "qwen3_classifier"])
def test_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    write_recipe_model(tmp_path, golden["config"])
    config, params = weights.load_scalar(tmp_path)
    tokens, positions = (jnp.asarray([golden[key]], jnp.int32) for key in ("tokens", "positions"))
    scores = token_scalars(config, params, tokens, positions, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens)))
    np.testing.assert_allclose(scores[0], np.asarray(golden["scores"]), atol=1e-4)
