"""Locks: layout can't change a gradient, a pair is never torn, the reference is the start, a run that goes on makes the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.checkpoint.saver import Saver
from burnish.checkpoint.store import CheckpointError
from burnish.config.errors import UserError
from burnish.config.optimizer import OptimizerConfig
from burnish.config.preference import KTOConfig, SigmoidConfig
from burnish.config.schema import LoraConfig, MeshSpec, RunSection
from burnish.config.tuning import PreferenceTrainingConfig, SFTTrainingConfig
from burnish.models.model import Model
from burnish.models.transformer import Adapter
from burnish.models.weights import save_adapter
from burnish.rl.batch import by_sequence
from burnish.train.trainers.batches import micro_batches
from burnish.train.trainers.named import DPOTrainer, PeftTrainer
from burnish.train.trainers.noise import token_numbers
from burnish.train.trainers.trainer import Trainer

from .toys import labels, pairs, successors, tiny_model

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q", "down"))
RATE = OptimizerConfig(learning_rate=1e-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model"))


def sft(model: Model, *, tokens: int = 64, rows: Any = None, lora: LoraConfig = LORA, **options: Any) -> PeftTrainer:
    training = SFTTrainingConfig(max_steps=4, batch_size=4, max_tokens=16, tokens_per_device=tokens, optimizer=RATE, **options)
    return PeftTrainer(model, train_ds=rows or successors(), lora=lora, training=training)


def dpo(model: Model, loss: Any = SigmoidConfig(), *, tokens: int = 64, lora: LoraConfig | None = LORA, **options: Any) -> DPOTrainer:
    rows = labels(12, seed=0) if isinstance(loss, KTOConfig) else pairs(12, seed=0)
    sizes = {"max_steps": 3, "batch_size": 4, "max_tokens": 16, "tokens_per_device": tokens}
    training = PreferenceTrainingConfig(**sizes, optimizer=RATE, **options)
    return DPOTrainer(model, loss, train_ds=rows, lora=lora, training=training)


def moved(trainer: Trainer, *, steps: int = 1) -> Any:
    """A policy that is no longer its reference."""
    for _ in range(steps):
        assert trainer._step()
    return trainer


def gradient(trainer: Trainer, rows: int = 4) -> tuple[float, Any, int]:
    """Loss and gradient of the next rows, and over how many micro-batches."""
    batches = trainer._micro_batches(trainer._stream.take(rows), 1)
    policy = trainer.policy
    totals = [policy._steps.totals(policy.state.trainable, policy._base, batch) for batch in batches]
    weight = sum(float(t.loss.weight) for t in totals)
    summed = jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)) / weight, *(t.gradients for t in totals))
    return sum(float(t.loss.total) for t in totals) / weight, summed, len(batches)


def check_same(one: tuple[float, Any, int], other: tuple[float, Any, int]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        assert np.linalg.norm(a) > 1e-6 and np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a) + 1e-8


@pytest.mark.slow
def test_packing_does_not_change_the_supervised_gradient(model: Model) -> None:
    packed, alone = (gradient(moved(sft(model, tokens=tokens))) for tokens in (64, 8))
    assert packed[2] == 1 and alone[2] == 4
    check_same(packed, alone)


@pytest.mark.slow
def test_what_is_random_does_not_depend_on_the_packing(model: Model) -> None:
    """Noise on embeddings and an adapter's dropout are of a token, wherever it lies."""
    lora = LORA.model_copy(update={"dropout": 0.3})
    packed, alone = (gradient(moved(sft(model, tokens=tokens, lora=lora, neftune_alpha=5.0))) for tokens in (64, 8))
    assert packed[2] == 1 and alone[2] == 4
    check_same(packed, alone)


def test_a_token_is_numbered_by_its_sequence_or_by_the_row_whose_prompt_it_is_in(model: Model) -> None:
    """In one row for all or in a row for each: 2 n + 1 where pair n shares it, 2 n + 2 where sequence n has it alone."""
    examples = dpo(model)._stream.take(3)
    for tokens in (128, 24):
        seen: dict[int, list[tuple[int, int]]] = {}
        for batch in micro_batches(examples, tokens_per_device=tokens):
            numbers, there = np.asarray(token_numbers(batch)), np.asarray(batch.segments) > 0
            for number, position, id in zip(numbers[there], np.asarray(batch.positions)[there], batch.tokens[there], strict=True):
                seen.setdefault(int(number), []).append((int(position), int(id)))
        for n, example in enumerate(examples):
            shown = example.answers[0].shown
            assert [id for _, id in sorted(seen[2 * n + 1])] == example.answers[0].ids[:shown].tolist()
            for k, answer in enumerate(example.answers):
                assert [id for _, id in sorted(seen[2 * (2 * n + k) + 2])] == answer.ids[shown:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [SigmoidConfig(), KTOConfig()], ids=lambda loss: loss.name)
