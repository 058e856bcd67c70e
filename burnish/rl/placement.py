"""Which role lives on which devices, what it shares with the actor or copies, why, and the bytes of its weights.

Owns one pure function of a configuration and of models' shapes: nothing is loaded and no device is asked, so it can be told before a run
what the run will do. The cluster follows it (`rl.cluster`), making jax meshes of its places. What each rule is for: docs/placement.md.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from burnish.config.errors import UserError
from burnish.config.schema import ClusterConfig, LoraConfig, MeshSpec
from burnish.models import scalar_head, transformer
from burnish.models.config import ModelConfig, Precision
from burnish.models.lora import spec_from
from burnish.models.quant import quantised_spec
from burnish.models.sharding import RULES
from burnish.models.transformer import Params, ParamSpec


class Role(enum.StrEnum):
    """Who a model is in a run."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD = "reward"
    TEACHER = "teacher"


@dataclass(frozen=True, slots=True)
class Place:
    """Devices, as indices among the process's own, and the axes they are arranged in, outermost first; axes of size 1 are left out.

    processes: how many processes' devices of these indices make one mesh, process after process; the axes are those of the whole.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()
    processes: int = 1

    def size(self, axis: str | None) -> int:
        """Into how many pieces a mesh axis cuts; 1 for one that isn't there."""
        return dict(self.axes).get(axis or "", 1)

    @property
    def rows(self) -> int:
        """Over how many groups of devices the rows of a batch are spread."""
        return self.size("data") * self.size("fsdp")

    @property
    def where(self) -> str:
        """Its devices alone."""
        if not self.devices:
            return "elsewhere"
        ranges = _ranges(self.devices)
        return ranges if self.processes == 1 else f"{ranges} of {self.processes} processes"

    def __str__(self) -> str:
        axes = ", ".join(f"{name} {size}" for name, size in self.axes)
        return f"{self.where} ({axes})" if axes else self.where


ELSEWHERE = Place(())
"""Of an engine that is on none of this process's devices, as one in another process."""
Holding = Literal["own", "shared", "copy", "resharded", "elsewhere"]
"""Weights of its own; the actor's very arrays; a copy cut as the actor's; a copy on the same devices cut in another way; a copy on other
devices."""


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """One role. bytes_per_device: of its weights alone, beside what it shares; without gradients, optimizer, cache and activations."""

    role: Role
    place: Place
    holding: Holding
    why: str
    bytes_per_device: int

    @property
    def total_bytes(self) -> int:
        return self.bytes_per_device * len(self.place.devices) * self.place.processes


@dataclass(frozen=True, slots=True)
class Placement:
    """All roles of a run."""

    roles: Mapping[Role, RolePlacement]

    def __getitem__(self, role: Role) -> RolePlacement:
        return self.roles[role]

    def __contains__(self, role: Role) -> bool:
        return role in self.roles

    def table(self) -> str:
        """A line for each role: its devices, what it holds, bytes a device, and why."""
        lines = [("role", "devices", "holds", "bytes/device", "why")]
        lines += [(str(p.role), str(p.place), p.holding, f"{p.bytes_per_device:,}", p.why) for p in self.roles.values()]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join(" ".join([*(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)), line[4]]) for line in lines)


def placement(
    config: ClusterConfig,
    *,
    num_devices: int,
    num_processes: int = 1,
    model: ModelConfig,
    lora: LoraConfig | None = None,
    precision: Precision = "f32",
    lent: bool = False,
    brought: Place | None = None,
    needs_reference: bool = False,
    critic: ModelConfig | None = None,
    reward: ModelConfig | None = None,
    reward_weight_bytes: int = 4,
    teacher: ModelConfig | None = None,
) -> Placement:
    """Where everything goes.

    num_devices: this process's, and every other's of the `num_processes` of the run. model: the actor's architecture; critic, reward,
    teacher: the others', None where there is none. lent: the engine samples from the actor's own arrays (`rollout.weights`). brought:
    where an engine is that is there already; then `config` places none. reward_weight_bytes: of one weight of the reward model, which
    stays as it is stored.
    Raises UserError for more devices than there are, for roles that overlap in part, for a mesh of a role that isn't there, and for
    weights that can't be lent.
    """
    present = {
        Role.REFERENCE: needs_reference,
        Role.CRITIC: critic is not None,
        Role.REWARD: reward is not None,
        Role.TEACHER: teacher is not None,
    }
    for role, reason in _ABSENT.items():
        if not present[role] and _spec(config, role) is not None:
            raise UserError(f"cluster.{role} gives devices to a role that this run doesn't have: {reason}, or leave cluster.{role} out")
    places = _places(config, num_devices, num_processes, model, [role for role in Role if present.get(role, True)])
    if brought is not None:
        places[Role.ROLLOUT] = brought
        _refuse_partial_overlap(places)
    actor = places[Role.ACTOR]
    found = {
        Role.ACTOR: RolePlacement(Role.ACTOR, actor, "own", _actor_reason(lora), _actor_bytes(model, lora, actor)),
        Role.ROLLOUT: _rollout(config, model, lora, precision, actor, places[Role.ROLLOUT]),
    }
    if brought is not None:
        which = "an engine that brought its own mesh" if brought.devices else "an engine on none of these devices"
        found[Role.ROLLOUT] = dataclasses.replace(found[Role.ROLLOUT], why=f"{which}: it is pushed every version")
    if lent:
        found[Role.ROLLOUT] = _borrower(found[Role.ROLLOUT], actor, lora, precision)
    if needs_reference:
        found[Role.REFERENCE] = _reference(model, lora, actor, places[Role.REFERENCE])
    for role, architecture, width in ((Role.CRITIC, critic, 4), (Role.REWARD, reward, reward_weight_bytes)):
        if architecture is not None:
            size = _bytes(scalar_head.spec(architecture), places[role], width)
            found[role] = RolePlacement(role, places[role], "own", _OWN[role], size)
    if teacher is not None:
        size = _bytes(transformer.spec(teacher), places[Role.TEACHER], 4)
        found[Role.TEACHER] = RolePlacement(Role.TEACHER, places[Role.TEACHER], "own", _OWN[Role.TEACHER], size)
    return Placement(found)


