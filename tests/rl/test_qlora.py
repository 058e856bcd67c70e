"""Locks: over a base of 4 bits, reinforcement learning trains the adapter alone, and the engine samples from that base, not the stored."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from burnish.config.schema import LoraConfig
from burnish.models.model import Model
from burnish.models.quant import code_of
from burnish.sync.reshard import on_host
from burnish.testing.tiny import tiny_config, write_tiny_model
from tests.rl.runs import RecordingCluster, assert_same, differs, host, make_learner

pytestmark = pytest.mark.slow  # compiles programs of its own


def test_an_update_over_a_base_of_4_bits_trains_the_adapter_and_the_engine_says_the_same(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=tiny_config(width=16), alphabet="0123456789", scale=5.0)
    model = Model.load(tmp_path)
    learner = make_learner(model, lora=LoraConfig(rank=2, alpha=4, targets=("q", "down"), quantize="nf4"))
    cluster = learner.cluster
    assert isinstance(cluster, RecordingCluster) and cluster._base is not None and code_of(cluster._base) == "nf4"
    base, first = host(cluster._base), host(cluster._first)
    result = learner.train()
    assert result.steps == 2 and int(cluster.state.updates) == 2
    assert_same(host(cluster._base), base)
    assert jax.tree.structure(cluster.state.trainable) == jax.tree.structure(first) and set(cluster.state.trainable) == {"q", "down"}
    assert differs(cluster.state.trainable, first)
    assert max(cluster.worst_mismatch) < 1e-4, "also after the adapter was pushed"
    batch = cluster.batches[-1]
    apart = np.abs(on_host(cluster._score(model.params, cluster.state.trainable, batch)) - on_host(batch.sampler_logps))
    assert apart[on_host(batch.mask)].max() > 1e-2, "the stored base is another policy"