def test_packing_does_not_change_a_preference_gradient(model: Model, loss: Any) -> None:
    packed, alone = (gradient(moved(dpo(model, loss, tokens=tokens))) for tokens in (128, 24))
    assert packed[2] == 1 and alone[2] >= 2
    check_same(packed, alone)


@pytest.mark.slow
def test_devices_do_not_change_the_gradient(model: Model) -> None:
    training = PreferenceTrainingConfig(batch_size=4, max_tokens=16, tokens_per_device=32, optimizer=RATE)
    mesh = MeshSpec(axes={"data": 2, "fsdp": 2})
    spread = DPOTrainer(model, train_ds=pairs(12, seed=0), lora=LORA, mesh=mesh, training=training)
    check_same(gradient(moved(dpo(model))), gradient(moved(spread)))


def test_b029_both_halves_of_a_pair_are_scored_without_their_prompt(model: Model) -> None:
    trainer, rows = dpo(model), {f"train:{i}": row for i, row in enumerate(pairs(12, seed=0))}
    examples = trainer._stream.take(4)
    (micro,) = trainer._micro_batches(examples, 1)
    scored = by_sequence(micro.batch.target_ids, micro.batch)
    texts = [model.codec.tokenizer.decode(scored[i], skip_special=False) for i in range(8)]
    assert texts == [f"{rows[example.id][half]}<|im_end|>" for example in examples for half in ("chosen", "rejected")]


def test_a_row_that_one_pass_cannot_hold_is_refused_not_torn(model: Model) -> None:
    with pytest.raises(UserError, match=r"train:\d+ has 1\d tokens, and one pass takes `training.tokens_per_device`, 10"):
        moved(dpo(model, tokens=10))


@pytest.mark.slow
def test_a_policy_that_is_its_reference_has_the_loss_of_a_tie(model: Model) -> None:
    first, _, last = dpo(model).train().history
    assert first["policy/loss"] == pytest.approx(0.693147, abs=1e-6) and last["policy/loss"] < first["policy/loss"]
    assert first["preference/margin"] == 0.0 < last["preference/margin"]


@pytest.mark.slow
def test_the_reference_is_the_start_of_every_weight_or_of_an_adapter_that_goes_on(model: Model, tmp_path: Path) -> None:
    every = moved(dpo(model, lora=None))
    first = moved(dpo(model), steps=2)
    save_adapter(tmp_path, model.config, Adapter(first.policy.state.trainable, first.policy.scale))
    training = PreferenceTrainingConfig(batch_size=4, max_tokens=16, tokens_per_device=64, optimizer=RATE)
    there = LORA.model_copy(update={"path": str(tmp_path)})
    on = DPOTrainer(model, train_ds=pairs(12, seed=0), lora=there, training=training)
    (micro,) = on._micro_batches(on._stream.take(4), 1)
    start = np.asarray(on.policy.sums(micro.batch))
    np.testing.assert_array_equal(start, np.asarray(first.policy.sums(micro.batch)))
    np.testing.assert_array_equal(start, np.asarray(on.policy.reference_sums(micro.batch)))
    assert np.abs(start - np.asarray(first.policy.reference_sums(micro.batch))).max() > 1e-3
    moved(on)
    np.testing.assert_array_equal(start, np.asarray(on.policy.reference_sums(micro.batch)))
    np.testing.assert_allclose(first.policy.reference_sums(micro.batch), every.policy.reference_sums(micro.batch), rtol=1e-6)
    fresh, started = (trainer.policy.frozen_digest(has_reference=True) for trainer in (first, on))
    assert fresh != started, "a run that goes on must compare with the same adapter"
    assert fresh == first.policy.frozen_digest(has_reference=False) == on.policy.frozen_digest(has_reference=False)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["every weight", "adapter"])
