"""What burnish writes, other libraries read, and the other way: model folders with transformers, adapters with PEFT."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from burnish.config.schema import LoraConfig
from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.lora import init_adapter
from burnish.models.scalar_head import token_scalars
from burnish.models.transformer import Adapter, Params, capped, forward, head_matrix

sys.path.insert(0, str(Path(__file__).parent))
from regenerate_models import CASES, CLASSIFIERS, POSITIONS, TOKENS, logits_of, question_of, recipe_classifier, recipe_model, scores_of

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


def our_logits(config: ModelConfig, params: Params, adapter: Adapter | None = None, *, question: Any = (TOKENS, POSITIONS)) -> np.ndarray:
    tokens, positions = (jnp.asarray([ids], jnp.int32) for ids in question)
    rule = Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))
    hidden = forward(config, params, tokens, positions, rule, adapter=adapter)
    return np.asarray(capped(hidden[0] @ head_matrix(config, params).T, config.logit_cap))


@pytest.mark.parametrize("name", CASES)
def test_we_load_theirs_and_they_load_ours(name: str, tmp_path: Path) -> None:
    theirs = recipe_model(CASES[name])
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = weights.load(tmp_path / "theirs")
    ours = our_logits(config, params, question=question_of(CASES[name]))
    np.testing.assert_allclose(ours, logits_of(theirs), atol=1e-4)
    weights.save(tmp_path / "ours", config, params, shard_bytes=20_000)
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    np.testing.assert_allclose(logits_of(again.eval()), ours, atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_the_same_both_ways(name: str, tmp_path: Path) -> None:
    theirs = recipe_classifier(CLASSIFIERS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = weights.load_scalar(tmp_path / "theirs")
    tokens, positions = (jnp.asarray([ids], jnp.int32) for ids in (TOKENS, POSITIONS))
    ours = np.asarray(token_scalars(config, params, tokens, positions, Visibility(jnp.ones_like(tokens), jnp.zeros_like(tokens))))[0]
    np.testing.assert_allclose(ours, scores_of(theirs), atol=1e-4)
    weights.save_scalar(tmp_path / "ours", config, params)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert again.config.num_labels == 1
    np.testing.assert_allclose(scores_of(again), ours, atol=1e-4)


def lively_adapter(config: ModelConfig, params: Params, options: LoraConfig) -> Adapter:
    """An adapter whose `b` has left zero."""
    fresh = init_adapter(config, options, jax.random.key(0), params)
    return fresh._replace(pairs=jax.tree.map(lambda leaf: leaf + 0.1, fresh.pairs))


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}], ids=["plain", "rslora", "dora"])
def test_peft_loads_our_adapter(kind: dict[str, bool], tmp_path: Path) -> None:
    theirs = recipe_model(CASES["qwen3"])
    theirs.save_pretrained(tmp_path / "base")
    config, params = weights.load(tmp_path / "base")
    options = LoraConfig(rank=4, alpha=8.0, **kind)
    adapter = lively_adapter(config, params, options)
    weights.save_adapter(tmp_path / "adapter", config, adapter, base=str(tmp_path / "base"), options=options)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["use_rslora"], told["use_dora"], told["lora_alpha"]) == (options.rslora, options.dora, 8.0)
    with_adapter = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ours = our_logits(config, params, adapter)
    np.testing.assert_allclose(logits_of(with_adapter), ours, atol=1e-4)
    assert np.abs(ours - our_logits(config, params)).max() > 0.1


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["plain", "rslora", "dora"])
def test_we_load_an_adapter_of_peft(kind: dict[str, bool], tmp_path: Path) -> None:
    theirs = recipe_model(CASES["smollm2"])
    theirs.save_pretrained(tmp_path / "base")
    options = PeftLoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"], **kind)
    with_adapter = get_peft_model(theirs, options).eval()
    with torch.no_grad():
        for name, value in with_adapter.named_parameters():
            if "lora_B" in name:
                value += 0.1
    with_adapter.save_pretrained(tmp_path / "adapter")
    config, params = weights.load(tmp_path / "base")
    adapter = weights.load_adapter(tmp_path / "adapter", config)
    assert set(adapter.pairs) == {"q", "o", "down"}
    np.testing.assert_allclose(our_logits(config, params, adapter), logits_of(with_adapter), atol=1e-4)
