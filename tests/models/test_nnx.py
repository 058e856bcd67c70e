"""Locks: a module's gradients are the native model's, leaf by leaf; a run with it samples, learns and says what the native run does; what
it can't do is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from burnish.config.algorithms import CriticConfig, GRPOConfig
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.schema import ClusterConfig, LoraConfig
from burnish.config.tuning import SFTTrainingConfig
from burnish.models.attention import Visibility, attention, visible_pairs
from burnish.models.model import Model
from burnish.models.nnx import to_nnx
from burnish.rl.algorithms import from_config
from burnish.rl.cluster import RLCluster
from burnish.rollout.recomputing import RecomputingEngine
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.optim import make_optimizer
from burnish.train.step import MicroBatch, make_steps
from burnish.train.trainers.named import PeftTrainer
from tests.models.llama_nnx import as_nnx, llama
from tests.rl.runs import RecordingCluster, make_learner
from tests.train import tiny_updates


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=3.0)
    return Model.load(folder)


@pytest.fixture(scope="module")
def module(native: Model) -> Model:
    """The same weights in a module."""
    model = llama(native.config, native.folder)
    return replace(model, params=as_nnx(native.params))


def test_the_mask_says_who_sees_whom() -> None:
    """Over random rows, attention in blocks is attention under the dense mask; a query that sees nothing gives 0."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray([[1, 1, 2, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 4, 4, 0]], jnp.int32)
    parents = jnp.asarray([[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 2, 2, 0]], jnp.int32)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 8, 1, 4)), jnp.float32) for _ in range(3))
    mask = np.asarray(visible_pairs(Visibility(segments, parents)))
    weights = np.exp(np.einsum("bqhd,bkhd->bqk", q, k) / 2) * mask
    shares = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(attention(q, k, v, Visibility(segments, parents))[:, :, 0], shares @ np.asarray(v)[:, :, 0], atol=1e-5)


def test_an_updates_gradients_are_the_native_models(native: Model) -> None:
    """Of GRPO, on packed rows in which completions share their prompt, with padding."""
    config, params = tiny_updates.CONFIG, tiny_updates.base()
    model = llama(config, native.folder)
    assert model.config.vocab_size == config.vocab_size and model.config.width == config.width
    micro = MicroBatch(tiny_updates.batch())

    def totals(model_config: Any, weights: Any) -> Any:
        optimizer = make_optimizer(OptimizerConfig(), total_updates=1)
        return make_steps(model_config, from_config(GRPOConfig()), optimizer, lora_scale=None).totals(weights, None, micro)

    ours, theirs = totals(config, params), totals(model.config, as_nnx(params))
    assert float(theirs.loss.total) == pytest.approx(float(ours.loss.total), abs=1e-5)
    expected = as_nnx(ours.gradients)
    assert theirs.gradients.keys() == expected.keys() == model.params.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(theirs.gradients[name], gradient, rtol=1e-4, atol=2e-5, err_msg=name)
    assert max(float(jnp.max(jnp.abs(g))) for g in expected.values()) > 1e-2


@pytest.mark.slow
def test_a_run_is_the_native_models(native: Model, module: Model) -> None:
    """The same completions, the same losses, from the trainer's side and the sampler's; and the module comes back trained."""
    runs = {
        "native": make_learner(native, learning_rate=1e-3),
        "module": make_learner(module, engine=RecomputingEngine(module, context=16), learning_rate=1e-3),
    }
    clusters: dict[str, RecordingCluster] = {}
    for name, learner in runs.items():
        learner.train()
        assert isinstance(learner.cluster, RecordingCluster)
        clusters[name] = learner.cluster
    ours, theirs = clusters["native"], clusters["module"]
    np.testing.assert_array_equal(ours.batches[0].target_ids, theirs.batches[0].target_ids)
    assert max(theirs.worst_mismatch) < 1e-4, "the second step's too, after the weights went over"
    for name in ("policy/loss", "optim/grad_norm"):
        np.testing.assert_allclose(theirs.means(name), ours.means(name), rtol=1e-3, atol=1e-5)
    trained, state = to_nnx(module, theirs.state.trainable), theirs.state.trainable
    np.testing.assert_array_equal(trained.layers[0].q.kernel[...], state["layers.0.q.kernel"])
    assert float(jnp.max(jnp.abs(state["layers.0.q.kernel"] - module.params["layers.0.q.kernel"]))) > 1e-5
    with pytest.raises(UserError, match="the NNX module Llama has no form of Hugging Face's"):
        theirs.export(native.folder / "out")


@pytest.mark.slow
def test_supervised_training_gives_the_native_models_losses(native: Model, module: Model) -> None:
    def losses(model: Model) -> list[float]:
        training = SFTTrainingConfig(max_steps=2, batch_size=4, max_tokens=16, optimizer=OptimizerConfig(learning_rate=1e-3))
        rows = [{"prompt": str(i), "completion": str(9 - i)} for i in range(4)]
        return [metrics["policy/loss"] for metrics in PeftTrainer(model, train_ds=rows, precision="f32", training=training).train().history]

    first, second = losses(module)
    assert second < first
    np.testing.assert_allclose([first, second], losses(native), rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "native engine can't sample from the NNX module Llama: give engine=RecomputingEngine"),
        ({"lora": LoraConfig(rank=2)}, "adapters are for the decoders of this package, not for the NNX module Llama"),
        ({"critic": CriticConfig()}, "the NNX module Llama has none: give algorithm.critic.path"),
        ({"cluster": ClusterConfig.model_validate({"actor": {"axes": {"fsdp": 2}}})}, "so fsdp can't cut them: use data alone"),
    ],
)
def test_what_it_cant_do_is_said(module: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RLCluster(module, **options)


def test_noise_and_adapters_of_trainers_are_refused(module: Model) -> None:
    rows = [{"prompt": "1", "completion": "2"}]
    plain = SFTTrainingConfig(max_steps=1, batch_size=1, max_tokens=8)
    with pytest.raises(UserError, match="adapters are for the decoders"):
        PeftTrainer(module, train_ds=rows, lora=LoraConfig(rank=2, quantize="nf4"), training=plain)
    noisy = plain.model_copy(update={"neftune_alpha": 5.0})
    with pytest.raises(UserError, match=r"takes no adapter and no noise \(NEFTune\)"):
        PeftTrainer(module, train_ds=rows, training=noisy).train()


def test_numbers_come_back_in_the_modules_own_type(native: Model) -> None:
    from flax import nnx

    from burnish.models.nnx import from_nnx

    embed = nnx.Embed(11, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model = from_nnx(embed, native.folder, hidden=lambda m, tokens, *_: m(tokens), head=lambda m: m.embedding[...], max_positions=8)
    assert {name: leaf.dtype for name, leaf in model.params.items()} == {"embedding": jnp.float32}, "float32 masters"
    back = to_nnx(model, jax.tree.map(lambda x: x + 1, model.params))
    assert back.embedding[...].dtype == jnp.bfloat16
    np.testing.assert_allclose(back.embedding[...].astype(jnp.float32), model.params["embedding"] + 1, rtol=1e-2)
