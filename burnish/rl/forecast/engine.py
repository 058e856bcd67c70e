"""The engine's programs and what it holds for a while: prefill, decoding, a growing cache, new weights beside the old ones.

Owns the shapes that `rollout.native` gives its programs, at the full cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from burnish.models import transformer
from burnish.models.config import ModelConfig
from burnish.models.transformer import ParamSpec
from burnish.rl.forecast.programs import ProgramMemory, RolePrograms, measure
from burnish.rl.forecast.run import PlannedRun, bytes_on_a_device, declared, truncates, weights
from burnish.rl.placement import Role
from burnish.rollout.native.cache import Cache, LayerCache, Spread, Table, stored_dtype
from burnish.rollout.native.decode import Rows, decode, prefill
from burnish.rollout.native.host_state import slot_state
from burnish.rollout.native.layout import Weights
from burnish.rollout.native.memory import budget_pages, pool_pages
from burnish.rollout.native.pool import PAGE, pages_for


def engine_programs(run: PlannedRun) -> RolePrograms:
    """Programs are measured with one layer: each layer works in the room of the one before."""
    rollout, mesh, whole = run.config.rollout, run.meshes[Role.ROLLOUT], run.models[Role.ROLLOUT]
    config = dataclasses.replace(whole, num_layers=1)
    spread = None if mesh is None else Spread.over(mesh, slots=rollout.slots)
    banks = 1 if spread is None else spread.banks
    pages, kept_pages = _pages(run, spread)
    params, cache = _weights(run, config), _cache(run, spread, banks, pages)
    place = None if spread is None else spread.slots
    state = slot_state([None] * rollout.slots, min_stop_ids=0)
    slots = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place if shape else None)

    longest, rows = pages_for(run.context), -(-rollout.prefill_rows // banks)
    table = Table(ints(rollout.slots, max(2, 1 << (longest - 1).bit_length())), ints(banks, pages), ints(banks, pages))
    prompts = Rows(ints(banks, rows, PAGE), ints(banks, rows), ints(banks, rows), ints(banks, rows, longest), ints())
    options: dict[str, Any] = {"config": config, "precision": run.precision, "spread": spread}
    kept = rollout.max_kept if truncates(rollout.sampling) else 0
    cache_bytes = whole.num_layers * bytes_on_a_device(cache) * (pages + kept_pages) // pages
    programs = (
        measure("prefill", prefill, params, cache, prompts, **options).memory,
        measure("decode", decode, params, cache, slots, table, num_tokens=rollout.decode_chunk, max_kept=kept, **options).memory,
        _moment("a growing cache", bytes_on_a_device(cache) // 2),  # a layer's new part beside the old one, which is half as long
        _moment("sync", _new_weights(run)),
    )
    return RolePrograms(programs, cache=cache_bytes)


def _moment(name: str, num_bytes: int) -> ProgramMemory:
    """What is held for a while by no single program."""
    return ProgramMemory(name, arguments=0, outputs=0, aliased=0, temporaries=0, added=num_bytes)


def _new_weights(run: PlannedRun) -> int:
    """While weights arrive: the new ones beside the old, as the engine has either whole; and the largest leaf, in float32, on its way."""
    if run.config.rollout.weights == "lent":
        return 0
    specs, mesh, lora = transformer.spec(run.models[Role.ROLLOUT]), run.meshes[Role.ROLLOUT], run.config.model.lora
    leaves = specs["layers"] if lora is None else {name: specs["layers"][name] for name in lora.targets}
    arriving = max(bytes_on_a_device(weights(leaf, mesh)) for leaf in declared(leaves))
    if lora is None:
        still = 0 if run.placement[Role.ROLLOUT].holding == "copy" else arriving
        return run.placement[Role.ROLLOUT].bytes_per_device + still
    return bytes_on_a_device(weights(leaves, mesh, _operands(run))) + arriving


def _pages(run: PlannedRun, spread: Spread | None) -> tuple[int, int]:
    """Pages of a bank when all sequences are as long as they may be, and those that are kept beside them."""
    slots, context = run.config.rollout.slots, run.context
    budget = budget_pages(
        run.models[Role.ROLLOUT],
        slots=slots,
        context=context,
        num_bytes=run.config.rollout.kv_cache_bytes,
        precision=run.precision,
        spread=spread,
    )
    running = pool_pages(slots=slots, context=context, budget=budget, spread=spread)
    return running, min(running, budget - running)


def _cache(run: PlannedRun, spread: Spread | None, banks: int, pages: int) -> Cache:
    """Of one layer."""
    config = run.models[Role.ROLLOUT]

    place = SingleDeviceSharding(jax.devices()[0]) if spread is None else spread.cache

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, stored_dtype(run.precision, place), sharding=None if spread is None else spread.cache)

    heads, size = config.num_kv_heads, config.head_dim
    return (LayerCache(array(banks, pages, heads, size, PAGE), array(banks, pages, heads, PAGE, size)),)


def _weights(run: PlannedRun, config: ModelConfig) -> Weights:
    """In the layout of `rollout.native.layout`: layers apart, matrices in the dtype that they are multiplied in."""
    mesh, specs = run.meshes[Role.ROLLOUT], transformer.spec(config)

    def leaf(spec: ParamSpec, *, matrix: bool) -> Any:
        return weights(spec, mesh, _operands(run) if matrix else jnp.float32)

    layer = {name: leaf(ParamSpec(spec.shape[1:], spec.axes[1:]), matrix=len(spec.shape) == 3) for name, spec in specs["layers"].items()}
    head = specs["embed" if config.tied_head else "head"]
    return Weights(leaf(specs["embed"], matrix=False), (layer,), leaf(specs["final_norm"], matrix=False), leaf(head, matrix=True))


def _operands(run: PlannedRun) -> Any:
    return jnp.bfloat16 if run.precision == "bf16" else jnp.float32
