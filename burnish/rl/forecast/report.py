"""The whole forecast of a configuration: what can be told, and everything that would fail.

Owns the order of questions and what becomes of a mistake: it is kept, what depends on it is left out, and the rest is still told. Reads
`config.json` of the models, no weights, no tokenizer and no data. `cli.check` prints it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from burnish.config.algorithms import OnPolicyDistillationConfig, PPOConfig
from burnish.config.errors import UserError
from burnish.config.schema import Config
from burnish.models import families, scalar_head, transformer
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.model import resolve_precision
from burnish.models.sharding import check_mesh, shardings
from burnish.models.weights import load_config
from burnish.rl import algorithms
from burnish.rl.batch_plan import BatchPlan
from burnish.rl.forecast.memory import memory, memory_table, over_budget, programs_table
from burnish.rl.forecast.run import PlannedRun, declared, devices_of
from burnish.rl.forecast.timeline import timeline
from burnish.rl.forecast.transfer import sync_forecast
from burnish.rl.learner import anchored, planned_updates
from burnish.rl.placement import Placement, Role, placement
from burnish.rl.sites import make_mesh
from burnish.text.tokenizer import read_json

T = TypeVar("T")


@dataclass
class Forecast:
    """sections: title and text, in order. problems: what would fail, each with what to do. notes: what isn't wrong but may surprise."""

    sections: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self, *, width: int | None = None) -> str:
        """width: of a terminal, at which long lines go on below; None lets them be."""
        parts = [(title, text.splitlines()) for title, text in self.sections]
        if self.notes:
            parts.append(("Notes", [f"- {note}" for note in self.notes]))
        verdict = [line for problem in self.problems for line in f"- {problem}".splitlines()]
        parts.append(("What would fail", verdict or ["nothing that can be told from here"]))
        return "\n\n".join("\n".join([title, *(part for line in lines for part in _cut(f"  {line}", width))]) for title, lines in parts)

    def attempt(self, ask: Callable[[], T]) -> T | None:
        """The answer, or None with the mistake kept."""
        try:
            return ask()
        except UserError as error:
            self.problems.append(str(error))
            return None


@dataclass(frozen=True, slots=True)
class Models:
    """The architectures, by role, and the reward model's stored dtype."""

    actor: ModelConfig
    critic: ModelConfig | None
    reward: ModelConfig | None
    reward_dtype: Any
    teacher: ModelConfig | None


def forecast(config: Config, *, base: Path, num_devices: int, rate: float, budget: int | None) -> Forecast:
    """Everything about the run that `config` describes on `num_devices` of this process's devices.

    base: the folder that its files are relative to. rate: bytes a second through a link. budget: bytes that a device may hold, or None.
    """
    found = Forecast()
    run = planned(found, config, base=base, num_devices=num_devices)
    if run is not None:
        _measure(found, run, rate, budget)
    return found


def planned(found: Forecast, config: Config, *, base: Path, num_devices: int) -> PlannedRun | None:
    """The run, with its sizes and its placement told on the way; None, with every reason among the problems, where it can't be."""
    algorithm = found.attempt(lambda: algorithms.from_config(config.algorithm, max_tokens=config.rollout.sampling.max_tokens, base=base))
    plan = None if algorithm is None else found.attempt(lambda: BatchPlan.from_config(config.training, algorithm, config.rollout))
    if algorithm is not None and plan is not None:
        critic = config.algorithm.critic if isinstance(config.algorithm, PPOConfig) else None
        found.attempt(lambda: planned_updates(algorithm, config.training, plan, critic))
        found.sections.append(("Batches", plan.table()))
    models = found.attempt(lambda: read_models(config))
    local = found.attempt(lambda: _local_devices(config, num_devices))
    placed = None if models is None or local is None else found.attempt(lambda: place(config, models, local))
    if models is None or placed is None or local is None:
        return None
    found.sections.insert(0, ("Run", _summary(config, models.actor, num_devices)))
    found.sections.append(("Placement", placed.table()))
    _note_idle(found, placed, local)
    meshes = _meshes(found, placed, models, local)
    if algorithm is None or plan is None or meshes is None:
        return None
    return PlannedRun(
        config=config,
        algorithm=anchored(algorithm, plan),
        plan=plan,
        precision=resolve_precision(config.model.precision),
        placement=placed,
        models={role: _architecture(models, role) for role in placed.roles},
        meshes=meshes,
        local_devices=local,
        reward_dtype=models.reward_dtype,
    )


def _summary(config: Config, model: ModelConfig, num_devices: int) -> str:
    billions = sum(math.prod(leaf.shape) for leaf in declared(transformer.spec(model))) / 1e9
    lora, processes = config.model.lora, _num_processes(config)
    trained = "every weight is trained" if lora is None else f"an adapter of rank {lora.rank} is trained"
    devices = f"{num_devices} device{'s' * (num_devices != 1)}" + (f" of {processes} processes" if processes > 1 else "")
    return (
        f"{config.model.path}: {model.family}, {model.num_layers} layers of width {model.width}, {billions:.3g} billion weights\n"
        f"{config.algorithm.name}; {trained}; products in {resolve_precision(config.model.precision)}; planned for {devices}"
    )


