"""A reward model as a reward function: its own tokenizer and template, one score a conversation whatever is beside it, from any thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, MeshSpec, RewardModelSection, RolloutConfig
from burnish.models import weights
from burnish.models.attention import Visibility
from burnish.models.families import UnsupportedModel
from burnish.models.scalar_head import token_scalars
from burnish.rewards.manager import RewardManager, RewardSpec
from burnish.rl.cluster import RLCluster
from burnish.rl.reward_model import RewardModel, check_reward_model
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.text.codec import Codec
from burnish.types import Completion, Group, Message, Prompt, Step, StopReason, Trajectory

CONFIG = tiny_config("qwen3", width=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward")
    write_tiny_model(made, config=CONFIG, scale=5.0, classifier=True)
    return made


def conversation(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


CONVERSATIONS = [conversation(f"{n}+{n}", "é" * (9 * n + 1)) for n in range(5)]  # 45 to 118 bytes
"""Two padded lengths."""


def section(path: Path, **options) -> RewardModelSection:
    return RewardModelSection(path=str(path), **{"micro_batch_size": 2, **options})


_plain = jax.jit(token_scalars, static_argnums=0)


def plain(folder: Path, talk: Sequence[Message], *, last: int = -1) -> float:
    """The score at the end of one row, in whatever padding."""
    config, params = weights.load_scalar(folder)
    ids = Codec.load(folder).template.encode(talk, add_generation_prompt=False)
    tokens = jnp.zeros((1, 160), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids, jnp.int32))
    columns = jnp.arange(160, dtype=jnp.int32)[None]
    rule = Visibility((columns < len(ids)).astype(jnp.int32), jnp.zeros_like(tokens))
    return float(_plain(config, params, tokens, columns, rule)[0, len(ids) + last])


def test_a_score_is_that_of_the_last_token_of_the_models_own_rendering(folder: Path) -> None:
    model = RewardModel(section(folder))
    scores = model.score(CONVERSATIONS)
    np.testing.assert_allclose(scores, [plain(folder, talk) for talk in CONVERSATIONS], rtol=1e-5, atol=1e-5)
    assert np.std(scores) > 0.1, "all scores are alike: nothing is tested"
    assert model._compute._cache_size() == 2, "one program for each padded length"


def test_a_conversation_has_one_score_whatever_is_beside_it(folder: Path) -> None:
    """Bitwise: what a run learns from can't depend on what finished first."""
    model = RewardModel(section(folder))
    together = model.score(CONVERSATIONS)
    assert model.score(CONVERSATIONS[::-1]) == together[::-1]
    assert [model.score([talk])[0] for talk in CONVERSATIONS] == together
    assert model.score([]) == []


def test_too_long_a_conversation_has_no_score_and_is_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = RewardModel(section(folder, max_tokens=79))  # the fourth has 80
    scores = model.score(CONVERSATIONS)
    assert [score is None for score in scores] == [False, False, False, True, True]
    assert "2 conversations have more than 79 tokens" in caplog.text
    counts = {name: metric.result() for name, metric in model.take_metrics().items()}
    assert counts == {"reward_model/scored": 3, "reward_model/too_long": 2}
    assert all(metric.result() == 0 for metric in model.take_metrics().values())


def test_trailing_padding_of_a_template_is_not_the_last_token(folder: Path, tmp_path: Path) -> None:
    """As in transformers: the last id that isn't config.json's pad_token_id, here the newline that ends the template."""
    config, params = weights.load_scalar(folder)
    weights.save_scalar(tmp_path, config, params, like=folder)
    newline = Codec.load(folder).tokenizer.encode("\n")[0]
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"pad_token_id": newline}))
    talk = CONVERSATIONS[1]
    (score,) = RewardModel(section(tmp_path)).score([talk])
    assert score == pytest.approx(plain(folder, talk, last=-2), rel=1e-5)
    assert score != pytest.approx(plain(folder, talk), rel=1e-2)


