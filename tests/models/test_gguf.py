"""Locks: a GGUF file becomes the Hugging Face folder that it was made from: names, order of q and k rows, values, config, tokenizer; every
way of storing numbers that is said to be read."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from burnish.models import weights
from burnish.models.config import LayerKind, RopeConfig
from burnish.models.gguf import ARCHITECTURES, READ, convert, hf_name, numbers, unpermute
from burnish.models.locate import locate
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.testing.tiny_gguf import original_tensors, write_gemma_gguf, write_gguf


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
    ("options", "error"), [({"architecture": "mamba"}, "'mamba' isn't"), ({"pre_tokenizer": "tekken"}, "'tekken'.* isn't")]
)
def test_what_it_cannot_read_is_refused_by_name(tmp_path: Path, options: dict[str, str], error: str) -> None:
    write_gguf(tmp_path / "model.gguf", original_tensors(), **options)
    with pytest.raises(ValueError, match=error):
        convert(tmp_path / "model.gguf", tmp_path)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        hf_name("blk.0.ffn_gate_exps.weight", ARCHITECTURES["llama"])


def test_unpermute_by_hand() -> None:
    """Two heads of four rows: 0 2 1 3 → 0 1 2 3 in each."""
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert unpermute(rows, 2)[:, 0].tolist() == list(range(8))


def test_a_gemma_file_is_the_model_that_it_was_made_from(tmp_path: Path) -> None:
    """Norms lose the 1 that was added, rows of q and k stay, the metadata mean windows and two RoPE bases; no head is written."""
    config = write_tiny_model(tmp_path / "original", config=tiny_config("gemma3_text"), alphabet="0123456789+=")
    original = load_file(tmp_path / "original" / "model.safetensors")
    original["model.embed_tokens.weight"] = np.random.default_rng(0).normal(size=(12, config.width)).astype(np.float32)
    write_gemma_gguf(tmp_path / "model.gguf", original)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "model.gguf", tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_allclose(loaded[name], values, atol=1e-7 if name.endswith("norm.weight") else 0, err_msg=name)
    read, _ = weights.load(tmp_path / "out")
    assert (read.rope, read.second_rope, read.norm_eps) == (RopeConfig(1e6), RopeConfig(1e4), 1e-6)
    assert read.layer_kinds == (LayerKind(5, second_rope=True),) * 2, "every sixth layer sees everything"
    assert (read.family, read.attention_scale, read.tied_head, read.head_dim) == ("gemma3_text", None, True, 16)


def test_pieces_merge_by_score_whatever_their_place(tmp_path: Path) -> None:
    """`ab` before `bc`; a space is ▁ and joins what follows; what has no piece is unknown; the text begins with the bos id."""
    config = tiny_config("gemma3_text")
    write_tiny_model(tmp_path / "original", config=config, alphabet="0123456789+=")
    write_gemma_gguf(tmp_path / "model.gguf", load_file(tmp_path / "original" / "model.safetensors"))
    convert(tmp_path / "model.gguf", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abb bc ab").tokens == ["<bos>", "ab", "b", "▁", "bc", "▁", "ab"]
    assert tokenizer.encode("abc a").tokens == ["<bos>", "abc", "▁a"], "ab and c are a piece too"
    assert tokenizer.encode("a<eos>?").tokens == ["<bos>", "a", "<eos>", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("ab c").ids) == "ab c"


def stored_numbers(path: Path, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What is read of one tensor, written as it stands."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers(gguf.GGUFReader(path).tensors[0])


ERRORS = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 1 / 254, "Q5_0": 1 / 16, "Q4_0": 1 / 8, "Q4_1": 1 / 15}
"""The largest error of a number, in parts of its block's largest size."""


@pytest.mark.parametrize("name", ERRORS)
def test_numbers_come_back_within_their_rounding(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    original = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    read = stored_numbers(tmp_path / "x.gguf", gguf.quantize(original, kind), kind)
    largest = np.abs(original.reshape(4, 2, 32)).max(axis=-1, keepdims=True)
    error = (np.abs(read - original).reshape(4, 2, 32) / largest).max()
    assert read.dtype == np.float32 and error <= ERRORS[name] * 1.01
    assert name == "F32" or error > ERRORS[name] / 8, "it was rounded"


def test_a_block_of_q4_k_by_hand(tmp_path: Path) -> None:
    """Eight runs of 32: d · scale · q - dmin · least. d 1/2, dmin 1/4; scales 1 2 3 4 1 3 5 7, least 5 6 7 8 2 4 6 8; q 1 and 3 in turn."""
    packed = [1, 2, 3, 4, 5, 6, 7, 8, 0x21, 0x43, 0x65, 0x87]
    halves = np.asarray([0.5, 0.25], np.float16).view(np.uint8)
    block = np.concatenate([halves, np.asarray(packed, np.uint8), np.full(128, 0x31, np.uint8)])[None]
    read = stored_numbers(tmp_path / "x.gguf", block, gguf.GGMLQuantizationType.Q4_K)
    np.testing.assert_array_equal(read[0].reshape(8, 32)[:, ::31], np.repeat([[-0.75], [1.5], [-0.25], [4], [0], [3.5], [1], [8.5]], 2, 1))


def test_a_block_of_q6_k_by_hand(tmp_path: Path) -> None:
    """Sixteen runs of 16: d · scale · (q - 32). d 1/2, scales 1 to 16, every q 33 but for one, the 65th, of 34."""
    low, high = np.full(128, 0x11, np.uint8), np.full(64, 0b10101010, np.uint8)
    low[0] = 0x21
    scales = np.arange(1, 17, dtype=np.int8).view(np.uint8)
    block = np.concatenate([low, high, scales, np.asarray([0.5], np.float16).view(np.uint8)])[None]
    wanted = np.repeat(np.arange(1, 17) / 2, 16)
    wanted[64] *= 2
    np.testing.assert_array_equal(stored_numbers(tmp_path / "x.gguf", block, gguf.GGMLQuantizationType.Q6_K)[0], wanted)


def test_another_way_of_storing_numbers_is_refused(tmp_path: Path) -> None:
    assert set(READ) == {*ERRORS, "Q4_K", "Q6_K"}
    with pytest.raises(ValueError, match=r"'x' is stored as Q5_1; what can be read: F32, F16"):
        kind = gguf.GGMLQuantizationType.Q5_1
        stored_numbers(tmp_path / "x.gguf", gguf.quantize(np.ones((1, 32), np.float32), kind), kind)


@pytest.mark.smollm2
def test_the_fetched_model_is_whole() -> None:
    folder = locate("smollm2-135m")
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 272 and sum(values.size for values in tensors.values()) == 134_515_008
    assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in tensors.values())
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100_000.0
