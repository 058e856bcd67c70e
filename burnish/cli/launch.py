"""`burnish launch slurm|jobset CONFIG [KEY=VALUE ...] --processes N --devices D`: the file that starts a run in several processes.

Prints it; `sbatch` or `kubectl apply -f -` takes it. The configuration is checked first, its meshes against N processes with D devices.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.options import add_config_arguments, load
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.schema import Config

TEMPLATES = {"slurm": "slurm.sh", "jobset": "jobset.yaml"}
PORT = 8476
GRACE_S = 120


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("launch", help="print the file that starts a run in several processes", description=__doc__)
    parser.add_argument("launcher", choices=TEMPLATES, help="what starts the processes")
    add_config_arguments(parser)
    parser.add_argument("--processes", type=int, required=True, help="how many: one a machine")
    parser.add_argument("--devices", type=int, required=True, help="of each process")
    parser.add_argument("--minutes", type=int, default=1440, help="slurm: the time that the job may take (%(default)s)")
    parser.add_argument("--image", default="burnish", help="jobset: the container image, with burnish in it (%(default)s)")
    parser.add_argument("--claim", default="shared", help="jobset: the claim of the file system that all pods share (%(default)s)")
    parser.add_argument("--mount", default="/shared", help="jobset: where pods have it; relative paths are from here (%(default)s)")
    parser.add_argument("--restarts", type=int, default=10, help="jobset: how often a run that ended is started again (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from burnish.config.schema import Config
    from burnish.rl.placement import actor_place

    config = load(args, Config).config

    for name, least in (("processes", 1), ("devices", 1), ("minutes", 1), ("restarts", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}, and must be at least {least}")
    actor_place(config.cluster, num_devices=args.devices, num_processes=args.processes)
    print(render(args.launcher, config, args), end="")
    return 0


def render(launcher: str, config: Config, args: argparse.Namespace) -> str:
    """The file for one launcher. args: as the parser of this command makes them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(loader=PackageLoader("burnish.cli"), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    templates.filters["quote"] = shlex.quote
    words = ["burnish", "train", *([args.config] if args.config else []), *args.overrides]
    return templates.get_template(TEMPLATES[launcher]).render(
        name=re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40],
        folder=str(Path(config.run.folder) / config.run.name),
        words=words,
        command=shlex.join(words),
        processes=args.processes,
        devices=args.devices,
        minutes=args.minutes,
        grace=GRACE_S,
        port=PORT,
        image=args.image,
        claim=args.claim,
        shared=args.mount,
        restarts=args.restarts,
    )


__all__ = ["add_parser", "render", "run"]
