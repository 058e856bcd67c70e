"""Memory that is told of a run before it is loaded, beside what XLA says of the programs that the loaded run compiles."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from burnish.config.schema import Config
from burnish.models.model import Model
from burnish.rl.batch import TokenBatch, fit_shape
from burnish.rl.cluster import RLCluster
from burnish.rl.forecast.memory import DeviceMemory, memory, memory_table, over_budget
from burnish.rl.forecast.programs import ProgramMemory
from burnish.rl.forecast.report import Forecast, planned
from burnish.rl.forecast.run import PlannedRun, token_batch
from burnish.rl.forecast.units import size
from burnish.rl.placement import Role
from burnish.rl.sites import on
from burnish.rollout.native.cache import Spread, allocate
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.train.step import MicroBatch
from burnish.train.value import ValueMicroBatch
from tests.rl.batches import credit_all, group

SIZES: Any = {
    "rollout": {"max_prompt_tokens": 32, "slots": 8, "prefill_rows": 4, "sampling": {"max_tokens": 40}},
    "training": {"batch_size": 8, "head_chunk": 64},
}
CASES: dict[str, Any] = {
    "one device, one pass an update": {"algorithm": {"num_generations": 4}},
    "fsdp, several passes, bf16, anchor, a reference elsewhere": {
        "model": {"precision": "bf16"},
        "algorithm": {"num_generations": 2, "beta": 0.1},
        "training": {"mini_batch_size": 4, "tokens_per_device": 96, "remat": "nested"},
        "cluster": {"actor": {"axes": {"fsdp": 4}}, "reference": {"axes": {"tp": 2}}, "rollout": {"devices": 2}},
    },
    "an adapter on data and tp": {
        "model": {"precision": "f32", "lora": {"rank": 4, "targets": ["q", "v", "down"]}},
        "algorithm": {"num_generations": 4, "beta": 0.1, "num_iterations": 2},
        "training": {"train_micro_batch_size": 2, "compute_logps_micro_batch_size": 4, "optimizer": {"name": "lion"}},
        "cluster": {"actor": {"axes": {"data": 2, "tp": 2}}},
    },
    "ppo with its critic on other devices": {
        "algorithm": {"name": "ppo", "num_generations": 2},
        "training": {"train_micro_batch_size": 4, "optimizer": {"name": "adafactor"}},
        "cluster": {"actor": {"axes": {"fsdp": 2}}, "critic": {"axes": {"fsdp": 2, "tp": 2}}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, config=tiny_config("qwen3", width=64, num_layers=4), alphabet="0123456789+")
    return folder


def plan(folder: Path, case: Any) -> PlannedRun:
    sections = {key: {**SIZES.get(key, {}), **case.get(key, {})} for key in {*SIZES, *case}}
    sections["algorithm"] = {"name": "grpo", **sections["algorithm"]}
    sections["model"] = {"precision": "f32", **sections.get("model", {}), "path": str(folder)}
    found = Forecast()
    run = planned(found, Config.model_validate(sections), base=folder, num_devices=8)
    assert run is not None and not found.problems, found.problems
    return run


def loaded(run: PlannedRun) -> RLCluster:
    config = run.config
    cluster = RLCluster(
        Model.load(config.model.path),
        lora=config.model.lora,
        precision=run.precision,
        cluster=config.cluster,
        rollout=config.rollout,
        training=config.training,
        critic=config.algorithm.critic if config.algorithm.name == "ppo" else None,
    )
    cluster.prepare(run.algorithm, total_updates=10)
    return cluster


def xla(name: str, program: Any, *args: Any) -> ProgramMemory:
    """What XLA says of a program for arguments that exist, traced as the run traces it."""
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(args) if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
    with on(meshes[0] if meshes else None):
        found = program.lower(*args).compile().memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes)
    return ProgramMemory(name, *sizes, added=0)


def bare(program: Any) -> Any:
    """A program that waits for its turn on the devices, without the wait."""
    return program.__wrapped__


def rows(run: PlannedRun, prompts: int | None) -> TokenBatch:
    """A real batch, on the host, of as many prompts as go together."""
    return jax.tree.map(lambda s: np.ones(s.shape, s.dtype), token_batch(run.largest_batch(prompts), None))


def updates(run: PlannedRun, steps: Any, state: Any, base: Any, micro: Any) -> list[ProgramMemory]:
    """The programs of an update with these arguments, in order; the state is used up."""
    if run.accumulates:
        start = steps.zeros(state.trainable, base, micro)
        found = [xla("update", bare(steps.accumulate), start, state.trainable, base, micro)]
        totals = steps.accumulate(start, state.trainable, base, micro)
    else:
        found = [xla("update", bare(steps.totals), state.trainable, base, micro)]
        totals = steps.totals(state.trainable, base, micro)
    apply = bare(steps.apply)
    found.append(xla("apply: weights", apply.move, state.trainable, state.opt_state, state.updates, totals))
    trainable, verdict, _ = apply.move(state.trainable, state.opt_state, state.updates, totals)
    return [*found, xla("apply: moments", apply.remember, state.opt_state, trainable, totals.gradients, verdict)]


def actors(run: PlannedRun, cluster: RLCluster) -> tuple[list[ProgramMemory], list[ProgramMemory]]:
    """What XLA says of the actor's programs, and of the reference's."""
    size, needed = run.config.training.compute_logps_micro_batch_size, run.algorithm.scores_needed
    batch = cluster.place(rows(run, run.plan.train_micro))
    asked = batch if size is None else cluster.place(rows(run, size))
    found, of_reference = [], []
    old = ref = None
    if run.scores_actor:
        trainable = cluster.state.trainable
        params, pairs = (trainable, None) if cluster._base is None else (cluster._base, trainable)
        found.append(xla("score", bare(cluster._score), params, pairs, asked))
        old = cluster.get_actor_per_token_logps(asked)
    if "reference" in needed:
        reference = cluster._reference
        assert reference is not None
        of_reference.append(xla("score", bare(reference._score), reference.params, None, reference._site.take(asked)))
        ref = cluster.get_ref_per_token_logps(asked)
    if size is not None:  # as `rl.scoring` puts passes of another size together
        old, ref = (None if x is None else cluster.place(jax.numpy.zeros(batch.mask.shape)) for x in (old, ref))
    assert cluster._steps is not None
    return [*found, *updates(run, cluster._steps, cluster.state, cluster._base, MicroBatch(batch, old, ref))], of_reference


def critics(run: PlannedRun, cluster: RLCluster) -> list[ProgramMemory]:
    critic = cluster._critic
    assert critic is not None and critic._steps is not None
    batch = cluster.place(rows(run, run.plan.train_micro))
    there = critic._site.take(batch)
    found = [xla("values", bare(critic._values), critic.state.trainable, there)]
    micro = critic._site.take(ValueMicroBatch(batch, critic.values(batch)[0]))
    return found + updates(run, critic._steps, critic.state, None, micro)


def agree(told: tuple[ProgramMemory, ...], found: list[ProgramMemory]) -> None:
    """Arguments and outputs to the byte, temporaries nearly so; what is next to nothing may differ by a few buffers' edges."""
    assert [p.name for p in told] == [p.name for p in found]
    for mine, theirs in zip(told, found, strict=True):
        assert (mine.arguments, mine.outputs, mine.aliased) == (theirs.arguments, theirs.outputs, theirs.aliased), mine.name
        assert mine.temporaries == pytest.approx(theirs.temporaries, rel=0.05, abs=4096), mine.name
    assert max(p.temporaries for p in told) > 100_000


