"""The policy that a step's episodes were sampled from, kept while updates move the one that is trained: the proximal policy of its ratios.

Owns the snapshot, in the host's memory where the platform has that: it is needed for a scoring pass only, and of several mini-batches the
first is scored before anything has moved. The cluster takes one at each sync.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from burnish.models.transformer import Params
from burnish.sync.host_memory import has_host_memory, to_devices, to_host


class Anchor:
    """trainable: what is trained, as the engine has it now; the adapter alone where one is. It may be donated afterwards."""

    def __init__(self, trainable: Params) -> None:
        self._waits = has_host_memory()
        self._snapshot = to_host(trainable) if self._waits else jax.tree.map(lambda x: jnp.array(x, copy=True), trainable)
        self._moved = False

    def moves(self) -> None:
        """To be told before the first update after the sync: from now on the trained policy is another one."""
        self._moved = True

    def weights(self, trainable: Params) -> Params:
        """The anchor's weights on the devices; `trainable` itself while it is still the same policy."""
        if not self._moved:
            return trainable
        return to_devices(self._snapshot) if self._waits else self._snapshot
