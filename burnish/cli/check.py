"""`burnish check CONFIG [KEY=VALUE ...]`: what a run will cost and where it would fail, before any weights are loaded.

Exit code 0 where nothing would fail, 2 otherwise: what was asked for can't be done.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from typing import Any

from burnish.cli import options
from burnish.config.errors import UserError

_LINK_SPEED = "100GB/s"
"""About one of the six links of a TPU v5p chip (4,800 Gbit/s together)."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("check", help="tell what a run will cost and where it would fail", description=__doc__)
    options.add_config_arguments(parser)
    devices = "plan for so many devices, which needn't be here; without it, for the devices of this process"
    parser.add_argument("--devices", type=int, metavar="N", help=devices)
    parser.add_argument("--device-memory", metavar="SIZE", help="what one device may hold, e.g. 95GiB; more is an error")
    speed = f"what one link between two devices carries, e.g. 400Gbit/s (default {_LINK_SPEED})"
    parser.add_argument("--link-speed", metavar="RATE", default=_LINK_SPEED, help=speed)


def run(args: argparse.Namespace) -> int:
    from burnish.config.schema import Config

    resolved = options.load(args, Config)
    if args.devices is not None:
        _pretend(args.devices)
    import jax

    from burnish.rl.forecast.report import forecast
    from burnish.rl.forecast.units import parse_rate, parse_size

    found = forecast(
        resolved.config,
        base=resolved.base,
        num_devices=args.devices or jax.local_device_count(),
        rate=parse_rate(args.link_speed, option="--link-speed"),
        budget=None if args.device_memory is None else parse_size(args.device_memory, option="--device-memory"),
    )
    print(found.text(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return UserError.exit_code if found.problems else 0


def _pretend(count: int) -> None:
    """Let this process have `count` devices that are parts of its CPU. No accelerator is touched."""
    if count < 1:
        raise UserError(f"--devices {count}: there must be at least one")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the partitioner's remarks on how it gets from one sharding to another
    import jax

    with contextlib.suppress(RuntimeError):  # where jax has started already it has the devices that it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    if (found := jax.local_device_count()) < count:
        raise UserError(f"--devices {count}: jax has started in this process already, with {found} devices; ask in a process of its own")


__all__ = ["add_parser", "run"]
