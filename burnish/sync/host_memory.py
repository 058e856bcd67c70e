"""Arrays that wait in the host's memory while nothing on the devices needs them.

Owns the way there and back; a value's bits don't change on it. Who waits, and when, is said by those who hold the arrays: the cluster's
anchor, and the roles of `cluster.offload_to_cpu`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import jax

from burnish.observe.trace import span

T = TypeVar("T")

_WAITING, _WORKING = "pinned_host", "device"


def has_host_memory() -> bool:
    """Whether this platform's devices can address the host's memory: CPUs, GPUs and TPUs can."""
    return all(_WAITING in {memory.kind for memory in device.addressable_memories()} for device in jax.local_devices())


def to_host(tree: T) -> T:
    """A copy in the host's memory, cut as it was. The arrays on the devices go when nobody holds them any more. Scalars stay: they weigh
    nothing, and one that is moved is bound to where it is."""
    with span("memory.to_host"):
        return _moved(tree, _WAITING)


def to_devices(tree: T) -> T:
    """A copy on the devices, cut as it was."""
    with span("memory.to_devices"):
        return _moved(tree, _WORKING)


class Shelf(Generic[T]):
    """A tree that doesn't change. offload: it waits in the host's memory, and every use begins with a copy."""

    def __init__(self, tree: T, *, offload: bool) -> None:
        self._offload = offload
        self._tree = to_host(tree) if offload else tree

    @property
    def tree(self) -> T:
        """On the devices."""
        return to_devices(self._tree) if self._offload else self._tree


def _moved(tree: T, kind: str) -> T:
    return jax.tree.map(lambda x: x if x.ndim == 0 else jax.device_put(x, x.sharding.with_memory_kind(kind), may_alias=False), tree)


__all__ = ["Shelf", "has_host_memory", "to_devices", "to_host"]