def test_stored_bfloat16_weights_stay_so(folder: Path, tmp_path: Path) -> None:
    config, params = weights.load_scalar(folder)
    weights.save_scalar(tmp_path, config, params, like=folder, dtype="bfloat16")
    model = RewardModel(section(tmp_path))
    assert model.params["decoder"]["embed"].dtype == jnp.bfloat16
    np.testing.assert_allclose(model.score(CONVERSATIONS), [plain(tmp_path, talk) for talk in CONVERSATIONS], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ beside reward functions


def played(draw: int, answers: Sequence[str]) -> Group:
    none = np.zeros(0, np.int32)
    completion = Completion(none, none.astype(np.float32), none, StopReason.STOP_ID)

    def episode(sample: int, text: str) -> Trajectory:
        step = Step(none, completion, text)
        return Trajectory([step], none, none.astype(bool), completion.logps, none, prompt_length=0, group=(0, draw), sample=sample)

    prompt = Prompt(f"p{draw}", (Message(role="user", content=f"{draw}?"),))
    return Group((0, draw), prompt, [episode(sample, text) for sample, text in enumerate(answers)])


def lengths(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def test_many_groups_at_once_get_the_weighted_sum(folder: Path) -> None:
    """The manager calls from a thread for each group."""
    model = RewardModel(section(folder, max_tokens=100))
    manager = RewardManager([RewardSpec("reward_model", model.score, weight=0.5, timeout_s=None), RewardSpec.of(lengths)])
    groups = [played(draw, [str(draw), "yes" * (draw + 1), "no" * 60]) for draw in range(6)]
    for group in groups:
        manager.check(group.prompt)

    async def score() -> None:
        await asyncio.gather(*(manager.score(group) for group in groups))

    asyncio.run(score())
    for group in groups:
        for t in group.trajectories[:2]:
            (expected,) = model.score([conversation(group.prompt.messages[0]["content"], t.final_text)])
            assert t.rewards == {"reward_model": expected, "lengths": len(t.final_text)}
            assert expected is not None and t.reward == pytest.approx(0.5 * expected + len(t.final_text))
        assert group.trajectories[2].rewards == {"reward_model": None, "lengths": 120.0}
        assert group.trajectories[2].reward == 120.0


@pytest.mark.slow
def test_scores_on_a_mesh_are_those_of_one_device(folder: Path, tmp_path: Path) -> None:
    """Through the cluster, from several threads, micro-batches rounded up to the devices."""
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789")
    cluster = RLCluster(
        tmp_path,
        reward_model=section(folder, micro_batch_size=3),
        cluster=ClusterConfig(actor=MeshSpec(axes={"data": 2, "fsdp": 2})),
        rollout=RolloutConfig(max_prompt_tokens=8, slots=4, sampling={"max_tokens": 8}),
        precision="f32",
    )

    async def score() -> list[list[float | None]]:
        return await asyncio.gather(*(asyncio.to_thread(cluster.get_rewards, CONVERSATIONS) for _ in range(3)))

    for scores in asyncio.run(score()):
        np.testing.assert_allclose(scores, [plain(folder, talk) for talk in CONVERSATIONS], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------- mistakes


def test_what_is_no_reward_model_is_refused_without_reading_weights(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "decoder", config=CONFIG)
    with pytest.raises(UnsupportedModel, match="'Qwen3ForCausalLM' is a language model, which gives no score"):
        check_reward_model(section(tmp_path / "decoder"))
    write_tiny_model(tmp_path / "two", config=CONFIG, classifier=True)
    tensors = load_file(tmp_path / "two" / "model.safetensors") | {"score.weight": np.zeros((2, 16), np.float32)}
    save_file(tensors, tmp_path / "two" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="tells 2 labels apart"):
        check_reward_model(section(tmp_path / "two"))
    with pytest.raises(UserError, match=r"max_tokens is 1000, but .* 512 positions"):
        check_reward_model(section(folder, max_tokens=1000))


def test_without_a_reward_model_a_cluster_says_how_to_give_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789")
    rollout = RolloutConfig(max_prompt_tokens=8, slots=4, sampling={"max_tokens": 8})
    with pytest.raises(RuntimeError, match=r"reward_model=RewardModelSection\(path="):
        RLCluster(tmp_path, rollout=rollout).get_rewards(CONVERSATIONS)