def test_a_precomputed_reference_is_the_same_reference(model: Model, lora: LoraConfig | None) -> None:
    live, precomputed = (dpo(model, lora=lora, precompute_reference=ahead) for ahead in (False, True))
    check_same(gradient(moved(live)), gradient(moved(precomputed)))
    assert precomputed.policy._first == {} and live.policy._first


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_run_that_goes_on_makes_the_weights_of_one_that_never_stopped(model: Model, tmp_path: Path, stop_at: int) -> None:
    def run(folder: Path, *, stop: int | None = None, resume: bool = False) -> Any:
        # 8 rows in batches of 3: a batch lies across the end of an epoch
        training = SFTTrainingConfig(max_steps=4, batch_size=3, max_tokens=16, tokens_per_device=32, optimizer=RATE, neftune_alpha=5.0)
        trainer = PeftTrainer(model, train_ds=successors(), lora=LORA, training=training, run=RunSection(seed=3))
        if resume:
            assert trainer.resume(folder) == stop_at
        result = trainer.train(saver=Saver(folder), on_step=lambda step: trainer.stop() if step == stop else None)
        return result, jax.device_get(trainer.policy.state)

    whole, end = run(tmp_path / "whole")
    half, _ = run(tmp_path / "half", stop=stop_at)
    rest, same = run(tmp_path / "half", resume=True)
    assert half.stopped and half.steps == stop_at and rest.steps == whole.steps == 4
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row["policy/loss"] for row in rest.history] == [row["policy/loss"] for row in whole.history][stop_at:]


@pytest.mark.slow
def test_the_checkpoint_of_another_run_is_refused(model: Model, tmp_path: Path) -> None:
    sft(model).train(saver=Saver(tmp_path))
    with pytest.raises(CheckpointError, match="training.batch_size: the checkpoint has 4, this run 5"):
        other = SFTTrainingConfig(batch_size=5, max_tokens=16, optimizer=RATE)
        PeftTrainer(model, train_ds=successors(), lora=LORA, training=other).resume(tmp_path)


@pytest.mark.slow
def test_neftune_is_noise_of_the_size_that_its_length_asks_for_and_only_while_training(model: Model) -> None:
    from burnish.train.trainers.noise import neftune

    trainer = sft(model, neftune_alpha=5.0)
    (micro,) = trainer._micro_batches(trainer._stream.take(4), 1)
    noise = np.asarray(neftune(micro.key, micro.batch, 32, alpha=5.0))
    for segment in (1, 2):
        here = noise[np.asarray(micro.batch.segments) == segment]  # [length, width]
        bound = 5.0 / np.sqrt(here.size)
        assert 0.9 * bound < np.abs(here).max() <= bound
    plain = sft(model)
    assert trainer.policy.measure(micro)[0].value() != plain.policy.measure(micro)[0].value()
    (quiet,) = trainer._micro_batches(plain._stream.take(4))
    assert trainer.policy.measure(quiet)[0].value() == plain.policy.measure(quiet)[0].value()


def test_the_end_of_the_data_ends_the_run_and_its_schedule(model: Model) -> None:
    from burnish.data.example_stream import Encoder, training_examples
    from burnish.data.examples import supervised
    from burnish.data.source import from_rows

    encoder = Encoder(supervised, model.codec, 16, "drop")
    rows = from_rows(successors(), name="rows")
    stream = training_examples([rows], encoder, seed=0, batch_size=3, epochs=2)
    trainer = sft(model, rows=stream)
    assert stream.num_batches(10) == 2 and trainer.max_steps == 4  # 16 rows by 4
    with pytest.raises(UserError, match="fewer than one batch of 9"):
        training_examples([rows], encoder, seed=0, batch_size=9)
    sizes = [len(stream.take(3)) for _ in range(7)]
    assert sizes == [3, 3, 3, 3, 3, 1, 0]


def test_mistakes_show_before_weights_are_loaded(tmp_path: Path) -> None:
    def sft_of(**options: Any) -> PeftTrainer:
        return PeftTrainer(model.folder, **options)

    model = tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="train:0: the assistant wrote nothing"):
        sft_of(train_ds=[{"messages": [{"role": "user", "content": "1"}]}])
    with pytest.raises(UserError, match="need held-out rows"):
        sft_of(train_ds=successors(), training=SFTTrainingConfig(compare=True))
    with pytest.raises(UserError, match="all 8 rows are longer than `training.max_tokens`, 4"):
        sft_of(train_ds=successors(), training=SFTTrainingConfig(max_tokens=4))
    with pytest.raises(UserError, match="batch_size must be 2 or more, got 1"):
        DPOTrainer(model.folder, KTOConfig(), train_ds=labels(4, seed=0), training=PreferenceTrainingConfig(batch_size=1))