_ABSENT = {
    Role.REFERENCE: "its algorithm compares with none: set algorithm.beta",
    Role.CRITIC: "only PPO has a critic: set algorithm.name to ppo",
    Role.REWARD: "there is no reward_model: give it a path",
    Role.TEACHER: "only on_policy_distillation has a teacher: set algorithm.name to that",
}
_OWN = {
    Role.CRITIC: "every weight is trained, float32 masters",
    Role.REWARD: "another model; its weights stay as they are stored",
    Role.TEACHER: "another model, frozen, float32",
}


# ------------------------------------------------------------------------------------------------------------------------- devices


def _spec(config: ClusterConfig, role: Role) -> MeshSpec | None:
    match role:
        case Role.ACTOR:
            return config.actor
        case Role.ROLLOUT:
            return config.rollout
        case Role.REFERENCE:
            return config.reference
        case Role.CRITIC:
            return config.critic
        case Role.REWARD:
            return config.reward
        case Role.TEACHER:
            return config.teacher


def actor_place(config: ClusterConfig, *, num_devices: int, num_processes: int = 1) -> Place:
    """Where the actor goes: known before its architecture is."""
    devices = _devices(config, num_devices, num_processes)[Role.ACTOR]
    return Place(devices, _axes(Role.ACTOR, config.actor, len(devices) * num_processes, None), num_processes)


def _devices(config: ClusterConfig, num_devices: int, num_processes: int) -> dict[Role, tuple[int, ...]]:
    """Of the roles that ask for devices: named ones first, then counts in the order of the roles from what is free."""
    specs = {role: spec for role in Role if (spec := _spec(config, role)) is not None}
    counts = {role: _count(role, spec, num_processes) for role, spec in specs.items()}
    devices: dict[Role, tuple[int, ...]] = {}
    for role, spec in specs.items():
        if (indices := spec.indices) is not None:
            if max(indices) >= num_devices:
                raise UserError(f"cluster.{role}.devices {spec.devices} goes to device {max(indices)}, {_found(num_devices)}")
            devices[role] = indices
    for role, spec in specs.items():
        if role not in devices and (count := counts[role]) is not None:
            devices[role] = _free(role, spec, count, devices, num_devices)
    return devices


_SPANNING = frozenset({Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.TEACHER})
"""Roles whose mesh is of all processes; the others are each process's own."""


def _count(role: Role, spec: MeshSpec, num_processes: int) -> int | None:
    """How many devices of each process a role asks for."""
    if spec.axes is None or spec.count is None or role not in _SPANNING or num_processes == 1:
        return spec.count
    if spec.devices is not None:
        raise UserError(
            f"cluster.{role} gives axes {spec.axes} and devices {spec.devices} to {num_processes} processes: axes are those of a mesh over "
            "all of them, devices those of each, so give one of the two"
        )
    if spec.count % num_processes:
        raise UserError(
            f"cluster.{role}.axes {spec.axes} are {spec.count} devices, which {num_processes} processes can't give in equal parts: use a "
            f"multiple of {num_processes}"
        )
    return spec.count // num_processes


