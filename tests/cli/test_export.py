"""`burnish export`: a folder with the same logits as what was exported; a run's adapter merged or alone; nothing is overwritten."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.cli.main import main
from burnish.config.schema import LoraConfig
from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.config import ModelConfig
from burnish.models.lora import init_adapter
from burnish.models.quant import opened, quantised
from burnish.models.transformer import Adapter, Params, forward, head_matrix
from burnish.testing.tiny import tiny_config, write_tiny_model

TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q", "o"))


def logits(config: ModelConfig, params: Params, adapter: Adapter | None = None) -> np.ndarray:
    hidden = forward(config, params, TOKENS, TOKENS, Visibility(jnp.ones_like(TOKENS), jnp.zeros_like(TOKENS)), adapter=adapter)
    return np.asarray(hidden[0] @ head_matrix(config, params).T)


def make_run(folder: Path, config: ModelConfig) -> tuple[ModelConfig, Params, Adapter]:
    """A run that has made an adapter, as far as `export` looks at it."""
    config = write_tiny_model(folder / "base", config=config)
    params = weights.load(folder / "base")[1]
    fresh = init_adapter(config, LORA, jax.random.key(1))
    adapter = fresh._replace(pairs=jax.tree.map(lambda leaf: leaf + 0.1, fresh.pairs))
    (folder / "run").mkdir()
    (folder / "run" / "status.json").write_text("{}")
    weights.save_adapter(folder / "run" / "adapter", config, adapter, base=str(folder / "base"), options=LORA)
    return config, params, adapter


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_is_exported_merged_with_the_logits_of_its_adapter(tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, params, adapter = make_run(tmp_path, replace(tiny_config("qwen2"), tied_head=tied))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "language model of the qwen2 family" in capsys.readouterr().out
    again, loaded = weights.load(tmp_path / "out")
    assert again == config and ("head" in loaded) == (not tied)
    wanted = logits(config, params, adapter)
    np.testing.assert_allclose(logits(again, loaded), wanted, atol=1e-5)
    assert np.abs(wanted - logits(config, params)).max() > 1e-2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["architectures"], raw["tie_word_embeddings"], raw["dtype"]) == (["Qwen2ForCausalLM"], tied, "float32")


def test_an_adapter_trained_beside_few_bits_is_merged_into_what_these_say(tmp_path: Path) -> None:
    config, params, adapter = make_run(tmp_path, tiny_config("qwen2"))
    (tmp_path / "run" / "config.yaml").write_text("model: {lora: {quantize: nf4}}\n")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    wanted = logits(config, opened(quantised(params, "nf4")), adapter)
    np.testing.assert_allclose(logits(config, weights.load(tmp_path / "out")[1]), wanted, atol=1e-5)
    assert np.abs(wanted - logits(config, params, adapter)).max() > 1e-3, "another model than beside the whole base"


def test_a_runs_adapter_alone_is_the_adapter_under_its_bases_name(tmp_path: Path) -> None:
    config, params, adapter = make_run(tmp_path, tiny_config("qwen2"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter", "--base", "some/base"]) == 0
    again = weights.load_adapter(tmp_path / "out", config)
    np.testing.assert_array_equal(logits(config, params, again), logits(config, params, adapter))
    raw = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (raw["base_model_name_or_path"], raw["r"], raw["lora_alpha"]) == ("some/base", 4, 8.0)
    assert sorted(raw["target_modules"]) == ["o_proj", "q_proj"]


def test_a_model_keeps_its_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text")
    params = make_params(tmp_path / "model", config, dtype="bfloat16")
    for dtype, options in (("bfloat16", []), ("float32", ["--dtype", "float32"])):
        assert main(["export", str(tmp_path / "model"), str(tmp_path / dtype), *options]) == 0
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
        assert (tmp_path / dtype / "LICENSE.html").read_text() == "terms", "it travels with the weights"
        stored = weights.load(tmp_path / dtype, dtype=None)[1]
        assert stored["embed"].dtype == dtype
        np.testing.assert_array_equal(stored["embed"].astype(jnp.float32), params["embed"].astype(jnp.float32))


def make_params(folder: Path, config: ModelConfig, *, dtype: str) -> Params:
    """Of a base model, which has no chat template."""
    config = write_tiny_model(folder, config=config)
    (folder / "tokenizer_config.json").unlink()  # where it would stand
    (folder / "LICENSE.html").write_text("terms")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), weights.load(folder)[1])
    weights.save(folder, config, params, like=folder)
    return params


def test_a_sequence_classifier_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "scores", classifier=True)
    (tmp_path / "scores" / "tokenizer.json").unlink()  # nothing about texts is needed, nor a chat template: base models have none
    assert main(["export", str(tmp_path / "scores"), str(tmp_path / "out")]) == 0
    assert "sequence classifier" in capsys.readouterr().out
    (_, before), (_, after) = weights.load_scalar(tmp_path / "scores"), weights.load_scalar(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_what_cannot_be_exported_is_said_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, tiny_config("phi3"))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "status.json").write_text("{}")
    base, run, out = str(tmp_path / "base"), str(tmp_path / "run"), str(tmp_path / "out")
    for arguments, said in (
        ([base, base], "is there already"),
        ([base, out, "--adapter"], "holds no adapter/"),
        ([run, out, "--adapter"], "one matrix each for qkv_proj, gate_up_proj"),
        ([base, out, "--base", "x"], "goes with --adapter"),
        ([str(tmp_path / "unfinished"), out], "hasn't finished"),
        ([str(tmp_path / "missing"), out], "no model at"),
    ):
        assert main(["export", *arguments]) == 2, arguments
        assert said in capsys.readouterr().err
        assert not Path(out).exists()