def fullest(tree: Any) -> int:
    """Bytes on the device that has most of them."""
    found: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return max(found.values(), default=0)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_what_is_told_is_what_the_run_holds_and_what_xla_says_of_its_programs(folder: Path, name: str) -> None:
    run = plan(folder, CASES[name])
    roles = {role.role: role for device in memory(run) for role in device.roles}
    actor, rollout = roles[Role.ACTOR], roles[Role.ROLLOUT]
    cluster = loaded(run)
    try:
        assert actor.held.optimizer == pytest.approx(fullest(cluster.state.opt_state), abs=16)  # its counters are on the first device
        assert actor.held.gradients == fullest(cluster.state.trainable)
        waiting = [] if cluster._anchor is None else [cluster._anchor._snapshot]
        assert actor.host == fullest(waiting)
        mesh, slots = run.meshes[Role.ROLLOUT], run.config.rollout.slots
        spread = None if mesh is None else Spread.over(mesh, slots=slots)
        place, banks = (SingleDeviceSharding(jax.devices()[0]), 1) if spread is None else (spread.cache, spread.banks)
        pages = 2 * slots // banks  # contexts of 72 tokens
        cache = allocate(run.models[Role.ROLLOUT], banks=banks, pages=pages, precision=run.precision, place=place)
        assert rollout.held.cache == fullest(cache) * 3 // 2 > 0, "and half as much for kept prefixes"
        if Role.CRITIC in roles:
            assert roles[Role.CRITIC].held.optimizer == pytest.approx(fullest(cluster.critic_state.opt_state), abs=16)
            agree(roles[Role.CRITIC].held.programs, critics(run, cluster))
        actors_own, references = actors(run, cluster)
        agree(actor.held.programs, actors_own)
        if Role.REFERENCE in roles:
            agree(roles[Role.REFERENCE].held.programs, references)
    finally:
        cluster.close()


