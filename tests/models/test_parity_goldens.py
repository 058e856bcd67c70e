"""Logits and scores of tiny models of each family equal transformers' (fixtures; `make parity` makes them anew), RoPE scaling and biases
included."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import forward, head_matrix
from burnish.testing.tiny import write_recipe_model

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["llama_llama3", "llama_linear_biased", "smollm2", "qwen2", "qwen2_yarn", "qwen3"])
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    write_recipe_model(tmp_path, golden["config"])
    config, params = weights.load(tmp_path)
    tokens, positions = (jnp.asarray([golden[key]], jnp.int32) for key in ("tokens", "positions"))
    hidden = forward(config, params, tokens, positions, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens)))
    logits = hidden[0] @ head_matrix(config, params).T
    np.testing.assert_allclose(logits, np.asarray(golden["logits"]), atol=1e-4)


@pytest.mark.parametrize("name", ["llama_classifier", "qwen2_classifier", "qwen3_classifier"])
def test_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    write_recipe_model(tmp_path, golden["config"])
    config, params = weights.load_scalar(tmp_path)
    tokens, positions = (jnp.asarray([golden[key]], jnp.int32) for key in ("tokens", "positions"))
    scores = token_scalars(config, params, tokens, positions, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens)))
    np.testing.assert_allclose(scores[0], np.asarray(golden["scores"]), atol=1e-4)
