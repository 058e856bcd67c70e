"""How the engine gets the actor's weights: version by version, all leaves or none of them.

Owns the version, the push, and, where the actor lends its arrays, when they are taken back; the canary that tells whether the engine now
samples from the policy that is trained. The engine's side is `rollout.engine`; the cluster holds the one publisher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from burnish.config.errors import BurnishError
from burnish.models.transformer import Params
from burnish.observe.trace import span
from burnish.rl.batch import TokenBatch, build_batch, fit_shape
from burnish.rl.sites import Site
from burnish.rollout.engine import Engine, wait_for
from burnish.rollout.native.engine import NativeEngine
from burnish.sync.checksum import checksum
from burnish.sync.reshard import on_host, whole_here
from burnish.train.state import leaf_names
from burnish.types import Group, Prompt, Request, SamplingParams, Trajectory

log = logging.getLogger(__name__)

PUSHES = 3
"""How often a version is pushed before the run is given up."""
CANARY_TOKENS = 4
CANARY_LIMIT = 0.1
"""How far apart, in nats, two log-probs of one id may be: bf16 products stay within some .05, stale or misplaced weights don't."""


class SyncError(BurnishError):
    """The engine doesn't sample from the weights that it was given."""


class Publisher:
    """engine: who samples. actor: where the weights are. prefix: of every leaf's name, "adapter." where an adapter is trained."""

    def __init__(self, engine: Engine, *, actor: Site, prefix: str) -> None:
        self._engine, self._prefix = engine, prefix
        self._dispatch = actor.dispatch
        self._lent_to = engine if isinstance(engine, NativeEngine) and engine.lent else None
        self._begun = False
        self.version = 0

    def recall(self) -> None:
        """Before an update: take back what the engine was lent, once it has finished what runs. It samples no more until `publish`."""
        if self._lent_to is None or self._begun:
            return
        borrower, version = self._lent_to, self.version + 1

        async def take_back() -> None:
            await borrower.begin_update(version)
            await borrower.recall()

        with span("sync.recall", version=version):
            wait_for(take_back())
        self._begun = True

    def publish(self, trainable: Params, version: int) -> None:
        """Make `trainable` the engine's version `version`. A push that fails leaves the engine on its old version, as a whole, and is made
        again; the last of `PUSHES` raises. One to an engine that has given its weights back, or is lost, isn't made again."""
        names = (self._prefix + name for name in leaf_names(trainable))
        leaves = {name: whole_here(leaf) for name, leaf in zip(names, jax.tree.leaves(trainable), strict=True)}
        with self._dispatch:  # and not on the actor's mesh: of several processes, this one's part of it
            sent = None if self._lent_to is not None else checksum(leaves)

        async def push() -> None:
            if not self._begun:
                await self._engine.begin_update(version)
            for name, leaf in leaves.items():
                await self._engine.push(name, leaf)
            await self._engine.commit_update(sent)

        async def push_again() -> None:
            for left in reversed(range(PUSHES)):
                try:
                    return await push()
                except Exception as error:
                    if self._begun or not left or isinstance(error, BurnishError):
                        raise
                    log.warning("the push of version %d failed and is made again: %s: %s", version, type(error).__name__, error)
                    await self._engine.abort_update()

        with span("sync.push", version=version):
            wait_for(push_again())
        self._begun = False
        self.version = version


def check_canary(engine: Engine, score: Callable[[TokenBatch], Any], prompt: Sequence[int], *, rows_multiple: int) -> float:
    """Sample a few ids after a fixed prompt, and ask the trainer how likely each was. Returns the largest difference, in nats.

    score: log-probs of the scored ids under the trained policy, [R, M]. Raises SyncError beyond `CANARY_LIMIT`.
    """
    request = Request(tuple(prompt), SamplingParams(max_tokens=CANARY_TOKENS), seed_path=(0,))
    with span("sync.canary", version=engine.version):
        found = wait_for(engine.generate(request))
    ids = np.array([*prompt, *found.ids], np.int32)
    sampled = np.arange(len(ids)) >= len(prompt)
    logps, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
    logps[sampled], versions[sampled] = found.logps, found.versions
    episode = Trajectory([], ids, sampled, logps, versions, len(prompt), (0, 0), 0)
    groups, credit = [Group((0, 0), Prompt("canary", ()), [episode])], {((0, 0), 0): np.ones(len(found.ids), np.float32)}
    shape = fit_shape(groups, credit, rows_multiple=rows_multiple)
    batch = build_batch(groups, credit, temperature=1.0, shape=shape)
    apart = float(np.max(np.abs(on_host(score(batch)) - np.asarray(batch.sampler_logps))[np.asarray(batch.mask)]))
    if not apart <= CANARY_LIMIT:
        raise SyncError(
            f"after the sync to version {engine.version} the engine's log-probs of a fixed prompt differ from the trained policy's by "
            f"{apart:.3g} nats (limit {CANARY_LIMIT}): its weights aren't those that were pushed"
        )
    return apart


__all__ = ["CANARY_LIMIT", "CANARY_TOKENS", "Publisher", "SyncError", "check_canary"]