def live(kind: str) -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [[], ["actor", "reference"]])
def test_what_is_kept_is_all_that_lives_on_the_devices_between_steps(folder: Path, offload: list[str]) -> None:
    case = {"algorithm": {"num_generations": 2, "beta": 0.1}, "training": {"mini_batch_size": 4}, "cluster": {"offload_to_cpu": offload}}
    run = plan(folder, case)
    (device,) = memory(run)
    before, waiting = live("device"), live("pinned_host")
    cluster = loaded(run)
    try:
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in cluster.engine._runner.memory.cache)  # type: ignore[attr-defined]
        assert sum(role.kept - role.held.cache for role in device.roles) == pytest.approx(live("device") - before - cache, abs=64)
        assert sum(role.host for role in device.roles) == pytest.approx(live("pinned_host") - waiting, abs=64)
        assert (sum(role.host for role in device.roles) > actors_optimizer(device)) == bool(offload)
    finally:
        cluster.close()


def actors_optimizer(device: DeviceMemory) -> int:
    (actor,) = (role for role in device.roles if role.role is Role.ACTOR)
    return actor.held.optimizer


@pytest.mark.parametrize("generations", [4, 3])
def test_the_largest_batch_is_the_shape_of_episodes_as_long_as_they_may_be(folder: Path, generations: int) -> None:
    run = plan(folder, {"algorithm": {"num_generations": generations}})
    groups = [group(draw, range(32), [range(40)] * generations) for draw in range(8)]
    assert run.largest_batch(8) == fit_shape(groups, credit_all(groups))


def test_a_peak_is_what_all_keep_and_the_hungriest_program_adds(folder: Path) -> None:
    run = plan(folder, CASES["an adapter on data and tp"])
    (device,) = memory(run)
    kept = sum(role.kept for role in device.roles)
    actor, rollout = device.roles[0], device.roles[1]
    assert {role.role for role in device.roles} == {Role.ACTOR, Role.ROLLOUT, Role.REFERENCE}
    most = max(program.added for role in device.roles for program in role.held.programs)
    assert kept + most <= device.peak <= kept + most + actor.held.gradients
    assert rollout.held.programs[-1].name == "sync" and actor.devices == "0-3"
    assert over_budget([device], device.peak) == []
    (problem,) = over_budget([device], device.peak - 1)
    assert problem.startswith("devices 0-3 would hold") and "--device-memory allows" in problem
    first, *_, last = memory_table([device]).splitlines()[1:]
    assert first.startswith("0-3      actor") and first.endswith(f"{size(device.peak)} in {device.during}") and "score" in last
