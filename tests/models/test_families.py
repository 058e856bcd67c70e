"""What a `config.json` means, in the old and in the new form, and everything that is refused by name (B123)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burnish.models.config import LayerKind, ModelConfig, MoeConfig, RopeConfig
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
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
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


GEMMA3 = without("rope_theta") | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 8,
    "head_dim": 8,
    "sliding_window": 512,
}


def test_gemma3s_two_ropes_and_its_layers_in_the_old_and_the_new_form() -> None:
    """Every sixth layer sees everything, unless `layer_types` says it; only its RoPE is stretched."""
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    wide, local = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    config = read_config(GEMMA3 | old)
    assert config == read_config(GEMMA3 | {"layer_types": types, "rope_parameters": {"full_attention": wide, "sliding_attention": local}})
    assert config.rope == RopeConfig(1e6, "linear", factor=8.0) and config.second_rope == RopeConfig(1e4)
    assert config.layer_kinds == (LayerKind(512, True),) * 5 + (LayerKind(), LayerKind(512, True))
    assert (config.tied_head, config.activation, config.attention_scale) == (True, "gelu_tanh", None)


def test_what_a_gemma2_means_that_says_little() -> None:
    config = read_config(without("tie_word_embeddings") | {"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu"})
    assert config.layer_kinds == (LayerKind(4096), LayerKind())
    assert (config.head_dim, config.attention_cap, config.logit_cap) == (256, 50.0, 30.0)
    assert (config.tied_head, config.activation, config.norms) == (True, "gelu_tanh", "around")
    assert read_config(OLD | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None}).attention_cap is None


def test_windows_of_the_other_families() -> None:
    def kinds(architecture: str, **keys: Any) -> tuple[LayerKind, ...]:
        return read_config(OLD | {"architectures": [f"{architecture}ForCausalLM"], "num_experts_per_tok": 2, **keys}).layer_kinds

    assert kinds("Mistral") == (LayerKind(4096),) * 2
    assert kinds("Mistral", sliding_window=None) == kinds("Phi3") == kinds("Qwen2", sliding_window=64) == ()
    assert kinds("Phi3", sliding_window=2047) == (LayerKind(2047),) * 2
    assert kinds("Qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=1) == (LayerKind(), LayerKind(64))
    assert kinds("SmolLM3", num_hidden_layers=5) == (LayerKind(),) * 3 + (LayerKind(second_rope=True), LayerKind())
    assert kinds("SmolLM3", no_rope_layers=[0, 1]) == (LayerKind(second_rope=True), LayerKind())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window is None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_what_a_gemma_may_not_ask_for(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(OLD | {"architectures": ["Gemma2ForCausalLM"]} | change)


def test_experts_in_the_config() -> None:
    qwen = OLD | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = read_config(qwen | {"num_experts": 8})
    assert (config.moe, config.mlp_width) == (MoeConfig(8, 2, normalised=False), 16)
    assert read_config(qwen | {"num_local_experts": 8}) == config, "as transformers 5 writes it"
    for change, named in (
        ({}, "'num_experts' is missing"),
        ({"num_experts": 8, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": 8, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_experts": 8, "moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
    ):
        with pytest.raises(UnsupportedModel, match=named):
            read_config(qwen | change)


def test_layers_of_other_windows_than_the_family_knows_are_not_written() -> None:
    kinds = (LayerKind(window=3), LayerKind(window=5))
    with pytest.raises(UnsupportedModel, match="can't describe|sliding_window"):
        write_config(replace(tiny_config("gemma2"), layer_kinds=kinds), dtype="float32")
