"""Locks that how many prompts a scoring pass takes is a matter of memory: each token's log-probs are the same, and so is the update."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from burnish.config.algorithms import GRPOConfig
from burnish.config.schema import ClusterConfig, LoraConfig, MeshSpec, RolloutConfig, TrainingConfig
from burnish.models.model import Model
from burnish.rl.algorithms import from_config
from burnish.rl.batch import TokenBatch, build_batch
from burnish.rl.cluster import RLCluster
from burnish.rl.producer import Chunk
from burnish.rl.scoring import Scored, score
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.types import Group, Prompt
from tests.rl.batches import episode

pytestmark = pytest.mark.slow  # a program for each size of a pass

PROMPTS = 6
ALGORITHM = from_config(GRPOConfig(num_generations=2, beta=0.1, old="recomputed"))


class CountingCluster(RLCluster):
    """Notes the rows of every pass that scores."""

    passes: list[int]

    def get_actor_per_token_logps(self, batch: TokenBatch) -> jax.Array:
        self.passes.append(batch.mask.shape[0])
        return super().get_actor_per_token_logps(batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("digits")
    write_tiny_model(folder, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    return Model.load(folder)


@pytest.fixture(scope="module")
def cluster(model: Model) -> Iterator[CountingCluster]:
    made = make_cluster(model, devices=1)
    yield made
    made.close()


def chunks(*, kept: bool) -> list[Chunk]:
    """Six prompts of two episodes each in micro-batches of two prompts, longer from one to the next; one prompt has no credit."""
    rng = np.random.default_rng(0)
    groups, advantages = [], {}
    for draw in range(PROMPTS):
        ids = [rng.integers(3, 13, size=length).tolist() for length in (2 + 7 * draw, 1 + 6 * draw, 3)]
        members = [episode(ids[0], ids[1 + sample], draw=draw, sample=sample, kept=4 if kept else 0) for sample in range(2)]
        groups.append(Group((0, draw), Prompt(str(draw), ()), members))
        advantages |= {} if draw == 3 else {(t.group, t.sample): float(t.sample) for t in members}
    parts = [groups[i : i + 2] for i in range(0, PROMPTS, 2)]
    batches = [build_batch(part, advantages, temperature=0.7) for part in parts]
    return [Chunk((0, 0, i), 0, 3, batches[i], part, {}, part, {}, 0.0) for i, part in enumerate(parts)]


def make_cluster(model: Model, *, devices: int) -> CountingCluster:
    cluster = CountingCluster(
        model,
        precision="f32",
        lora=LoraConfig(rank=2),
        cluster=ClusterConfig(actor=MeshSpec(axes={"data": devices})),
        rollout=RolloutConfig(max_prompt_tokens=64, slots=1, prefill_rows=1),
    )
    cluster.prepare(ALGORITHM, total_updates=1)
    return cluster


def scored(cluster: CountingCluster, size: int | None, *, kept: bool = False) -> tuple[list[Scored], list[int]]:
    """The scores of the mini-batch, and the rows of each pass."""
    cluster.passes = []
    cluster.training_config = TrainingConfig(batch_size=PROMPTS, train_micro_batch_size=2, compute_logps_micro_batch_size=size)
    return score(cluster, ALGORITHM, chunks(kept=kept)), cluster.passes


@pytest.mark.parametrize("kept", [False, True], ids=["whole vocabulary", "kept support"])
def test_the_size_of_a_scoring_pass_changes_no_log_prob(cluster: CountingCluster, kept: bool) -> None:
    usual, passes = scored(cluster, None, kept=kept)
    assert passes == [2, 2, 2]
    assert min(float(np.abs(part.actor.old_logps).max()) for part in usual if part.actor.old_logps is not None) > 1
    for size, expected in ((1, [1] * 5), (2, [2, 2, 2]), (3, [3, 3]), (6, [6])):
        found, passes = scored(cluster, size, kept=kept)
        assert passes == expected, "the prompt without credit needs no pass"
        for mine, other in zip(found, usual, strict=True):
            assert mine.actor.old_logps is not None and mine.actor.ref_logps is not None
            assert mine.actor.old_logps.shape == mine.actor.batch.mask.shape
            np.testing.assert_allclose(mine.actor.old_logps, other.actor.old_logps, atol=1e-6)
            np.testing.assert_allclose(mine.actor.ref_logps, other.actor.ref_logps, atol=1e-6)


def test_passes_are_spread_over_devices_too(model: Model, cluster: CountingCluster) -> None:
    usual, _ = scored(cluster, None)
    spread = make_cluster(model, devices=2)
    found, passes = scored(spread, 3)
    spread.close()
    assert passes == [4, 4], "3 prompts on 2 devices take 4 rows"
    for mine, other in zip(found, usual, strict=True):
        rows = np.asarray(other.actor.batch.mask).shape[0]
        np.testing.assert_allclose(np.asarray(mine.actor.old_logps)[:rows], other.actor.old_logps, atol=1e-6)
