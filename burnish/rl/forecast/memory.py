"""What each device holds, role by role, and the most it holds at any moment of a step.

Owns the sums and their table. Bytes of programs are the compiler's (`trained.py`, `engine.py`), those of weights the placement's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from burnish.rl.forecast.engine import engine_programs
from burnish.rl.forecast.programs import ProgramMemory, RolePrograms
from burnish.rl.forecast.run import PlannedRun
from burnish.rl.forecast.trained import actor_programs, critic_programs, reference_programs, reward_programs, teacher_programs
from burnish.rl.forecast.units import aligned, size
from burnish.rl.placement import Role
from burnish.sync.host_memory import has_host_memory

_PROGRAMS = {
    Role.ACTOR: actor_programs,
    Role.ROLLOUT: engine_programs,
    Role.REFERENCE: reference_programs,
    Role.CRITIC: critic_programs,
    Role.REWARD: reward_programs,
    Role.TEACHER: teacher_programs,
}


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of one role on each of its devices.

    weights, optimizer: what is there all along. host: what waits in the host's memory, cut as on the devices; brought: of that, what each
    program, by name, needs on the devices.
    """

    role: Role
    devices: str
    weights: int
    optimizer: int
    host: int
    held: RolePrograms
    brought: Mapping[str, int]

    @property
    def kept(self) -> int:
        """What is there all along."""
        return self.weights + self.optimizer + self.held.cache

    def working(self, program: ProgramMemory) -> int:
        """What a program adds, without gradients."""
        return program.added + self.brought.get(program.name, 0)

    def at_most(self, program: ProgramMemory) -> int:
        return self.working(program) + (self.held.gradients if program.with_gradients else 0)

    @property
    def busiest(self) -> ProgramMemory:
        return max(self.held.programs, key=self.working)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All roles of some devices. peak: the most that one device holds, and in whose program."""

    roles: tuple[RoleMemory, ...]
    peak: int
    during: str


def memory(run: PlannedRun) -> list[DeviceMemory]:
    """The memory of every set of devices, in the order of the roles."""
    present = list(run.placement.roles)
    with ThreadPoolExecutor(len(present)) as pool:  # most of the time is the compiler's, which needs no interpreter
        held = dict(zip(present, pool.map(lambda role: _PROGRAMS[role](run), present), strict=True))
    sets: dict[frozenset[int], list[RoleMemory]] = {}
    for role, placed in run.placement.roles.items():
        sets.setdefault(frozenset(placed.place.devices), []).append(_of_role(run, role, held[role]))
    return [_together(run, roles) for roles in sets.values()]


def _of_role(run: PlannedRun, role: Role, held: RolePrograms) -> RoleMemory:
    placed, everything = run.placement[role], [program.name for program in held.programs]
    weights, optimizer, host, brought = placed.bytes_per_device, held.optimizer, 0, {}
    offloaded = role in run.config.cluster.offload_to_cpu and placed.holding != "shared"
    if offloaded and role is Role.ACTOR:
        brought = {program.name: optimizer for program in held.programs if program.with_gradients}
        optimizer, host = 0, optimizer
    elif offloaded:
        brought = dict.fromkeys(everything, weights + optimizer)
        weights, optimizer, host = 0, 0, weights + optimizer
    if role is Role.ACTOR and "old" in run.algorithm.scores_needed:  # the anchor: as large as what is trained, and so as the gradients
        if has_host_memory():
            host += held.gradients
            brought |= {"score": held.gradients} if run.plan.num_mini_batches > 1 else {}  # the first is scored before anything moves
        else:
            weights += held.gradients
    return RoleMemory(role, placed.place.where, weights, optimizer, host, held, brought)


def _together(run: PlannedRun, roles: list[RoleMemory]) -> DeviceMemory:
    """Programs on the same devices run one after another, so what they add doesn't add up; but an update's gradients stay while the engine
    samples what comes next."""
    kept = sum(role.kept for role in roles)
    summed = max((role.held.gradients for role in roles), default=0) if run.overlaps else 0
    moments: list[tuple[int, str]] = []
    for role in roles:
        beside = summed if role.role is Role.ROLLOUT else 0
        for program in role.held.programs:
            waiting = 0 if program.name == "sync" else beside
            moments.append((role.at_most(program) + waiting, f"{role.role}: {program.name}"))
    most, during = max(moments, key=lambda moment: moment[0])
    return DeviceMemory(tuple(roles), kept + most, during)


def memory_table(found: list[DeviceMemory]) -> str:
    """A line for each role: what it keeps, what its hungriest program adds for a while, and what waits in the host's memory."""
    lines = [["devices", "role", "weights", "optimizer", "KV cache", "gradients", "working", "in", "host", "at most"]]
    for place in found:
        for number, role in enumerate(place.roles):
            sizes = (role.weights, role.optimizer, role.held.cache, role.held.gradients, role.working(role.busiest))
            together = f"{size(place.peak)} in {place.during}" if number == 0 else ""
            first = role.devices if number == 0 else ""
            lines.append([first, str(role.role), *map(size, sizes), role.busiest.name, size(role.host), together])
    return aligned(lines, right=(2, 3, 4, 5, 6, 8))


def programs_table(found: list[DeviceMemory]) -> str:
    """A line for each compiled program of those who score and learn; the engine's is measured with one layer, which says less."""
    lines = [["role", "program", "arguments", "outputs", "in place", "temporaries"]]
    for place in found:
        for role in place.roles:
            for program in role.held.programs:
                if program.arguments:
                    sizes = (program.arguments, program.outputs, program.aliased, program.temporaries)
                    lines.append([str(role.role), program.name, *map(size, sizes)])
    return aligned(lines, right=range(2, 6))


def over_budget(found: list[DeviceMemory], budget: int) -> list[str]:
    """What to say of devices that would hold more than `budget` bytes."""
    return [
        f"devices {place.roles[0].devices} would hold {size(place.peak)} each in {place.during}, --device-memory allows {size(budget)}: "
        f"{_remedy(place)}"
        for place in found
        if place.peak > budget
    ]


def _remedy(place: DeviceMemory) -> str:
    working = max(role.working(role.busiest) for role in place.roles)
    if working > sum(role.kept for role in place.roles):
        return "most of it is for the tokens of one pass, so make passes smaller (training.tokens_per_device, train_micro_batch_size)"
    return (
        "most of it is kept all along, so spread the roles over more devices (cluster.*.axes), train an adapter (model.lora), or let idle "
        "roles wait in the host's memory (cluster.offload_to_cpu)"
    )


__all__ = ["DeviceMemory", "RoleMemory", "memory", "memory_table", "over_budget", "programs_table"]
