"""What a sync of weights moves, before there is a leaf: `sync.plan` of all that the actor publishes, summed over links; or, to an engine
in other processes, what each of its servers takes.

Owns the sum and its words. The engine cuts leaves by the rule that cuts the trainer's (`models.sharding`), and each goes there by its plan
(`sync.reshard`), so what is planned here is what crosses. Of several processes each lacks as much, but one program over all of them brings
it, by ways of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from burnish.config.engines import BurnishConfig, FolderServersConfig, ServersConfig, read_options
from burnish.models import transformer
from burnish.models.lora import spec_from
from burnish.models.sharding import shardings
from burnish.rl.forecast.run import PlannedRun, declared, devices_of
from burnish.rl.forecast.units import aligned, seconds, size
from burnish.rl.placement import Role
from burnish.rl.sites import make_mesh
from burnish.sync.plan import plan

_MASTER_BYTES = 4
"""Of a trained number: masters are float32, and go as they are."""


@dataclass(frozen=True, slots=True)
class SyncForecast:
    """links: bytes from one device to another, by index; those that carry nothing aren't there. published: what the actor gives away.
    servers: bytes that each server of an engine in other processes takes, by its name, and the `way` that they go."""

    links: Mapping[tuple[int, int], int]
    published: int
    servers: Mapping[str, int] = field(default_factory=dict)
    way: str = ""

    @property
    def total(self) -> int:
        return sum(self.links.values()) + sum(self.servers.values())

    @property
    def busiest_link(self) -> int:
        return max(self.links.values(), default=0)

    @property
    def busiest_device(self) -> int:
        """The most bytes that one device sends, or takes in."""
        ends: Counter[tuple[str, int]] = Counter()
        for (source, target), crossing in self.links.items():
            ends["out of", source] += crossing
            ends["into", target] += crossing
        return max(ends.values(), default=0)

    def text(self, *, rate: float) -> str:
        """rate: bytes a second through one link."""
        if self.servers:
            every = ("all servers", size(self.total), f"{len(self.servers)} of them, for {size(self.published)} of changed weights")
            return aligned([every, *((name, size(taken), self.way) for name, taken in self.servers.items())], right=(1,))
        if not self.links:
            return f"Nothing crosses: every device of the engine has what it needs of the {size(self.published)} that change."
        lines = [
            ("all links", size(self.total), f"{len(self.links)} of them, for {size(self.published)} of changed weights"),
            ("busiest link", size(self.busiest_link), f"{seconds(self.busiest_link / rate)}, if links don't wait for each other"),
            ("busiest device", size(self.busiest_device), f"{seconds(self.busiest_device / rate)}, if all it moves goes through one link"),
        ]
        return aligned(lines, right=(1,)) + f"\nAt {rate / 1e9:g} GB/s a link (--link-speed). Nothing else runs meanwhile."


def sync_forecast(run: PlannedRun) -> SyncForecast:
    """The plan of one sync."""
    config, lora = run.models[Role.ACTOR], run.config.model.lora
    specs = transformer.spec(config) if lora is None else spec_from(config, lora)
    leaves = declared(specs)
    published = _MASTER_BYTES * sum(math.prod(leaf.shape) for leaf in leaves)
    if run.config.rollout.engine != "native":
        return SyncForecast({}, published, *_elsewhere(run, published))
    index = {device: number for number, device in enumerate(jax.local_devices())}
    links: Counter[tuple[int, int]] = Counter()
    source = _places(specs, run.meshes[Role.ACTOR], devices_of(0, run.local_devices))
    for process in range(run.placement[Role.ACTOR].place.processes):  # each has an engine
        own = devices_of(process, run.local_devices)
        target = _places(specs, make_mesh(run.placement[Role.ROLLOUT].place, lambda _, own=own: own), own)
        for leaf, start, end in zip(leaves, source, target, strict=True):
            for (a, b), crossing in plan(leaf.shape, _MASTER_BYTES, start, end).bytes_by_link().items():
                links[index[a], index[b]] += crossing
    return SyncForecast(links, published)


def _elsewhere(run: PlannedRun, published: int) -> tuple[Mapping[str, int], str]:
    """What every server takes, and how: once each, from this host's memory or from a folder that is written once."""
    engine, options = run.config.rollout.engine, read_options(run.config.rollout.engine, run.config.rollout.options)
    taken, way = published, "handed over in this process"
    if isinstance(options, BurnishConfig):
        way = f"by {options.transport}, from this host's memory, in float32"
    elif isinstance(options, FolderServersConfig) and run.config.model.lora is not None and options.weights == "adapter":
        way = "read from a folder, the adapter in float32"
    elif isinstance(options, FolderServersConfig):
        width, name = (2, "bfloat16") if run.precision == "bf16" else (4, "float32")
        taken = width * sum(math.prod(leaf.shape) for leaf in declared(transformer.spec(run.models[Role.ACTOR])))
        way = f"read from a folder, the whole model in {name}"
    launched = options.launch if isinstance(options, ServersConfig) else 0
    names = options.urls if isinstance(options, ServersConfig) and options.urls else [f"{engine} {i}" for i in range(launched)] or [engine]
    return dict.fromkeys(names, taken), way


def _places(specs: Any, mesh: Mesh | None, local: Sequence[Any]) -> list[Sharding]:
    alone = SingleDeviceSharding(local[0])
    return [alone] * len(declared(specs)) if mesh is None else jax.tree.leaves(shardings(specs, mesh))
