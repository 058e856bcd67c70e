"""What `burnish export` writes: transformers and PEFT load it, and its logits are those of the run."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from burnish.cli.main import main
from burnish.config.schema import LoraConfig
from burnish.models import weights
from burnish.models.lora import init_adapter
from burnish.models.transformer import Adapter
from burnish.testing.byte_tokenizer import make_tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from regenerate_models import CASES, logits_of, question_of, recipe_model
from test_models import our_logits

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


def make_run(name: str, folder: Path, options: LoraConfig) -> tuple[torch.nn.Module, np.ndarray]:
    """A run with an adapter on transformers' model of a case, as `export` finds it; the base, and the logits that it should have."""
    theirs = recipe_model(CASES[name])
    theirs.save_pretrained(folder / "base")
    config, params = weights.load(folder / "base")
    fresh = init_adapter(config, options, jax.random.key(0), params)
    adapter = Adapter(jax.tree.map(lambda leaf: leaf + 0.03, fresh.pairs), fresh.scale)
    (folder / "run").mkdir()
    (folder / "run" / "status.json").write_text("{}")
    weights.save_adapter(folder / "run" / "adapter", config, adapter, base=str(folder / "base"), options=options)
    ours = our_logits(config, params, adapter, question=question_of(CASES[name]))
    assert np.abs(ours - our_logits(config, params, question=question_of(CASES[name]))).max() > 0.1
    return theirs, ours


ATTENTION = LoraConfig(rank=4, alpha=8.0, targets=("q", "k", "v", "o"))


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "gemma3", "phi3", "olmo2", "mixtral"])
def test_a_merged_export_has_the_logits_of_the_adapter_in_transformers(name: str, tmp_path: Path) -> None:
    """Heads tied and not, norms in other places, joined projections, experts."""
    _, ours = make_run(name, tmp_path, ATTENTION)
    make_tiny_tokenizer(tmp_path / "base", "0123456789")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    np.testing.assert_allclose(logits_of(again.eval()), ours, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_an_exported_adapter_has_the_same_logits_in_peft(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = make_run("gemma2", tmp_path, LoraConfig(rank=4, alpha=8.0, **options))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter"]) == 0
    with_adapter = PeftModel.from_pretrained(theirs, tmp_path / "out").eval()
    np.testing.assert_allclose(logits_of(with_adapter), ours, atol=1e-4)
