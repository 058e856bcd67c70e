"""Locks: a GGUF file becomes the Hugging Face folder that it was made from: names, order of q and k rows, values, config, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from burnish.models.gguf import convert, hf_name, unpermute
from burnish.models.locate import locate
from burnish.testing.tiny_gguf import original_tensors, write_gguf


def test_a_converted_folder_is_the_model_that_the_file_was_made_from(tmp_path: Path) -> None:
    original = original_tensors()
    write_gguf(tmp_path / "model.gguf", original)
    convert(tmp_path / "model.gguf", tmp_path)

    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == original.keys()
    for name, values in original.items():
        tolerance = np.abs(values).max() / 127 if "down_proj" in name else 0.0  # the one that was quantised, to 8 bits
        np.testing.assert_allclose(loaded[name], values, rtol=0, atol=tolerance, err_msg=name)

    config = json.loads((tmp_path / "config.json").read_text())
    expected = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    expected |= {"num_hidden_layers": 2, "vocab_size": 10, "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 100_000.0}
    expected |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "float32"}
    assert {name: config[name] for name in expected} == expected
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_splits_digits_before_merging_and_knows_its_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original_tensors())
    convert(tmp_path / "model.gguf", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>ab 12<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "ab", "Ġ", "1", "2", "<|im_end|>"], "'12' is in the vocabulary, and digits stay apart"
    assert tokenizer.decode(encoded.ids) == "ab 12"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("options", "error"), [({"architecture": "gemma3"}, "'gemma3' isn't"), ({"pre_tokenizer": "qwen2"}, "'qwen2'.* isn't")]
)
def test_what_it_cannot_read_is_refused_by_name(tmp_path: Path, options: dict[str, str], error: str) -> None:
    write_gguf(tmp_path / "model.gguf", original_tensors(), **options)
    with pytest.raises(ValueError, match=error):
        convert(tmp_path / "model.gguf", tmp_path)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        hf_name("blk.0.ffn_gate_exps.weight")


def test_unpermute_by_hand() -> None:
    """Two heads of four rows: 0 2 1 3 → 0 1 2 3 in each."""
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert unpermute(rows, 2)[:, 0].tolist() == list(range(8))


@pytest.mark.smollm2
def test_the_fetched_model_is_whole() -> None:
    folder = locate("smollm2-135m")
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 272 and sum(values.size for values in tensors.values()) == 134_515_008
    assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in tensors.values())
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100_000.0
