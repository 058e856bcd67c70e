"""Writes tests/models/golden/*.json with transformers: logits and scores of tiny models of each family, greedy continuations of SmolLM2.

    python tests/parity/regenerate_models.py        (`make parity` runs it; an unchanged tree must result)

The tiny models' weights are a function of their names (`testing.tiny.recipe_tensor`), so a fixture holds the config.json as transformers
writes it, token ids, positions and logits. Positions have gaps, so that every stretched frequency shows; where there are windows they
have none, as transformers counts windows in columns, and there are more tokens than a window holds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from burnish.models.locate import locate
from burnish.testing.tiny import recipe_tensor, write_recipe_model

GOLDEN = Path(__file__).resolve().parents[1] / "models" / "golden"
TOKENS = [3, 17, 0, 9, 22, 5, 9, 14]
POSITIONS = [0, 1, 2, 5, 11, 23, 47, 60]
MORE_TOKENS = [3, 17, 0, 9, 22, 5, 9, 14, 1, 20, 7, 7]
WINDOW = 4
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
BASE = 10_000.0


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": BASE, **options}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
CASES: dict[str, PreTrainedConfig] = {
    "llama_llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_linear_biased": LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0), attention_bias=True, mlp_bias=True),
    "smollm2": LlamaConfig(**SIZES, rope_parameters=rope("default"), tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=rope("default"), tie_word_embeddings=True),
    "qwen2_yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SIZES, rope_parameters=rope("default"), head_dim=16),
    "qwen2_windows": Qwen2Config(
        **SIZES, rope_parameters=rope("default"), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral": MistralConfig(**SIZES, rope_parameters=rope("default"), sliding_window=WINDOW, head_dim=16),
    "phi3": Phi3Config(**SIZES, rope_parameters=rope("default"), sliding_window=WINDOW, pad_token_id=None),
    "olmo2": Olmo2Config(**SIZES, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16), pad_token_id=None),
    "smollm3": SmolLM3Config(**SIZES, rope_parameters=rope("default"), no_rope_layers=[0, 1], pad_token_id=None),
    "gemma": GemmaConfig(**SIZES, rope_parameters=rope("default"), head_dim=16),
    "gemma2": Gemma2Config(**SIZES, **GEMMA, rope_parameters=rope("default"), attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        **GEMMA,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": rope("linear", factor=4.0), "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, rope_parameters=rope("default"), head_dim=16, moe_intermediate_size=16, num_experts=4),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, rope_parameters=rope("default"), num_local_experts=4, sliding_window=WINDOW),
}
"""Windows, caps, both RoPE bases, stretching, experts: each shows in the logits (`tests/models/test_parity_goldens.py`)."""
CLASSIFIERS: dict[str, PreTrainedConfig] = {
    "llama_classifier": LlamaConfig(**SIZES, rope_parameters=rope("default"), num_labels=1),
    "qwen2_classifier": Qwen2Config(**SIZES, rope_parameters=rope("default"), tie_word_embeddings=True, num_labels=1),
    "qwen3_classifier": Qwen3Config(**SIZES, rope_parameters=rope("default"), head_dim=16, num_labels=1),
}
PROMPTS = (
    "What is the capital of France?",
    "Calculate 7 + 5. Reply with only the final answer.",
    "Write a short poem about the sea.",
)


def recipe_model(config: PreTrainedConfig) -> torch.nn.Module:
    """transformers' model of a config, with the weights of the recipe.

    Experts, whose tensors transformers joins when it reads a folder, come through a folder of ours.
    """
    if hasattr(config, "num_experts_per_tok"):
        return model_of_folder(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tied = config.tie_word_embeddings
    state = {name: torch.from_numpy(recipe_tensor(name, tuple(value.shape))) for name, value in model.state_dict().items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def model_of_folder(config: PreTrainedConfig) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        write_recipe_model(folder, json.loads((Path(folder) / "config.json").read_text()))
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info.values()), info
    return model.eval()


def question_of(config: PreTrainedConfig) -> tuple[list[int], list[int]]:
    """Token ids and their positions."""
    if getattr(config, "sliding_window", None):
        return MORE_TOKENS, list(range(len(MORE_TOKENS)))
    return TOKENS, POSITIONS


def logits_of(model: torch.nn.Module) -> list[list[float]]:
    tokens, positions = question_of(model.config)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions])).logits[0]
    return [[round(float(value), 5) for value in row] for row in logits]


def recipe_classifier(config: PreTrainedConfig) -> Any:
    """transformers' sequence classifier of a config, with the weights of the recipe."""
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict({name: torch.from_numpy(recipe_tensor(name, tuple(value.shape))) for name, value in model.state_dict().items()})
    return model


def scores_of(model: Any) -> list[float]:
    """The score of every token, of which the last is the sequence's."""
    inputs = {"input_ids": torch.tensor([TOKENS]), "position_ids": torch.tensor([POSITIONS])}
    with torch.no_grad():
        scores = model.score(model.model(**inputs).last_hidden_state)[0, :, 0]
        assert abs(float(scores[-1] - model(**inputs).logits[0, 0])) < 1e-6
    return [round(float(value), 5) for value in scores]


def write(name: str, value: dict[str, Any]) -> None:
    """Kept as it is where only the last digit of some number moved: another processor rounds other sums."""
    path = GOLDEN / f"{name}.json"
    if path.is_file() and same(json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(value))):
        return
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
    path.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


def same(old: Any, new: Any) -> bool:
    """Equal, but for floats, which may differ by 2e-5: a fifth of what the tests allow."""
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= 2e-5
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(same(old[key], new[key]) for key in old)
    return old == new


def config_as_written(model: torch.nn.Module) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        raw = json.loads((Path(folder) / "config.json").read_text())
    return {key: value for key, value in raw.items() if key != "transformers_version"}


def greedy(name: str) -> None:
    folder = locate("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            # Nothing ends a continuation early: 32 tokens each, whatever they are.
            out = model.generate(**ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=2)
        start = ids["input_ids"].shape[1]
        rows.append({"prompt_ids": ids["input_ids"][0].tolist(), "continuation_ids": out[0, start:].tolist()})
    write(name, {"model": "smollm2-135m", "continuations": rows})


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, config in CASES.items():
        model = recipe_model(config)
        tokens, positions = question_of(config)
        write(name, {"config": config_as_written(model), "tokens": tokens, "positions": positions, "logits": logits_of(model)})
    for name, config in CLASSIFIERS.items():
        model = recipe_classifier(config)
        written = {"architectures": [type(model).__name__], **config_as_written(model)}
        write(name, {"config": written, "tokens": TOKENS, "positions": POSITIONS, "scores": scores_of(model)})
    greedy("smollm2_greedy")


if __name__ == "__main__":
    main()
