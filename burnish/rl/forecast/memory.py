"""What each device holds, role by role, and the most it holds at any moment of a step.

Owns the sums and their table. Bytes of programs are the compiler's (`trained.py`, `engine.py`), those of weights the placement's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from burnish.rl.forecast.engine import engine_programs
from burnish.rl.forecast.programs import ProgramMemory, RolePrograms
from burnish.rl.forecast.run import PlannedRun
from burnish.rl.forecast.trained import actor_programs, critic_programs, reference_programs, reward_programs
from burnish.rl.forecast.units import aligned, size
from burnish.rl.placement import Role, RolePlacement

_PROGRAMS = {
    Role.ACTOR: actor_programs,
    Role.ROLLOUT: engine_programs,
    Role.REFERENCE: reference_programs,
    Role.CRITIC: critic_programs,
    Role.REWARD: reward_programs,
}


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of one role on each of its devices. snapshot: the anchor, a copy of what is trained."""

    placed: RolePlacement
    held: RolePrograms
    snapshot: int

    @property
    def kept(self) -> int:
        """What is there all along."""
        return self.placed.bytes_per_device + self.held.optimizer + self.snapshot + self.held.cache

    @property
    def busiest(self) -> ProgramMemory:
        return max(self.held.programs, key=lambda program: program.added)

    def at_most(self, program: ProgramMemory) -> int:
        return program.added + (self.held.gradients if program.with_gradients else 0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All roles of some devices. peak: the most that one device holds, and in whose program."""

    roles: tuple[RoleMemory, ...]
    peak: int
    during: str

    @property
    def devices(self) -> str:
        return str(self.roles[0].placed.place).partition(" (")[0]


def memory(run: PlannedRun) -> list[DeviceMemory]:
    """The memory of every set of devices, in the order of the roles."""
    present = list(run.placement.roles)
    with ThreadPoolExecutor(len(present)) as pool:  # most of the time is the compiler's, which needs no interpreter
        held = dict(zip(present, pool.map(lambda role: _PROGRAMS[role](run), present), strict=True))
    sets: dict[frozenset[int], list[RoleMemory]] = {}
    for role, placed in run.placement.roles.items():
        anchored = role is Role.ACTOR and "old" in run.algorithm.scores_needed
        found = RoleMemory(placed, held[role], held[role].gradients if anchored else 0)  # as large as the gradients: all that is trained
        sets.setdefault(frozenset(placed.place.devices), []).append(found)
    return [_together(run, roles) for roles in sets.values()]


def _together(run: PlannedRun, roles: list[RoleMemory]) -> DeviceMemory:
    """Programs on the same devices run one after another, so what they add doesn't add up; but an update's gradients stay while the engine
    samples what comes next."""
    kept = sum(role.kept for role in roles)
    summed = max((role.held.gradients for role in roles), default=0) if len(run.deliveries) > 1 else 0
    moments: list[tuple[int, str]] = []
    for role in roles:
        beside = summed if role.placed.role is Role.ROLLOUT else 0
        for program in role.held.programs:
            waiting = 0 if program.name == "sync" else beside
            moments.append((role.at_most(program) + waiting, f"{role.placed.role}: {program.name}"))
    most, during = max(moments, key=lambda moment: moment[0])
    return DeviceMemory(tuple(roles), kept + most, during)


def memory_table(found: list[DeviceMemory]) -> str:
    """A line for each role: what it keeps, and what its hungriest program adds for a while."""
    lines = [["devices", "role", "weights", "optimizer", "snapshot", "KV cache", "gradients", "working", "in", "at most"]]
    for place in found:
        for number, role in enumerate(place.roles):
            held, busiest = role.held, role.busiest
            sizes = (role.placed.bytes_per_device, held.optimizer, role.snapshot, held.cache, held.gradients, busiest.added)
            together = f"{size(place.peak)} in {place.during}" if number == 0 else ""
            lines.append([place.devices if number == 0 else "", str(role.placed.role), *map(size, sizes), busiest.name, together])
    return aligned(lines, right=range(2, 8))


def programs_table(found: list[DeviceMemory]) -> str:
    """A line for each compiled program of those who score and learn; the engine's is measured with one layer, which says less."""
    lines = [["role", "program", "arguments", "outputs", "in place", "temporaries"]]
    for place in found:
        for role in place.roles:
            for program in role.held.programs:
                if program.arguments:
                    sizes = (program.arguments, program.outputs, program.aliased, program.temporaries)
                    lines.append([str(role.placed.role), program.name, *map(size, sizes)])
    return aligned(lines, right=range(2, 6))


def over_budget(found: list[DeviceMemory], budget: int) -> list[str]:
    """What to say of devices that would hold more than `budget` bytes."""
    return [
        f"devices {place.devices} would hold {size(place.peak)} each in {place.during}, --device-memory allows {size(budget)}: "
        f"{_remedy(place)}"
        for place in found
        if place.peak > budget
    ]


def _remedy(place: DeviceMemory) -> str:
    working = max(role.busiest.added for role in place.roles)
    if working > sum(role.kept for role in place.roles):
        return "most of it is for the tokens of one pass, so make passes smaller (training.tokens_per_device, train_micro_batch_size)"
    return "most of it is kept all along, so spread the roles over more devices (cluster.*.axes), or train an adapter (model.lora)"


__all__ = ["DeviceMemory", "RoleMemory", "memory", "memory_table", "over_budget", "programs_table"]
