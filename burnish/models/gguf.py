"""Turns a GGUF file into an ordinary Hugging Face folder: weights, config, tokenizer, chat template.

Owns the knowledge of GGUF: names, the permutation of q and k, norms that are stored with 1 added, what its metadata mean. Tokenizers are
`gguf_tokenizer.py`. Numpy only. Doesn't know where files come from (`cli.fetch`, its only caller) nor how a folder is loaded
(`weights.py`, `text.tokenizer`). Needs the extra `gguf`, which knows how blocks of numbers are packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file

from burnish.config.errors import UserError
from burnish.models.gguf_tokenizer import build_tokenizer, tokenizer_config

READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")
"""How numbers may be stored. The package knows more; these are tested."""
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What GGUF calls an architecture. norms: of a layer. permuted: whether rows of q and k are in pairs. unit_norms: whether norms are
    stored as 1 + w. keys: of the config, from its metadata, beyond those of all."""

    architecture: str
    model_type: str
    norms: Mapping[str, str]
    permuted: bool = False
    unit_norms: bool = False
    keys: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda own: {})

    @property
    def tensors(self) -> dict[str, str]:
        """A layer's tensors: weights of matrices and norms, and biases where there are any."""
        stems = _MATRICES | dict(self.norms)
        return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in stems.items() for kind in ("weight", "bias")}


def _llama_keys(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _gemma3_keys(own: Mapping[str, Any]) -> dict[str, Any]:
    # The largest Gemma 3 alone scales its attention by width / heads; the file doesn't say so, and llama.cpp knows it by its 62 layers.
    largest = own["block_count"] == 62
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": own["rope.scaling.factor"]}} if "rope.scaling.factor" in own else {}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": own["embedding_length"] // own["attention.head_count"] if largest else own["attention.key_length"],
        "sliding_window": own["attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
        **scaling,
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _NORMS, permuted=True, keys=_llama_keys),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _NORMS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _NORMS | _HEAD_NORMS),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA_NORMS | _HEAD_NORMS, unit_norms=True, keys=_gemma3_keys),
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder`.

    Weights are float32: the blocks of quantised formats are `scale · integer + offset` with float16 scale and offset, which bfloat16 and
    float16 would round once more.
    """
    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    kind = architecture_of(metadata)
    config = model_config(metadata, tied_head=all(tensor.name != "output.weight" for tensor in reader.tensors))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
    save_file(model_tensors(reader.tensors, config, kind), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Raises UserError for one that isn't known."""
    name = metadata["general.architecture"]
    if name not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise UserError(f"GGUF architecture {name!r} isn't supported, only {known}; use the model's Hugging Face folder instead")
    return ARCHITECTURES[name]


def model_config(metadata: dict[str, Any], *, tied_head: bool) -> dict[str, Any]:
    """The `config.json` that the metadata describe."""
    kind, prefix = architecture_of(metadata), f"{metadata['general.architecture']}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    num_heads, width = own["attention.head_count"], own["embedding_length"]
    return {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own.get("attention.key_length") or width // num_heads,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(own["rope.freq_base"]),
        "tie_word_embeddings": tied_head,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        **kind.keys(own),
    }


def model_tensors(tensors: list[ReaderTensor], config: dict[str, Any], kind: Architecture) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hugging Face name, contiguous (`safetensors` silently corrupts other layouts)."""
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if kind.permuted else {}
    named = {}
    for tensor in tensors:
        values = numbers(tensor)
        stem = tensor.name.split(".", 2)[-1].rpartition(".")[0]
        if stem in num_heads:
            values = unpermute(values, num_heads[stem])
        if kind.unit_norms and tensor.name.endswith("norm.weight"):
            values = values - 1
        named[hf_name(tensor.name, kind)] = np.ascontiguousarray(values)
    return named


def numbers(tensor: ReaderTensor) -> np.ndarray:
    """A tensor's numbers in float32. Raises UserError for a way of storing them that isn't among `READ`."""
    stored = GGMLQuantizationType(tensor.tensor_type).name
    if stored not in READ:
        raise UserError(f"GGUF tensor {tensor.name!r} is stored as {stored}; what can be read: {', '.join(READ)}")
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[H·hd, ...] with each head's rows in pairs (0, hd/2, 1, hd/2 + 1, …), as GGUF wants for interleaved rope → rows in order."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str, kind: Architecture) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, short_name = rest.partition(".")
    if prefix != "blk" or short_name not in kind.tensors:
        raise UserError(f"GGUF tensor {name!r} belongs to no known part of a model of the {kind.model_type} family")
    return f"model.layers.{layer}.{kind.tensors[short_name]}"


def _shortest(value: float) -> float:
    """9.999999747378752e-06, a float32 read as a double → 1e-05, the shortest decimal with the same float32."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
