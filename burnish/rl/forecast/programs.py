"""The memory of a compiled program, asked of the compiler itself: traced with shapes, compiled for its mesh, never run.

Owns the asking. Which programs a run has is `trained.py` and `engine.py`. On CPU devices, which is what `burnish check --devices` plans
with, the compiler is XLA's for CPUs: programs are partitioned as they are everywhere, so arguments and outputs are those of any hardware;
temporaries are a CPU's (docs/check.md says how near they come).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from burnish.rl.forecast.run import Shaped, bytes_on_a_device
from burnish.rl.sites import on

_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),  # later ones know no such option
}
"""How a CPU's compiler makes machine code that nobody will run, in a third of the time. Buffers are assigned before that."""


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes on one device.

    arguments: all, also those that outputs take the place of; aliased: what of the outputs does. added: while it runs, beside what its role
    keeps all along and besides summed gradients; with_gradients: whether it needs those.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    added: int
    with_gradients: bool = False


@dataclass(frozen=True, slots=True)
class RolePrograms:
    """What a role runs, and what it keeps beside its weights: the optimizer's state, a cache; gradients for the time of an update."""

    programs: tuple[ProgramMemory, ...]
    optimizer: int = 0
    gradients: int = 0
    cache: int = 0


class Measured(NamedTuple):
    """A program's memory, and its outputs' shapes with the places that the compiler gave them."""

    memory: ProgramMemory
    outputs: Shaped


def measure(
    name: str, program: Any, *args: Any, passing: Any = None, with_gradients: bool = False, new_gradients: int = 0, **static: Any
) -> Measured:
    """Compile `program`, made by `jax.jit`, for arguments that are shapes.

    passing: those arguments that are there for its sake alone. with_gradients: whether summed gradients are among its arguments or outputs;
    new_gradients: bytes of those that are new outputs.
    """
    places = (leaf.sharding for leaf in jax.tree.leaves(args))
    meshes = (place.mesh for place in places if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh))
    with on(next(meshes, None)):
        traced = program.trace(*args, **static)
        compiled = traced.lower().compile(compiler_options=_QUICK if jax.default_backend() == "cpu" else None)
    found = compiled.memory_analysis()
    memory = ProgramMemory(
        name,
        arguments=found.argument_size_in_bytes,
        outputs=(outputs := found.output_size_in_bytes),
        aliased=(aliased := found.alias_size_in_bytes),
        temporaries=(temporaries := found.temp_size_in_bytes),
        added=bytes_on_a_device(passing) + outputs - aliased - new_gradients + temporaries,
        with_gradients=with_gradients,
    )
    shapes, places = traced.out_info, compiled.output_shardings
    return Measured(memory, jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places))
