"""Frozen weights that the policy is compared with, on a mesh of their own: the reference of a run, and its teacher.

Owns where they lie, the way to them, how a teacher is read, and how frozen weights are told from others; the cluster holds them, and says
with which program the reference is asked.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from burnish.config.algorithms import TeacherConfig
from burnish.config.errors import UserError
from burnish.models import transformer, weights
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.lora import spec_of
from burnish.models.quant import code_of, quantised_spec
from burnish.models.transformer import Params
from burnish.observe.devices import dispatched
from burnish.observe.trace import span
from burnish.rl.batch import TokenBatch
from burnish.rl.sites import Site
from burnish.rl.vocabulary import check_reads_ids
from burnish.sync.host_memory import Shelf
from burnish.sync.reshard import on_host
from burnish.text.codec import Codec
from burnish.train.score import HeadOptions, make_score
from burnish.train.state import leaf_names


class Reference:
    """Somebody who gives the policy's ids log-probs of his own.

    params: the weights, wherever they are; they are shared where they lie at `site` already, else copied there. pairs: of the adapter
    that they are compared with, likewise; None: without one. offload: the weights wait in the host's memory; then they are copied too.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        score: Callable[..., Any],
        site: Site,
        *,
        role: str = "reference",
        pairs: Params | None = None,
        offload: bool = False,
    ) -> None:
        self._site, self._score, self._role = site, site.in_turn(score), role
        if pairs is not None:
            pairs = site.spread(pairs, spec_of(config, pairs))
        self._shelf = Shelf((site.spread(params, quantised_spec(transformer.spec(config), code_of(params))), pairs), offload=offload)

    @property
    def params(self) -> Params:
        return self._shelf.tree[0]

    def logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids, of a batch on the actor's devices, which is where they come back to."""
        with span("score", role=self._role):
            start = time.monotonic_ns()
            logps = self._site.back(self._score(*self._shelf.tree, self._site.take(batch)))
            dispatched(self._role, "score", logps, start_ns=start)
        return logps

    def digest(self) -> str:
        return self._site.in_turn(fingerprint)(self.params)


def check_teacher(config: TeacherConfig, codec: Codec, *, context: int) -> tuple[Path, ModelConfig]:
    """The folder and architecture of a teacher that can read what the policy writes (`codec`, at most `context` ids); reads no weights."""
    if not config.path:
        raise UserError("algorithm.teacher.path isn't set: give the model to learn from, a folder or a name from `burnish fetch`")
    folder = locate(config.path)
    architecture = weights.load_config(folder)
    check_reads_ids("algorithm.teacher.path", "teacher", folder, architecture, codec, context=context)
    return folder, architecture


def load_teacher(
    config: TeacherConfig, codec: Codec, *, context: int, options: HeadOptions, site: Site, offload: bool = False
) -> Reference:
    """The teacher with its weights, in float32."""
    folder, architecture = check_teacher(config, codec, context=context)
    _, params = weights.load(folder, mesh=site.mesh)
    score = make_score(architecture, lora_scale=1.0, options=options)
    return Reference(architecture, params, score, site, role="teacher", offload=offload)


def fingerprint(params: Params) -> str:
    """A digest of the last column of every leaf: another model, or a fine-tuned one, has another. Reads little, on any sharding."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(on_host(leaf[..., -1])).tobytes())
    return digest.hexdigest()
