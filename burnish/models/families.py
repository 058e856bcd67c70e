"""What a Hugging Face `config.json` means, and what its tensors are called: Llama, SmolLM2, Qwen2/2.5, Qwen3.

Owns the translation between `config.json` and `ModelConfig` in both directions and the table of tensor names. Whatever changes the
result and isn't supported is refused by name, all of it in one error. Opens no tensors (`weights.py`). A new family is one entry of
`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.models.config import ModelConfig, QkNorm, RopeConfig, RopeKind


@dataclass(frozen=True, slots=True)
class Family:
    """How one `architectures` entry differs from the others.

    qkv_bias: biases on q, k, v alone, whatever the config says. `head_dim` and `num_kv_heads`: what a config without that key means
    (None: width / num_heads, and num_heads).
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None

    @property
    def classifier(self) -> str:
        """The same decoder with a score in place of the vocabulary's head."""
        return self.architecture.replace("ForCausalLM", _CLASSIFIER)


_CLASSIFIER = "ForSequenceClassification"
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, num_kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", head_dim=128, num_kv_heads=32),
}
"""By `model_type`. SmolLM2 and other Llama-shaped models are published as `llama`."""

DTYPES = ("float32", "bfloat16", "float16")

_ROPE_KINDS: Mapping[str, RopeKind] = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_ROPE_KEYS = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
_ROPE_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "original_max_position_embeddings"}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


class UnsupportedModel(UserError):
    """A model folder asks for something that burnish doesn't compute. The message lists everything found."""