def _places(config: ClusterConfig, num_devices: int, num_processes: int, model: ModelConfig, roles: Sequence[Role]) -> dict[Role, Place]:
    """Who asks for devices gets them; then who follows another role."""
    devices = _devices(config, num_devices, num_processes)

    def place(role: Role) -> Place:
        spec = _spec(config, role)
        shared = num_processes > 1 and role in _SPANNING
        if shared and role is not Role.ACTOR:
            return _with_actor(role, spec, place(Role.ACTOR))
        if spec is None and role is Role.ROLLOUT and place(Role.ACTOR).size("fsdp") > 1:
            spec = MeshSpec(same_devices_as="actor")
        if num_processes > 1 and not shared and (spec is None or spec.same_as == "actor"):
            spec = MeshSpec(same_devices_as="actor")
        if spec is None:
            return place(Role.ACTOR)
        if spec.same_as is not None:
            return place(Role(spec.same_as))
        where = devices[role] if spec.same_devices_as is None else place(Role(spec.same_devices_as)).devices
        if shared:
            return Place(where, _axes(role, spec, len(where) * num_processes, model), num_processes)
        return Place(where, _axes(role, spec, len(where), model))

    found = {role: place(role) for role in roles}
    _refuse_partial_overlap(found)
    return found


def _with_actor(role: Role, spec: MeshSpec | None, actor: Place) -> Place:
    """Rows that every process has a part of stay where they are."""
    if spec is not None and spec != MeshSpec(same_as="actor"):
        raise UserError(
            f"cluster.{role} has devices of its own, but in a run of {actor.processes} processes it is on the actor's: leave it out"
        )
    return actor


def _found(num_devices: int) -> str:
    return f"this process has {num_devices} device{'s' * (num_devices != 1)} (0 to {num_devices - 1})"


def _free(role: Role, spec: MeshSpec, count: int, taken: Mapping[Role, tuple[int, ...]], num_devices: int) -> tuple[int, ...]:
    asked = f"cluster.{role}.axes {spec.axes}" if spec.devices is None else f"cluster.{role}.devices {spec.devices}"
    if count > num_devices:
        raise UserError(f"{asked} needs {count} devices, {_found(num_devices)}: ask for fewer")
    free = [index for index in range(num_devices) if all(index not in others for others in taken.values())]
    if count > len(free):
        held = ", ".join(f"{other} {_ranges(indices)}" for other, indices in taken.items())
        raise UserError(
            f"{asked} needs {count} devices of its own, {_found(num_devices)} and {len(free)} are free (taken: {held}): ask for fewer, "
            "or use another role's with same_devices_as"
        )
    return tuple(free[:count])


