"""Where the programs of a role run: its mesh, the order in which programs reach it, and the way to it and back from the actor's.

Owns jax meshes made of places (`rl.placement`), and the locks. A program that starts on several devices must reach all of them in the same
order as every other that they share, else collectives may wait for ever: roles on the same devices, whose programs several threads start,
take turns by one lock; roles without a device in common don't wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from burnish.models.sharding import batch_sharding, shardings
from burnish.models.transformer import Params
from burnish.rl.placement import ELSEWHERE, Place, Placement, Role
from burnish.sync.reshard import placed, reshard

Lock = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Site:
    """A role's mesh; None is the first device, where a mesh would only cost dispatch time. actor_mesh: where batches come from."""

    place: Place
    mesh: Mesh | None
    actor_mesh: Mesh | None
    dispatch: Lock

    def in_turn(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program, started while no other thread starts one on these devices, and knowing the mesh that they are (`models.rows`)."""

        @functools.wraps(program)
        def start(*args: Any) -> Any:
            with self.dispatch, on(self.mesh):
                return program(*args)

        return start

    def take(self, batch: Any) -> Any:
        """A tree of arrays with one row an entry, from the actor's devices to these: spread over them, if they divide the rows, else
        whole on each."""
        return batch if self.mesh == self.actor_mesh else jax.tree.map(partial(_moved, self.mesh), batch)

    def back(self, answers: Any) -> Any:
        """The way back."""
        return answers if self.mesh == self.actor_mesh else jax.tree.map(partial(_moved, self.actor_mesh), answers)

    def spread(self, params: Params, specs: Any) -> Params:
        """Weights that lie anywhere, cut as the rule of `models.sharding` has it; the arrays themselves where they are. specs: their
        declarations, a tree like theirs."""
        if self.mesh is None:
            alone = _first_device()
            return jax.tree.map(lambda x: x if x.devices() == alone.device_set else reshard(x, alone), params)
        return jax.tree.map(placed, params, shardings(specs, self.mesh))


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """What programs are traced and started under that are to know the mesh they run on."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def sites(placement: Placement) -> dict[Role, Site]:
    """The sites of all placed roles, of this process's devices."""
    meshes = {role: make_mesh(found.place) for role, found in placement.roles.items()}
    locks: dict[frozenset[int], Lock] = {}
    for found in placement.roles.values():
        devices = frozenset(found.place.devices)
        locks.setdefault(devices, threading.Lock() if len(devices) > 1 else contextlib.nullcontext())
    return {
        role: Site(found.place, meshes[role], meshes[Role.ACTOR], locks[frozenset(found.place.devices)])
        for role, found in placement.roles.items()
    }


def make_mesh(place: Place, local: Callable[[int], Sequence[Any]] = jax.local_devices) -> Mesh | None:
    """The mesh of a place; None for the first device alone, and for none. local: the devices of a process."""
    if place == ELSEWHERE or (place.devices == (0,) and place.processes == 1):
        return None
    axes = place.axes or (("data", 1),)
    owners = [jax.process_index()] if place.processes == 1 else range(place.processes)
    devices = np.array([local(owner)[index] for owner in owners for index in place.devices]).reshape([size for _, size in axes])
    return Mesh(devices, tuple(name for name, _ in axes), axis_types=(AxisType.Auto,) * len(axes))


def place_of(mesh: Mesh | None) -> Place:
    """The place of a mesh that is there already; None is that of an engine in another process, whichever devices the actor has."""
    if mesh is None:
        return ELSEWHERE
    local = jax.local_devices()
    axes = tuple((str(name), size) for name, size in mesh.shape.items() if size > 1)
    return Place(tuple(local.index(device) for device in mesh.devices.flat), axes)


def _moved(mesh: Mesh | None, rows: jax.Array | np.ndarray) -> jax.Array:
    if mesh is None:
        return reshard(rows, _first_device())
    spread = batch_sharding(mesh)
    divides = rows.shape[0] % math.prod(mesh.shape.get(axis, 1) for axis in ("data", "fsdp")) == 0
    return reshard(rows, spread if divides else NamedSharding(mesh, PartitionSpec()))


def _first_device() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


__all__ = ["Site", "make_mesh", "on", "place_of", "sites"]
