"""`burnish watch RUN`: how a run stands, from its folder alone, in another terminal or on another machine that sees it.

On a terminal the block is redrawn until the run ends or Ctrl-C; elsewhere each step is one line. The run isn't touched.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from burnish.observe.panel import Progress

EVERY_S = 1.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("watch", help="how a run stands, live", description=__doc__)
    parser.add_argument("folder", metavar="RUN", help="a run's folder, e.g. runs/first")
    parser.add_argument("--once", action="store_true", help="say how it stands now, and leave")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from burnish.observe.panel import Progress, panel
    from burnish.observe.run_files import read_config, run_path
    from burnish.observe.run_folder import read_status

    folder = run_path(args.folder)
    progress = Progress(_max_steps(read_config(folder)))
    console = Console(highlight=False)

    def view() -> Group:
        status = read_status(folder)
        head = Text.assemble((folder.name, "bold"), f"  {status['state']}" + (f": {status['cause']}" if status.get("cause") else ""))
        if not progress.history:
            return Group(head, Text("no step has ended yet", style="dim"))
        return Group(head, *panel(progress, width=console.width))

    _catch_up(progress, folder)
    if args.once or not sys.stdout.isatty():
        return _in_lines(progress, folder, once=args.once)
    with Live(view(), console=console, refresh_per_second=4) as live:
        while read_status(folder)["state"] == "running":
            time.sleep(EVERY_S)
            _catch_up(progress, folder)
            live.update(view())
        _catch_up(progress, folder)
        live.update(view())
    return 0


def _in_lines(progress: Progress, folder: Path, *, once: bool) -> int:
    """A line a step; `once`: the block, without waiting for more."""
    from burnish.observe.display import step_line
    from burnish.observe.panel import panel
    from burnish.observe.run_folder import read_status
    from burnish.observe.sinks import StepReport

    if once:
        print(f"{folder.name}  {read_status(folder)['state']}")
        print("\n".join(line.plain.rstrip() for line in panel(progress, width=120)) if progress.history else "no step has ended yet")
        return 0
    shown = 0
    while True:
        running = read_status(folder)["state"] == "running"
        _catch_up(progress, folder)
        for step, metrics in zip(progress.steps[shown:], progress.history[shown:], strict=True):
            print(step_line(StepReport(step, progress.max_steps, metrics), eta_s=None), flush=True)
        shown = len(progress.steps)
        if not running:
            return 0
        time.sleep(EVERY_S)


def _catch_up(progress: Progress, folder: Path) -> None:
    """Steps that have ended since. A run that was resumed may have fewer than before."""
    from burnish.observe.run_files import read_metrics

    rows = read_metrics(folder)
    progress.steps = [int(row["step"]) for row in rows]
    progress.history = [{name: value for name, value in row.items() if name != "step"} for row in rows]
    progress.max_steps = max(progress.max_steps, progress.step)


def _max_steps(config: dict[str, Any]) -> int:
    return (config.get("training") or {}).get("max_steps", 0)


__all__ = ["add_parser", "run"]
