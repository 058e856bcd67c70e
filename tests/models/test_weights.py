"""Model and adapter folders: what is written is read bit by bit (B099), what doesn't fit is listed in one error (B123)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from burnish.config.errors import MissingFile, UserError
from burnish.config.schema import LoraConfig
from burnish.models import weights
from burnish.models.config import ModelConfig
from burnish.models.families import UnsupportedModel
from burnish.models.lora import init_adapter
from burnish.models.tensors import BadWeights
from burnish.models.transformer import Params, ParamSpec, init, spec
from burnish.testing.tiny import tiny_config

# Every matrix of a layer is square: only the values can tell a transposed one.
SQUARE = replace(tiny_config("llama"), num_kv_heads=4, mlp_width=32, tied_head=False, vocab_size=32, qkv_bias=True, o_bias=True)


def counted(config: ModelConfig) -> Params:
    """Every leaf filled with arange, from another start each."""
    leaves, treedef = jax.tree.flatten(spec(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    filled = [jnp.arange(np.prod(s.shape), dtype=jnp.float32).reshape(s.shape) + 1000 * i for i, s in enumerate(leaves)]
    return jax.tree.unflatten(treedef, filled)


def assert_same(before: Any, after: Any) -> None:
    for (path, one), (_, other) in zip(jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after), strict=True):
        assert one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other)), jax.tree_util.keystr(path)


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shard_bytes", [1 << 30, 9000])
def test_square_matrices_come_back_bit_by_bit(tmp_path: Path, shard_bytes: int) -> None:
    """B099."""
    params = counted(SQUARE)
    weights.save(tmp_path, SQUARE, params, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 9000)
    config, again = weights.load(tmp_path)
    assert config == SQUARE
    assert_same(params, again)


def test_files_hold_matrices_as_out_by_in(tmp_path: Path) -> None:
    """B099: reading back what one wrote can hide a transposition that others see."""
    params = counted(SQUARE)
    weights.save(tmp_path, SQUARE, params)
    stored = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(stored["model.layers.1.mlp.down_proj.weight"], np.asarray(params["layers"]["down"][1]).T)
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], params["embed"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stored_and_loaded_dtypes(tmp_path: Path, dtype: str) -> None:
    params = init(tiny_config(), jax.random.key(0))
    weights.save(tmp_path, tiny_config(), params, dtype=dtype)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    assert_same(rounded, weights.load(tmp_path, dtype=None)[1])
    assert_same(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded), weights.load(tmp_path)[1])


def test_pieces_arrive_on_a_mesh(tmp_path: Path) -> None:
    params = counted(tiny_config("qwen3"))
    weights.save(tmp_path, tiny_config("qwen3"), params)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    _, placed = weights.load(tmp_path, mesh=mesh)
    assert placed["layers"]["q"].sharding.spec == PartitionSpec(None, "fsdp", "tp")
    assert placed["layers"]["q"].addressable_shards[0].data.shape == (2, 16, 32)
    assert_same(params, placed)


def test_a_mesh_that_does_not_divide_the_model_is_refused_before_reading(tmp_path: Path) -> None:
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tp",), axis_types=(AxisType.Auto,))
    with pytest.raises(UserError, match="tp=4 doesn't divide num_kv_heads=2"):
        weights.load(tmp_path, mesh=mesh)


def test_all_faults_of_a_file_are_in_one_error(tmp_path: Path) -> None:
    """B123: an unknown name, a missing norm and a wrong shape."""
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))

    def break_three(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.input_layernorm.weight"]
        tensors["language_model.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 31), np.float32)

    edit(tmp_path, break_three)
    with pytest.raises(BadWeights) as error:
        weights.load(tmp_path)
    message = str(error.value)
    assert message.count("\n") == 3
    assert "missing tensor model.layers.1.input_layernorm.weight" in message
    assert "unknown tensor language_model.extra.weight" in message
    assert "k_proj.weight has shape [16, 31], the config asks for [16, 32]" in message


def test_a_dtype_without_meaning_for_weights_is_named(tmp_path: Path) -> None:
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}))
    with pytest.raises(BadWeights, match="model.norm.weight has dtype I8"):
        weights.load(tmp_path)


def test_an_absent_shard_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    """B123."""
    weights.save(tmp_path, SQUARE, counted(SQUARE), shard_bytes=9000)
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(MissingFile, match=second.name):
        weights.load(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    weights.save(tmp_path, SQUARE, counted(SQUARE))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(MissingFile, match=r"pytorch_model.bin: convert"):
        weights.load(tmp_path)
    with pytest.raises(MissingFile, match="config.json doesn't exist"):
        weights.load(tmp_path / "nowhere")


def test_a_tied_model_may_store_its_head_once_more_but_not_another(tmp_path: Path) -> None:
    """B121: a head that differs from the embedding must not be dropped in silence."""
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert "head" not in weights.load(tmp_path)[1]
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(BadWeights, match="unknown tensor lm_head.weight"):
        weights.load(tmp_path)


def test_inverse_frequencies_in_old_files_are_no_obstacle(tmp_path: Path) -> None:
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    weights.load(tmp_path)


def test_saving_again_leaves_nothing_of_the_older_model(tmp_path: Path) -> None:
    weights.save(tmp_path, SQUARE, counted(SQUARE), shard_bytes=9000)
    weights.save(tmp_path, tiny_config(), counted(tiny_config()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_what_belongs_to_the_tokenizer_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    weights.save(source, tiny_config(), counted(tiny_config()))
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | {"eos_token_id": [2, 7]}))
    weights.save(tmp_path / "target", tiny_config(), counted(tiny_config()), like=source)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "target" / "config.json").read_text())["eos_token_id"] == [2, 7]


def test_parameters_of_another_model_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match="layers.q_bias"):
        weights.save(tmp_path, tiny_config("qwen2"), counted(tiny_config("llama")))
    assert not (tmp_path / "config.json").exists()


def test_an_adapter_comes_back_bit_by_bit(tmp_path: Path) -> None:
    """B099, with every matrix square and the rank as large."""
    fresh = init_adapter(SQUARE, LoraConfig(rank=32, alpha=8.0, targets=("q", "down")), jax.random.key(0))
    counting = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape), fresh.pairs)
    weights.save_adapter(tmp_path, SQUARE, fresh._replace(pairs=counting), base="somewhere")
    again = weights.load_adapter(tmp_path, SQUARE)
    assert again.scale == 8.0 / 32
    assert_same(counting, again.pairs)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(stored[name], np.asarray(counting["q"]["a"][1]).T)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"r": None}, "'r' is missing"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    weights.save_adapter(tmp_path, SQUARE, init_adapter(SQUARE, LoraConfig(rank=2), jax.random.key(0)))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=named):
        weights.load_adapter(tmp_path, SQUARE)
