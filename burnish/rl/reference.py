"""The reference of a run: frozen weights that the policy is compared with, on a mesh of their own.

Owns where they lie, the way to them, and how frozen weights are told from others; the cluster holds the one reference, and says with
which program it is asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from burnish.models import transformer
from burnish.models.config import ModelConfig
from burnish.models.lora import adapter_spec
from burnish.models.transformer import Params
from burnish.observe.trace import span
from burnish.rl.batch import TokenBatch
from burnish.rl.sites import Site
from burnish.sync.host_memory import Shelf
from burnish.train.state import leaf_names


class Reference:
    """params: the weights, wherever they are; they are shared where they lie at `site` already, else copied there. pairs: of the adapter
    that they are compared with, likewise; None: without one. offload: the weights wait in the host's memory; then they are copied too.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        score: Callable[..., Any],
        site: Site,
        *,
        pairs: Params | None = None,
        offload: bool = False,
    ) -> None:
        self._site, self._score = site, site.in_turn(score)
        if pairs is not None:
            rank = next(iter(pairs.values()))["a"].shape[-1]
            pairs = site.spread(pairs, adapter_spec(config, rank=rank, targets=tuple(pairs)))
        self._shelf = Shelf((site.spread(params, transformer.spec(config)), pairs), offload=offload)

    @property
    def params(self) -> Params:
        return self._shelf.tree[0]

    def logps(self, batch: TokenBatch) -> Float[Array, "R M"]:
        """Log-probs of the scored ids, of a batch on the actor's devices, which is where they come back to."""
        with span("score", role="reference"):
            return self._site.back(self._score(*self._shelf.tree, self._site.take(batch)))

    def digest(self) -> str:
        return self._site.in_turn(fingerprint)(self.params)


def fingerprint(params: Params) -> str:
    """A digest of the last column of every leaf: another model, or a fine-tuned one, has another. Reads little, on any sharding."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf[..., -1])).tobytes())
    return digest.hexdigest()
