"""GGUF files of a few kB, written from Hugging Face tensors as llama.cpp's converter would, to test reading one back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from burnish.models.gguf import ARCHITECTURES, hf_name

WIDTH, NUM_HEADS, NUM_KV_HEADS, MLP_WIDTH, NUM_LAYERS = 32, 4, 2, 64, 2
TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "Ġ", "ab", "12"]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does, row by row: row i of a head's first half goes to 2i, of its second half to 2i + 1."""
    head_dim = weight.shape[0] // num_heads
    moved = np.empty_like(weight)
    for head in range(num_heads):
        for row in range(head_dim):
            half, index = divmod(row, head_dim // 2)
            moved[head * head_dim + 2 * index + half] = weight[head * head_dim + row]
    return moved


def original_tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    kv_width, shapes = WIDTH // NUM_HEADS * NUM_KV_HEADS, {}
    for layer in range(NUM_LAYERS):
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"}
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (kv_width, WIDTH) for name in "kv"}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": (MLP_WIDTH, WIDTH) for name in ("gate", "up")}
        shapes |= {f"model.layers.{layer}.mlp.down_proj.weight": (WIDTH, MLP_WIDTH)}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    shapes |= {"model.embed_tokens.weight": (len(TEXTS), WIDTH), "model.norm.weight": (WIDTH,)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, architecture: str = "llama", pre_tokenizer: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TEXTS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TEXTS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TEXTS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    names = {hf_name(name, ARCHITECTURES["llama"]): name for name in gguf_names()}
    for name, values in tensors.items():
        heads = NUM_HEADS if "q_proj" in name else NUM_KV_HEADS if "k_proj" in name else 0
        stored = permute(values, heads) if heads else values
        kind = gguf.GGMLQuantizationType.Q8_0 if "down_proj" in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names[name], gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names() -> list[str]:
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    layers = [f"blk.{layer}.{part}.weight" for layer in range(NUM_LAYERS) for part in parts]
    return [*layers, "token_embd.weight", "output_norm.weight"]


GEMMA_PIECES = {"▁": -4.0, "a": -5.0, "b": -6.0, "c": -7.0, "ab": -1.0, "bc": -2.0, "▁a": -3.0, "abc": -8.0}
"""Pieces and scores: a higher score merges first."""


def write_gemma_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A Gemma 3 file: norms with 1 added, rows of q and k as they are, a tokenizer of pieces without merges."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(WIDTH // 2)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(5)
    writer.add_layer_norm_rms_eps(1e-6)
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*special, *GEMMA_PIECES])
    writer.add_token_scores([-1000.0] * len(special) + list(GEMMA_PIECES.values()))
    writer.add_token_types([gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * len(GEMMA_PIECES))
    for add, index in (
        (writer.add_pad_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_bos_token_id, 2),
        (writer.add_unk_token_id, 3),
    ):
        add(index)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    kind = ARCHITECTURES["gemma3"]
    names = {f"blk.{layer}.{name}" for layer in range(NUM_LAYERS) for name in kind.tensors}
    theirs = {hf_name(name, kind): name for name in (*names, "token_embd.weight", "output_norm.weight")}
    for name, values in tensors.items():
        writer.add_tensor(theirs[name], values + 1 if name.endswith("norm.weight") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
