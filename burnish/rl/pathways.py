"""Pathways: one process that has the devices of all machines, through a proxy, as if they were its own.

Owns finding out that it is meant (`JAX_PLATFORMS=proxy`), and having jax told what `proxy` is. Such a run is of one process: there is
nobody to join, and a mesh may be over every device. Never run on a Pathways cluster here; docs/scale.md says what was tried.
"""

from __future__ import annotations

import importlib

import jax

from burnish.config.errors import UserError
from burnish.config.schema import DistributedConfig


def start_pathways(config: DistributedConfig | None) -> bool:
    """Whether this process's devices are a proxy's; then jax knows them from now on. To be called before any device is asked for."""
    if "proxy" not in (jax.config.jax_platforms or "").split(","):  # type: ignore[attr-defined]
        return False
    target = jax.config.read("jax_backend_target")
    if not target:
        raise UserError(
            "JAX_PLATFORMS is proxy, so devices are reached through a Pathways proxy, but not at which address: set JAX_BACKEND_TARGET, "
            "e.g. grpc://127.0.0.1:29000"
        )
    if config is not None and (config.coordinator, config.num_processes or 1, config.process_id or 0) != (None, 1, 0):
        raise UserError(
            f"cluster.distributed names {config.num_processes or 'several'} processes, but JAX_PLATFORMS is proxy: with Pathways one "
            f"process has all devices, those of {target}. Leave cluster.distributed out, or unset JAX_PLATFORMS"
        )
    try:
        package = importlib.import_module("pathwaysutils")
    except ImportError as error:
        raise UserError(
            f"JAX_PLATFORMS is proxy, for the devices of {target}, and that needs a package of Google's ({error}): "
            "pip install pathwaysutils"
        ) from error
    package.initialize()
    return True


__all__ = ["start_pathways"]
