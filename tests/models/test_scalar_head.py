"""Decoders with a scalar head: folders come back bit by bit, what has no single score is refused by name, a zero head is a start."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from burnish.models import scalar_head, transformer, weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.families import UnsupportedModel
from burnish.models.scalar_head import token_scalars, with_zero_score
from burnish.models.tensors import BadWeights
from burnish.models.transformer import Params, draw, forward
from burnish.testing.tiny import tiny_config

CONFIG = tiny_config("qwen3")  # with a head of its own as a language model, so that it shows when that is kept


def lively(config: ModelConfig, *, seed: int = 0) -> Params:
    """Random parameters with a score that isn't zero."""
    params = draw(scalar_head.spec(config), jax.random.key(seed))
    return params | {"score": jax.random.normal(jax.random.key(seed + 1), params["score"].shape)}


def assert_same(before: Any, after: Any) -> None:
    for (path, one), (other_path, other) in zip(jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after), strict=True):
        assert path == other_path and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_folder_comes_back_bit_by_bit_under_the_names_of_transformers(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    params = lively(config)
    weights.save_scalar(tmp_path, config, params)
    again, loaded = weights.load_scalar(tmp_path)
    assert again == config == weights.load_scalar_config(tmp_path)
    assert_same(params, loaded)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == [f"{family.capitalize()}ForSequenceClassification"] and raw["id2label"] == {"0": "LABEL_0"}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["score.weight"].shape == (1, config.width) and "lm_head.weight" not in stored
    np.testing.assert_array_equal(stored["model.layers.1.self_attn.q_proj.weight"], np.asarray(params["decoder"]["layers"]["q"][1]).T)


def test_frozen_weights_may_stay_as_they_are_stored(tmp_path: Path) -> None:
    params = lively(CONFIG)
    weights.save_scalar(tmp_path, CONFIG, params, dtype="bfloat16")
    assert_same(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), weights.load_scalar(tmp_path, dtype=None)[1])


def test_pieces_arrive_on_a_mesh(tmp_path: Path) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    params = lively(CONFIG)
    weights.save_scalar(tmp_path / "scored", CONFIG, params)
    _, placed = weights.load_scalar(tmp_path / "scored", mesh=mesh)
    assert_same(params, placed)
    weights.save(tmp_path / "decoder", CONFIG, transformer.init(CONFIG, jax.random.key(0)))
    _, started = weights.load_scalar(tmp_path / "decoder", mesh=mesh, zero_head=True)
    assert placed["score"].sharding.spec == started["score"].sharding.spec == PartitionSpec(None, "fsdp")
    assert placed["decoder"]["layers"]["q"].sharding.spec == PartitionSpec(None, "fsdp", "tp")


def test_a_language_model_starts_a_critic_at_zero_but_is_no_reward_model(tmp_path: Path) -> None:
    params = transformer.init(CONFIG, jax.random.key(0))
    weights.save(tmp_path, CONFIG, params)
    _, critic = weights.load_scalar(tmp_path, zero_head=True)
    assert_same(with_zero_score(CONFIG, params), critic)
    assert "head" in params and "head" not in critic["decoder"]
    assert not np.any(critic["score"])
    with pytest.raises(
        UnsupportedModel, match=r"'Qwen3ForCausalLM' is a language model, which gives no score.*Qwen3ForSequenceClassification"
    ):
        weights.load_scalar(tmp_path)


def test_a_sequence_classifier_is_no_policy(tmp_path: Path) -> None:
    weights.save_scalar(tmp_path, CONFIG, lively(CONFIG))
    with pytest.raises(UnsupportedModel, match="is a sequence classifier, which has no vocabulary to sample from"):
        weights.load(tmp_path)


@pytest.mark.parametrize("zero_head", [False, True])
def test_two_labels_are_not_one_number(tmp_path: Path, zero_head: bool) -> None:
    weights.save_scalar(tmp_path, CONFIG, lively(CONFIG))
    edit(tmp_path, lambda tensors: tensors.update({"score.weight": np.zeros((2, CONFIG.width), np.float32)}))
    with pytest.raises(UnsupportedModel, match=r"tells 2 labels apart \(score.weight \[2, 32\]\).* num_labels=1"):
        weights.load_scalar_config(tmp_path, zero_head=zero_head)


@pytest.mark.parametrize("zero_head", [False, True])
def test_all_wrong_tensors_are_named(tmp_path: Path, zero_head: bool) -> None:
    """A classifier without its score is broken; it doesn't quietly start at zero."""
    weights.save_scalar(tmp_path, CONFIG, lively(CONFIG))

    def break_three(tensors: dict[str, np.ndarray]) -> None:
        del tensors["score.weight"]
        tensors["v_head.summary.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(7, np.float32)

    edit(tmp_path, break_three)
    with pytest.raises(BadWeights) as error:
        weights.load_scalar_config(tmp_path, zero_head=zero_head)
    message = str(error.value)
    assert message.count("\n") == 3
    assert "missing tensor score.weight [1, 32]" in message
    assert "unknown tensor v_head.summary.weight" in message
    assert "tensor model.norm.weight has shape [7], the config asks for [32]" in message


@pytest.mark.slow
def test_the_scalar_is_the_score_times_the_hidden_state() -> None:
    config = tiny_config(width=16)
    params = lively(config)
    tokens = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]], jnp.int32)
    rule = Visibility(jnp.asarray([[1] * 5, [1, 1, 1, 0, 0]], jnp.int32), jnp.zeros((2, 5), jnp.int32))
    hidden = np.asarray(forward(config, params["decoder"], tokens, positions, rule), np.float64)
    expected = hidden @ np.asarray(params["score"], np.float64)[0]
    np.testing.assert_allclose(token_scalars(config, params, tokens, positions, rule), expected, rtol=1e-5, atol=1e-6)
