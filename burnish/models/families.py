"""What a Hugging Face `config.json` means, and what its tensors are called, for each family of decoders.

Owns the translation between `config.json` and `ModelConfig` in both directions and the tables of tensor names. Whatever changes the
result and isn't supported is refused by name, all of it in one error. Opens no tensors (`weights.py`); keys of RoPE and of single layers
are read by `rope_keys.py` and `layer_keys.py`. A new family is one entry of `FAMILIES`, with a table of names where its own differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from burnish.config.errors import UserError
from burnish.models import layer_keys, rope_keys
from burnish.models.config import Activation, ModelConfig, MoeConfig, Norms, QkNorm
from burnish.models.layer_keys import LayerRule

_CLASSIFIER = "ForSequenceClassification"


class Part(NamedTuple):
    """Some rows of a tensor: from `first` on, of `total`."""

    tensor: str
    first: int
    total: int


TensorName = Callable[..., str | Part]
"""(path of a leaf, layer, and expert where it has any; 0 for a leaf that isn't stacked) → the tensor that holds it, or its part."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a family's tensor names differ from Llama's. norms: of a layer's norms. fused: leaves whose rows share a tensor, in order."""

    norms: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Experts:
    """The keys of a config that has experts, and the names of their tensors. count: the keys that may say how many; the first is written.
    width: None where it's `intermediate_size`. normalised: the key; None where weights always are."""

    count: tuple[str, ...]
    width: str | None
    normalised: str | None
    router: str
    matrices: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """How one `architectures` entry differs from the others.

    qkv_bias: biases on q, k, v alone, whatever the config says. biases: the keys that switch biases on. `head_dim` and `num_kv_heads`: what
    a config without that key means (None: width / num_heads, and num_heads); absent: what it means without others. gemma: norms multiply
    by 1 + w, embeddings are scaled, attention's scale and the caps have keys. layers: how the config says which layers differ. two_ropes:
    layers with a window rotate by a RoPE of their own. names: see `_Names`. experts: where its config counts them, and how their tensors
    are called.
    """

    architecture: str
    qkv_bias: bool = False
    biases: tuple[Literal["attention_bias", "mlp_bias"], ...] = ("attention_bias",)
    qk_norm: QkNorm | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    absent: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms = "before"
    gemma: bool = False
    layers: LayerRule = layer_keys.PLAIN
    two_ropes: bool = False
    names: _Names | None = None
    experts: _Experts | None = None
    classifier_stem: str | None = None

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors of a layer that hold several leaves, by name."""
        return self.names.fused if self.names else {}

    @property
    def classifier(self) -> str:
        """The same decoder with a score in place of the vocabulary's head."""
        return (self.classifier_stem or self.architecture.removesuffix("ForCausalLM")) + _CLASSIFIER


_AROUND = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_AFTER = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
_QWEN3_EXPERTS = _Experts(
    count=("num_experts", "num_local_experts"),  # the published configs' key, and the one that transformers 5 writes
    width="moe_intermediate_size",
    normalised="norm_topk_prob",
    router="mlp.gate",
    matrices={name: f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
)
_MIXTRAL_EXPERTS = _Experts(
    count=("num_local_experts",),
    width=None,
    normalised=None,
    router="block_sparse_moe.gate",
    matrices={name: f"block_sparse_moe.experts.{{}}.{theirs}" for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
)
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = _GEMMA | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", biases=("attention_bias", "mlp_bias")),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, biases=(), num_kv_heads=32, layers=layer_keys.UPPER),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", head_dim=128, num_kv_heads=32, layers=layer_keys.UPPER),
    "mistral": Family("MistralForCausalLM", biases=(), num_kv_heads=8, layers=layer_keys.everywhere(unless_said=4096)),
    "phi3": Family("Phi3ForCausalLM", biases=(), layers=layer_keys.everywhere(), names=_Names(fused=_FUSED)),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="whole", norms="after", names=_Names(norms=_AFTER)),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        biases=("attention_bias", "mlp_bias"),
        num_kv_heads=4,
        absent={"tie_word_embeddings": True},
        layers=layer_keys.UNROTATED,
    ),
    "gemma": Family("GemmaForCausalLM", num_kv_heads=16, absent=_GEMMA, gemma=True),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        num_kv_heads=4,
        absent=_GEMMA2,
        norms="around",
        gemma=True,
        layers=layer_keys.alternating(every=2, window=4096, second_rope=False),
        names=_Names(norms=_AROUND),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm="head",
        num_kv_heads=4,
        absent=_GEMMA | {"query_pre_attn_scalar": 256},
        norms="around",
        gemma=True,
        layers=layer_keys.alternating(every=6, window=4096, second_rope=True),
        two_ropes=True,
        names=_Names(norms=_AROUND),
        classifier_stem="Gemma3Text",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        num_kv_heads=4,
        layers=layer_keys.everywhere(unless_said=4096, switched=True),
        experts=_QWEN3_EXPERTS,
    ),
    "mixtral": Family("MixtralForCausalLM", biases=(), num_kv_heads=8, layers=layer_keys.everywhere(), experts=_MIXTRAL_EXPERTS),
}
"""By `model_type`. SmolLM2 and other Llama-shaped models are published as `llama`."""

DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)

_LARGEST = 1 << 26
"""Of any size in a config, beyond all models: what isn't a model's could fill the memory before a single tensor is read."""
_MOST_STACKED = 10_000
"""Layers, and experts of one, each of which has names of its own."""


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
    raw = {**family.absent, **raw}
    if sizes := _odd_sizes(raw, family):
        raise UnsupportedModel(f"{where} can't be used:" + "".join(f"\n  - {problem}" for problem in sizes))
    problems = [f"the key {key!r} is missing" for key in _REQUIRED if raw.get(key) is None] + _refusals(raw, family)
    kinds, kind_problems = family.layers.read(raw)
    if family.two_ropes:
        rope, second_rope, rope_problems = rope_keys.read_two_ropes(raw)
    else:
        (rope, rope_problems), second_rope = rope_keys.read_rope(raw), None
    problems += kind_problems + rope_problems
    if problems or rope is None:
        raise UnsupportedModel(f"{where} can't be used:" + "".join(f"\n  - {problem}" for problem in problems))
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    bias = "attention_bias" in family.biases and bool(raw.get("attention_bias", False))
    head_dim = raw.get("head_dim") or family.head_dim or width // heads
    experts = family.experts
    return ModelConfig(
        family=name,
        vocab_size=raw["vocab_size"],
        width=width,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or family.num_kv_heads or heads,
        head_dim=head_dim,
        mlp_width=raw[experts.width if experts and experts.width else "intermediate_size"],
        rope=rope,
        norm_eps=raw["rms_norm_eps"],
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias="mlp_bias" in family.biases and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw["max_position_embeddings"],
        layer_kinds=kinds,
        second_rope=second_rope if any(kind.second_rope for kind in kinds) else None,
        activation=_ACTIVATIONS[_activation(raw, family)],
        norms=family.norms,
        unit_offset=family.gemma,
        scaled_embedding=family.gemma,
        attention_scale=_attention_scale(raw, head_dim),
        attention_cap=raw.get("attn_logit_softcapping") if family.gemma else None,
        logit_cap=raw.get("final_logit_softcapping") if family.gemma else None,
        moe=_read_experts(raw, experts),
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
    activation = next(hf for hf, ours in _ACTIVATIONS.items() if ours == config.activation)
    rope = rope_keys.write_rope(config.rope)
    if family.two_ropes:
        rope = rope_keys.write_two_ropes(config.rope, config.second_rope or config.rope)
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
        "hidden_act": activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        **rope,
        # Where nothing says them (a tokenizer's folder may), transformers would take ids of the family's published vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": dtype,
        "torch_dtype": dtype,
        **family.layers.write(config),
    }
    raw |= {key: config.qkv_bias if key == "attention_bias" else config.mlp_bias for key in family.biases}
    if family.gemma:
        raw |= {"hidden_activation": activation} | _write_caps(config, family)
    if family.experts and config.moe:
        raw |= _write_experts(config.moe, config.mlp_width, family.experts)
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


def _odd_sizes(raw: Mapping[str, Any], family: Family) -> list[str]:
    """Sizes that no model has; one that is missing is told elsewhere."""
    stacked = {"num_hidden_layers", *(family.experts.count if family.experts else ())}
    most = {key: _LARGEST for key in (*_REQUIRED, "num_key_value_heads", "head_dim")} | dict.fromkeys(stacked, _MOST_STACKED)
    del most["rms_norm_eps"]
    given = {key: raw[key] for key in most if raw.get(key) is not None}
    return [
        f"{key} is {value!r:.40}, expected a whole number from 1 to {most[key]}"
        for key, value in given.items()
        if type(value) is not int or not 1 <= value <= most[key]
    ]