def _axes(role: Role, spec: MeshSpec, count: int, model: ModelConfig | None) -> tuple[tuple[str, int], ...]:
    if spec.axes is not None:
        if (needed := math.prod(spec.axes.values())) != count:
            raise UserError(f"cluster.{role}.axes {spec.axes} are {needed} devices, {spec.same_devices_as} has {count}: make them agree")
        axes = [(str(name), size) for name, size in spec.axes.items()]
    elif role is Role.ROLLOUT and model is not None:
        # Pieces of every product rather than whole copies: each device reads fewer weights for a token.
        inner = model.moe.num_experts if model.moe else model.mlp_width
        tp = math.gcd(count, model.num_heads, model.num_kv_heads, model.vocab_size, inner)
        axes = [("data", count // tp), ("tp", tp)]
    else:
        axes = [("data", count)]
    return tuple((name, size) for name, size in axes if size > 1)


def _refuse_partial_overlap(places: Mapping[Role, Place]) -> None:
    """Roles on some of another's devices would wait for each other without a gain, and no order of programs would be safe."""
    found = list(places.items())
    for index, (role, place) in enumerate(found):
        for other, its in found[:index]:
            common = {*place.devices} & {*its.devices}
            if common and {*place.devices} != {*its.devices}:
                raise UserError(
                    f"cluster.{role} is on devices {_ranges(place.devices)} and cluster.{other} on {_ranges(its.devices)}: they share "
                    f"{_ranges(sorted(common))} but not all. Give them the same devices (same_as, same_devices_as), or none in common"
                )


def _ranges(devices: Iterable[int]) -> str:
    """0-3 or 0,2,5: runs of three or more as ranges."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


# ------------------------------------------------------------------------------------------------------- what is held, and its bytes


def _actor_reason(lora: LoraConfig | None) -> str:
    if lora is None:
        return "every weight is trained, float32 masters"
    base = "the frozen base and" if lora.quantize is None else f"the frozen base, its matrices in {lora.quantize}, and"
    return f"{base} an adapter of rank {lora.rank}, float32"


def _actor_bytes(model: ModelConfig, lora: LoraConfig | None, place: Place) -> int:
    return _base_bytes(model, lora, place) + (0 if lora is None else _bytes(spec_from(model, lora), place, 4))


def _base_bytes(model: ModelConfig, lora: LoraConfig | None, place: Place) -> int:
    """Of the model's weights, frozen ones in the bits that `lora` says."""
    return _bytes(quantised_spec(transformer.spec(model), None if lora is None else lora.quantize), place, 4)


def _held(actor: Place, place: Place) -> Holding:
    if place == actor:
        return "copy"
    return "resharded" if {*place.devices} == {*actor.devices} else "elsewhere"


def _reference(model: ModelConfig, lora: LoraConfig | None, actor: Place, place: Place) -> RolePlacement:
    if lora is not None and place == actor:
        return RolePlacement(Role.REFERENCE, place, "shared", f"{_base(lora)}: no memory", 0)
    which = "the first weights" if lora is None else _base(lora)
    why = {
        "copy": f"{which}, kept beside the trained ones on the actor's mesh",
        "resharded": f"{which}, on the actor's devices with axes of its own",
        "elsewhere": f"{which}, on devices of its own: its log-probs travel, not its weights",
    }
    holding = _held(actor, place)
    return RolePlacement(Role.REFERENCE, place, holding, why[holding], _base_bytes(model, lora, place))


def _base(lora: LoraConfig) -> str:
    return "the base without its adapter" if lora.path is None else "the base with the adapter that it started from"


def _rollout(
    config: ClusterConfig, model: ModelConfig, lora: LoraConfig | None, precision: Precision, actor: Place, place: Place
) -> RolePlacement:
    holding = _held(actor, place)
    layout = f"layers apart, {precision} matrices" + ("" if lora is None else ", the adapter merged")
    why = {
        "copy": f"the engine's layout isn't the actor's ({layout}), so equal meshes copy",
        "resharded": f"the actor's devices with axes of its own ({layout})",
        "elsewhere": f"devices of its own ({layout}): sampling and updates don't wait for each other's devices",
    }[holding]
    if actor.processes > 1:
        why += "; each process has an engine of its own"
    elif config.rollout is None and holding == "resharded":
        why += f"; by default, since fsdp {actor.size('fsdp')} would gather every weight for every token"
    return RolePlacement(Role.ROLLOUT, place, holding, why, _engine_bytes(model, lora, precision, place, shares=place == actor))


def _borrower(rollout: RolePlacement, actor: Place, lora: LoraConfig | None, precision: Precision) -> RolePlacement:
    """The engine on the actor's own arrays; UserError says why it can't be."""
    obstacles = {
        f"the engine is on {rollout.place}, the actor on {actor}: give them one mesh (cluster.rollout.same_as: actor)": rollout.place
        != actor,
        f"products are in {precision}, for which the engine rounds matrices of its own: set model.precision to f32": precision != "f32",
        "an adapter is trained, which the engine merges into matrices of its own: leave model.lora out": lora is not None,
    }
    if any(obstacles.values()):
        raise UserError(
            "rollout.weights is lent, but the actor's arrays can't be the engine's:"
            + "".join(f"\n  - {obstacle}" for obstacle, there in obstacles.items() if there)
            + "\nOr set rollout.weights to copy."
        )
    why = "lent by the actor, layers stacked as its are: no memory; every token copies a layer at a time"
    return RolePlacement(Role.ROLLOUT, rollout.place, "shared", why, 0)


def _engine_bytes(model: ModelConfig, lora: LoraConfig | None, precision: Precision, place: Place, *, shares: bool) -> int:
    """What `rollout.native.layout` holds: under an adapter on the actor's mesh, the float32 leaves outside the layers are the actor's."""
    width = 2 if precision == "bf16" else 4
    specs = transformer.spec(model)
    if model.decoder is not None:
        return _bytes(specs, place, 4)
    sizes = [_bytes(leaf, place, width if len(leaf.shape) == 3 else 4) for leaf in specs["layers"].values()]
    borrowed = lora is not None and lora.quantize is None and shares
    if not borrowed:
        sizes += [_bytes(specs[name], place, 4) for name in ("embed", "final_norm")]
    head = specs["embed" if model.tied_head else "head"]
    if precision == "bf16" or not (model.tied_head or borrowed):
        sizes.append(_bytes(head, place, width))
    if lora is not None:
        sizes.append(_bytes(spec_from(model, lora), place, 4))
        if not shares:  # what the adapter is merged into at each sync
            kept = quantised_spec(specs, lora.quantize)["layers"]
            sizes += [_bytes(kept[name], place, 4) for name in lora.targets]
    return sum(sizes)


def _bytes(specs: Params | ParamSpec, place: Place, width: int) -> int:
    """Of one device's pieces of a declared tree, at `width` bytes a number where the declaration doesn't say."""
    return sum(
        (width if leaf.dtype is None else jnp.dtype(leaf.dtype).itemsize)
        * math.prod(size // place.size(RULES[axis]) for size, axis in zip(leaf.shape, leaf.axes, strict=True))
        for leaf in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    )


__all__ = ["ELSEWHERE", "Holding", "Place", "Placement", "Role", "RolePlacement", "actor_place", "placement"]
