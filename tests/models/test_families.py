"""What a `config.json` means, in the old and in the new form, and everything that is refused by name (B123)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.families import FAMILIES, UnsupportedModel, read_config, stored_dtype, write_config
from burnish.testing.tiny import tiny_config

OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in OLD.items() if name != key}


def test_the_old_and_the_new_form_are_the_same_model() -> None:
    new = without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert read_config(new) == read_config(OLD) == tiny_config("llama")


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_stretched_rope_in_the_old_form(kind_key: str) -> None:
    rope = read_config(OLD | {"rope_scaling": {kind_key: "llama3", **LLAMA3}}).rope
    assert rope == RopeConfig(10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=128)


def test_stretched_rope_in_the_new_form_takes_the_length_of_the_model_where_it_names_none() -> None:
    rope = read_config(without("rope_theta") | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}).rope
    assert rope == RopeConfig(5e5, "yarn", factor=4.0, original_max_positions=512)


def test_the_declared_dtype_in_both_forms() -> None:
    assert stored_dtype({"torch_dtype": "bfloat16"}) == stored_dtype({"dtype": "bfloat16"}) == "bfloat16"
    assert stored_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert stored_dtype({}) == "float32"
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        stored_dtype({"dtype": "float8_e4m3fn"})


def test_what_a_family_adds_to_its_keys() -> None:
    qwen2 = read_config(OLD | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, None, 8)
    qwen3 = read_config(OLD | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, "head", 128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_theta": None}, "RoPE base is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "different values"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' isn't supported"),
        ({"rope_scaling": {"type": "linear"}}, "needs the key 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding window of 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(OLD | change)


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(UnsupportedModel) as error:
        read_config(without("rope_theta") | {"hidden_act": "gelu", "vocab_size": None})
    assert all(text in str(error.value) for text in ("vocab_size", "hidden_act", "RoPE base"))


def test_a_window_that_no_layer_uses_is_no_obstacle() -> None:
    assert read_config(OLD | {"sliding_window": 4096, "use_sliding_window": False}) == read_config(OLD)
    assert read_config(OLD | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}) == read_config(OLD)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "linear", "llama3", "yarn"])
def test_written_and_read_is_the_same_configuration(family: str, kind: Any) -> None:
    rope = {
        "none": RopeConfig(1e6),
        "linear": RopeConfig(1e6, "linear", factor=2.0),
        "llama3": RopeConfig(1e6, "llama3", factor=8.0, original_max_positions=64),
        "yarn": RopeConfig(1e6, "yarn", factor=8.0, original_max_positions=64, attention_factor=1.5, truncate=False),
    }[kind]
    config = replace(tiny_config(family), rope=rope)
    assert read_config(json.loads(json.dumps(write_config(config, dtype="float32")))) == config


def test_a_configuration_outside_its_family_is_not_written() -> None:
    config: ModelConfig = replace(tiny_config("qwen2"), o_bias=True)
    with pytest.raises(UnsupportedModel, match="can't describe"):
        write_config(config, dtype="float32")


def test_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="some/config.json"):
        read_config(OLD | {"hidden_act": "gelu"}, where="some/config.json")