def _refusals(raw: Mapping[str, Any], family: Family) -> list[str]:
    """What transformers would honour and this decoder wouldn't."""
    problems = []
    if _activation(raw, family) not in _ACTIVATIONS:
        problems.append(f"hidden_act is {_activation(raw, family)!r}; supported: {', '.join(map(repr, _ACTIVATIONS))}")
    if raw.get("use_bidirectional_attention"):
        problems.append("use_bidirectional_attention is set; only causal attention is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        problems.append(f"the weights are quantised (quantization_config, method {method!r}); save them unquantised")
    if family.experts:
        needed = ["num_experts_per_tok", *filter(None, [family.experts.width])]
        problems += [f"the key {key!r} is missing" for key in needed if raw.get(key) is None]
        if all(raw.get(key) is None for key in family.experts.count):
            problems.append(f"the key {family.experts.count[0]!r} is missing")
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            problems.append("some layers have an MLP without experts (mlp_only_layers, decoder_sparse_step); all must have them")
        if raw.get("router_jitter_noise"):
            problems.append(f"router_jitter_noise is {raw['router_jitter_noise']}; routers here have no noise")
    return problems


def _activation(raw: Mapping[str, Any], family: Family) -> str:
    """What the MLP's gate goes through. A Gemma's "gelu" means the tanh formula: its first configs said one and were trained with the
    other."""
    if not family.gemma:
        return raw.get("hidden_act") or "silu"
    said = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    return "gelu_pytorch_tanh" if said == "gelu" else said


def _attention_scale(raw: Mapping[str, Any], head_dim: int) -> float | None:
    scalar = raw.get("query_pre_attn_scalar")
    return None if scalar is None or scalar == head_dim else float(scalar) ** -0.5


def _write_caps(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Attention's scale and the caps, for families whose config has them."""
    if "query_pre_attn_scalar" not in family.absent:
        return {}
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    whole = round(scalar)
    return {
        "query_pre_attn_scalar": whole if abs(scalar - whole) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def _read_experts(raw: Mapping[str, Any], experts: _Experts | None) -> MoeConfig | None:
    if experts is None:
        return None
    normalised = True if experts.normalised is None else bool(raw.get(experts.normalised, False))
    count = next(raw[key] for key in experts.count if raw.get(key) is not None)
    given = raw.get("router_aux_loss_coef")
    return MoeConfig(count, raw["num_experts_per_tok"], normalised, **({} if given is None else {"balance": float(given)}))


def _write_experts(moe: MoeConfig, width: int, experts: _Experts) -> dict[str, Any]:
    raw: dict[str, Any] = {experts.count[0]: moe.num_experts, "num_experts_per_tok": moe.per_token, "router_aux_loss_coef": moe.balance}
    if experts.width:
        raw |= {experts.width: width, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return raw | ({experts.normalised: moe.normalised} if experts.normalised else {})


# ------------------------------------------------------------------------------------------------------------------ tensor names

TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
"""The tensors outside the layers, the same in every family."""
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
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def tensor_names(config: ModelConfig) -> TensorName:
    """What the family calls the tensor of a leaf: of `("embed",)`, of a layer's slice of `("layers", "q")`, or of an expert's."""
    family = FAMILIES[config.family]
    names = family.names or _Names()
    norms = _NORMS | dict(names.norms)
    fused = {leaf: (tensor, leaves) for tensor, leaves in family.fused.items() for leaf in leaves}
    rows = {"q": config.num_heads * config.head_dim, "gate": config.mlp_width, "up": config.mlp_width}
    rows |= dict.fromkeys(("k", "v"), config.num_kv_heads * config.head_dim)

    def name(path: tuple[str, ...], layer: int, expert: int = 0) -> str | Part:
        leaf = path[-1]
        if path[0] != "layers":
            return TOP[leaf]
        prefix = f"model.layers.{layer}"
        if leaf in fused:
            tensor, leaves = fused[leaf]
            before = sum(rows[other] for other in leaves[: leaves.index(leaf)])
            return Part(f"{prefix}.{tensor}.weight", before, sum(rows[other] for other in leaves))
        if family.experts and leaf == "router":
            return f"{prefix}.{family.experts.router}.weight"
        if family.experts and leaf in family.experts.matrices:
            return f"{prefix}.{family.experts.matrices[leaf].format(expert)}.weight"
        if leaf.endswith("_bias"):
            return f"{prefix}.{MODULES[leaf.removesuffix('_bias')]}.bias"
        return f"{prefix}.{norms[leaf] if leaf in norms else MODULES[leaf]}.weight"

    return name


SCORE = "score.weight"
"""The head of a sequence classifier, [labels, D]; the decoder's tensors have the names that they have in a language model."""


def classifier_tensor_names(config: ModelConfig) -> TensorName:
    """The tensor of a leaf of `scalar_head.spec`: `("score",)`, or the decoder's `("decoder", "layers", "q")`."""
    decoder = tensor_names(config)
    return lambda path, *index: SCORE if path == ("score",) else decoder(path[1:], *index)


def is_derived(tensor: str) -> bool:
    """Whether a tensor is a constant that old files carry along (RoPE's inverse frequencies) and that nothing loads."""
    return tensor.endswith("rotary_emb.inv_freq")