def is_classifier(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` describes a sequence classifier: a reward model, or a critic."""
    return str((raw.get("architectures") or [""])[0]).endswith(_CLASSIFIER)


def read_config(raw: Mapping[str, Any], *, where: str = "config.json", classifier: bool = False) -> ModelConfig:
    """The architecture that a parsed `config.json` describes; `UnsupportedModel` names all that can't be honoured.

    classifier: of a sequence classifier, not of a language model; either is refused in the other's place.
    """
    name = _family_name(raw, where, classifier)
    family = FAMILIES[name]
    problems = [f"the key {key!r} is missing" for key in _REQUIRED if raw.get(key) is None] + _refusals(raw)
    rope, rope_problems = _read_rope(raw)
    problems += rope_problems
    if problems or rope is None:
        raise UnsupportedModel(f"{where} can't be used:" + "".join(f"\n  - {problem}" for problem in problems))
    heads, width, bias = raw["num_attention_heads"], raw["hidden_size"], bool(raw.get("attention_bias", False)) and not family.qkv_bias
    return ModelConfig(
        family=name,
        vocab_size=raw["vocab_size"],
        width=width,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or family.num_kv_heads or heads,
        head_dim=raw.get("head_dim") or family.head_dim or width // heads,
        mlp_width=raw["intermediate_size"],
        rope=rope,
        norm_eps=raw["rms_norm_eps"],
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw["max_position_embeddings"],
    )


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """The dtype that a config declares for its weights, in the newer (`dtype`) or the older form (`torch_dtype`); float32 if none."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} isn't supported; the weights must be one of {', '.join(DTYPES)}")
    return name


def write_config(config: ModelConfig, *, dtype: str, classifier: bool = False) -> dict[str, Any]:
    """The `config.json` of a model: the newer keys, and beside them the older ones, so that transformers 4 and 5 read the same model.

    classifier: of a sequence classifier with one label.
    """
    family = FAMILIES[config.family]
    fields = asdict(config.rope)
    rope = {hf: fields[ours] for hf, ours in _ROPE_KEYS[config.rope.kind].items() if fields[ours] is not None}
    kind = next(hf for hf, ours in _ROPE_KINDS.items() if ours == config.rope.kind)
    raw = {
        "architectures": [family.classifier if classifier else family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": {"rope_type": kind, "rope_theta": config.rope.theta, **rope},
        "rope_theta": config.rope.theta,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if rope:
        raw["rope_scaling"] = {"rope_type": kind, **rope}
    if not family.qkv_bias:
        raw["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if classifier:
        raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # how transformers says num_labels 1
    if read_config(raw, classifier=classifier) != config:
        raise UnsupportedModel(f"a config.json of the {config.family} family can't describe {config}")
    return raw


def _family_name(raw: Mapping[str, Any], where: str, classifier: bool) -> str:
    names = {name: family.classifier if classifier else family.architecture for name, family in FAMILIES.items()}
    known = ", ".join(names.values())
    architectures = raw.get("architectures") or []
    if not architectures:
        if raw.get("model_type") in FAMILIES:
            return raw["model_type"]
        raise UnsupportedModel(f"{where} names no architecture and its model_type is {raw.get('model_type')!r}; supported: {known}")
    for name, architecture in names.items():
        if architectures[0] == architecture:
            return name
    if is_classifier(raw) != classifier:
        wrong = "a language model, which gives no score" if classifier else "a sequence classifier, which has no vocabulary to sample from"
        raise UnsupportedModel(f"{where}: {architectures[0]!r} is {wrong}; what can be used here: {known}")
    raise UnsupportedModel(f"{where}: the architecture {architectures[0]!r} isn't supported; supported: {known}")


def _refusals(raw: Mapping[str, Any]) -> list[str]:
    """What transformers would honour and this decoder wouldn't."""
    problems = []
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    layers = raw.get("num_hidden_layers") or 0
    if raw.get("use_sliding_window") and raw.get("sliding_window") and raw.get("max_window_layers", 0) < layers:
        problems.append(f"a sliding window of {raw['sliding_window']} is in use (use_sliding_window); only full attention is supported")
    other = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other:
        problems.append(f"layer_types has {', '.join(map(repr, other))}; only 'full_attention' is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        problems.append(f"the weights are quantised (quantization_config, method {method!r}); save them unquantised")
    return problems


def _read_rope(raw: Mapping[str, Any]) -> tuple[RopeConfig | None, list[str]]:
    """RoPE from `rope_parameters` (newer) or `rope_theta` with `rope_scaling` (older); both may be there if they agree."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    bases = {source["rope_theta"] for source in (new, old, raw) if source.get("rope_theta") is not None}
    problems = []
    if not bases:
        problems.append("the RoPE base is missing: neither rope_theta nor rope_parameters.rope_theta is set")
    if len(bases) > 1:
        problems.append(f"rope_theta is given with different values: {sorted(bases)}")
    scaling = old or new
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if old and new and kind != (new.get("rope_type") or new.get("type") or "default"):
        problems.append(f"rope_scaling says {kind!r}, rope_parameters {new.get('rope_type')!r}")
    partial = raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        problems.append(f"partial_rotary_factor is {partial}; only the whole head can be rotated")
    if kind not in _ROPE_KINDS:
        return None, [*problems, f"the RoPE type {kind!r} isn't supported; supported: {', '.join(_ROPE_KINDS)}"]
    keys = _ROPE_KEYS[_ROPE_KINDS[kind]]
    problems += [f"RoPE type {kind!r} needs the key {key!r}" for key in keys if scaling.get(key) is None and key not in _ROPE_OPTIONAL]
    if problems or raw.get("max_position_embeddings") is None:
        return None, problems
    values = {ours: scaling[hf] for hf, ours in keys.items() if scaling.get(hf) is not None}
    if "original_max_position_embeddings" in keys:
        # Without its own key, the length before stretching is the model's: what transformers takes too.
        values.setdefault("original_max_positions", raw["max_position_embeddings"])
    return RopeConfig(theta=float(bases.pop()), kind=_ROPE_KINDS[kind], **values), []


# ------------------------------------------------------------------------------------------------------------------ tensor names

_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The matrices of a layer: stored [out, in] in a file, [in, out] here."""
_NORMS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def tensor_name(path: tuple[str, ...], layer: int) -> str:
    """The tensor of a leaf: `("embed",)`, or one layer's slice of `("layers", "q")`."""
    leaf = path[-1]
    if path[0] != "layers":
        return _TOP[leaf]
    if leaf in _NORMS:
        suffix = _NORMS[leaf]
    elif leaf.endswith("_bias"):
        suffix = MODULES[leaf.removesuffix("_bias")] + ".bias"
    else:
        suffix = MODULES[leaf] + ".weight"
    return f"model.layers.{layer}.{suffix}"


SCORE = "score.weight"
"""The head of a sequence classifier, [labels, D]; the decoder's tensors have the names that they have in a language model."""


def classifier_tensor_name(path: tuple[str, ...], layer: int) -> str:
    """The tensor of a leaf of `scalar_head.spec`: `("score",)`, or the decoder's `("decoder", "layers", "q")`."""
    return SCORE if path == ("score",) else tensor_name(path[1:], layer)


def is_derived(tensor: str) -> bool:
    """Whether a tensor is a constant that old files carry along (RoPE's inverse frequencies) and that nothing loads."""
    return tensor.endswith("rotary_emb.inv_freq")
