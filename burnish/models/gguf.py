"""Turns a GGUF file of the Llama line into an ordinary Hugging Face folder: weights, config, tokenizer, chat template.

Owns the knowledge of GGUF: names, the permutation of q and k, what its metadata mean. Numpy only. Doesn't know where files come from
(`cli.fetch`, its only caller) nor how a folder is loaded (`weights.py`, `text.tokenizer`). Needs the extra `gguf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from burnish.config.errors import UserError

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder`.

    Weights are float32: the blocks of Q4_1 and Q8_0 are `scale · integer + offset` with float16 scale and offset, which bfloat16 and
    float16 would round once more.
    """
    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, tied_head=all(tensor.name != "output.weight" for tensor in reader.tensors))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
    save_file(model_tensors(reader.tensors, config), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)


def model_config(metadata: dict[str, Any], *, tied_head: bool) -> dict[str, Any]:
    """The `config.json` that the metadata describe."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise UserError(f"GGUF architecture {architecture!r} isn't supported, only 'llama'; use the model's Hugging Face folder instead")
    num_heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": width // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied_head,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def model_tensors(tensors: list[ReaderTensor], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hugging Face name, contiguous (`safetensors` silently corrupts other layouts)."""
    num_heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    named = {}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        short_name = tensor.name.split(".", 2)[-1]
        if short_name in num_heads:
            values = unpermute(values, num_heads[short_name])
        named[hf_name(tensor.name)] = np.ascontiguousarray(values)
    return named


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[H·hd, in] with each head's rows in pairs (0, hd/2, 1, hd/2 + 1, …), as GGUF wants for interleaved rope → rows in order."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, short_name = rest.partition(".")
    if prefix != "blk" or short_name not in LAYER_TENSORS:
        raise UserError(f"GGUF tensor {name!r} belongs to no known part of a Llama model")
    return f"model.layers.{layer}.{LAYER_TENSORS[short_name]}"


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of the file. SmolLM's pre-tokenizer splits every digit off before GPT-2's regular expression applies."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UserError(f"GGUF tokenizer {kind} isn't supported, only ('gpt2', 'smollm'); use the model's Hugging Face folder instead")
    texts, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    control = [text for text, kind in zip(texts, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`. Its class takes tokenizer.json as it stands; `GPT2Tokenizer` would drop the digits rule."""
    texts = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": texts[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": texts[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": texts[metadata["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _shortest(value: float) -> float:
    """9.999999747378752e-06, a float32 read as a double → 1e-05, the shortest decimal with the same float32."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