def read_models(config: Config) -> Models:
    """The architectures, from each `config.json` alone."""
    if not config.model.path:
        raise UserError("`model.path` isn't set: give a folder with a config.json, or a name from `burnish fetch`")
    actor = load_config(locate(config.model.path))
    critic = reward = dtype = teacher = None
    if isinstance(config.algorithm, PPOConfig):
        critic = actor if config.algorithm.critic.path is None else _scalar_config(config.algorithm.critic.path)[0]
    if isinstance(config.algorithm, OnPolicyDistillationConfig):
        if not config.algorithm.teacher.path:
            raise UserError("algorithm.teacher.path isn't set: give the model to learn from")
        teacher = load_config(locate(config.algorithm.teacher.path))
    if config.reward_model is not None:
        reward, dtype = _scalar_config(config.reward_model.path)
    return Models(actor, critic, reward, dtype, teacher)


def _num_processes(config: Config) -> int:
    """Of the run, as far as the configuration says."""
    return 1 if config.cluster.distributed is None else config.cluster.distributed.num_processes or 1


def _local_devices(config: Config, num_devices: int) -> int:
    processes = _num_processes(config)
    if num_devices % processes:
        raise UserError(
            f"{processes} processes (cluster.distributed.num_processes) can't share {num_devices} devices evenly: plan for others"
        )
    return num_devices // processes


def place(config: Config, models: Models, local_devices: int) -> Placement:
    """Where everything goes, with a reference where the penalty needs one. local_devices: of each process."""
    return placement(
        config.cluster,
        num_devices=local_devices,
        num_processes=_num_processes(config),
        model=models.actor,
        lora=config.model.lora,
        precision=resolve_precision(config.model.precision),
        lent=config.rollout.weights == "lent",
        needs_reference=config.algorithm.beta > 0,
        critic=models.critic,
        reward=models.reward,
        reward_weight_bytes=4 if models.reward_dtype is None else models.reward_dtype.itemsize,
        teacher=models.teacher,
    )


def _scalar_config(path: str) -> tuple[ModelConfig, Any]:
    """Of a critic or a reward model: its architecture and the dtype that its weights are stored in."""
    file = locate(path) / "config.json"
    raw = read_json(file)
    return families.read_config(raw, where=str(file), classifier=families.is_classifier(raw)), jnp.dtype(families.stored_dtype(raw))


def _architecture(models: Models, role: Role) -> ModelConfig:
    own = {Role.CRITIC: models.critic, Role.REWARD: models.reward, Role.TEACHER: models.teacher}.get(role, models.actor)
    assert own is not None, "a role that is placed has an architecture"
    return own


def _meshes(found: Forecast, placed: Placement, models: Models, local: int) -> Mapping[Role, Mesh | None] | None:
    """The meshes of all roles, of what each process has for itself the first's; None, with every reason, where one doesn't divide its
    model."""
    meshes = {role: make_mesh(its.place, lambda process: devices_of(process, local)) for role, its in placed.roles.items()}
    before = len(found.problems)
    for role, mesh in meshes.items():
        if mesh is not None:
            found.attempt(lambda role=role, mesh=mesh: _check_divides(role, mesh, _architecture(models, role)))
    return meshes if len(found.problems) == before else None


def _check_divides(role: Role, mesh: Mesh, architecture: ModelConfig) -> None:
    specs = scalar_head.spec(architecture) if role in (Role.CRITIC, Role.REWARD) else transformer.spec(architecture)
    try:
        check_mesh(architecture, mesh)
        shardings(specs, mesh)
    except UserError as error:
        raise UserError(f"cluster.{role}: {error}") from error


def _measure(found: Forecast, run: PlannedRun, rate: float, budget: int | None) -> None:
    """What needs compiled programs, and what follows from the meshes."""
    devices = memory(run)
    of = "this process's devices" if jax.default_backend() != "cpu" else "CPUs"
    found.sections.append(("Memory of each device", memory_table(devices)))
    found.sections.append((f"Programs, bytes on each device, as XLA compiles them for {of}", programs_table(devices)))
    found.sections.append(("Sync of the weights, after each step", sync_forecast(run).text(rate=rate)))
    found.sections.append(("One step", timeline(run)))
    _note_padding(found, run)
    if budget is not None:
        found.problems += over_budget(devices, budget)


def _note_idle(found: Forecast, placed: Placement, num_devices: int) -> None:
    used = {device for role in placed.roles.values() for device in role.place.devices}
    if len(used) < num_devices:
        of = "" if placed[Role.ACTOR].place.processes == 1 else " of each process"
        found.notes.append(f"{num_devices - len(used)} of {num_devices} devices{of} have no role")


def _note_padding(found: Forecast, run: PlannedRun) -> None:
    """A pass of fewer rows than there are groups of devices leaves some with padding."""
    prompts, groups = run.plan.train_micro, run.placement[Role.ACTOR].place.rows
    if prompts is not None and (rows := run.largest_batch(prompts).rows) > prompts:
        found.notes.append(
            f"a forward-backward pass has {prompts} rows and the actor spreads rows over {groups} groups of devices: {rows - prompts} rows "
            f"of padding are computed with them; a training.train_micro_batch_size that {groups} divides, or tokens_per_device, has none"
        )


def _cut(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


__all__ = ["Forecast", "Models", "forecast", "place", "planned", "read_models"]
