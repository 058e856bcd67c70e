"""`burnish report RUN [OTHER]`: a run, or two beside each other, as one HTML file that needs no network. Works while the run goes on."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="a run as one HTML page: curves, samples, timeline, health", description=__doc__)
    parser.add_argument("folder", metavar="RUN", help="a run's folder, e.g. runs/first")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="another run, to be compared with the first")
    parser.add_argument("--out", metavar="FILE", help="where the page goes; without it RUN/report.html")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from burnish.observe.report.page import build
    from burnish.observe.run_files import run_path
    from burnish.observe.run_folder import write_atomically

    folder = run_path(args.folder)
    out = Path(args.out) if args.out else folder / "report.html"
    page = build([folder] if args.other is None else [folder, run_path(args.other)])
    write_atomically(out, page)
    print(f"{out} ({len(page) / 1e6:.1f} MB)")
    return 0


__all__ = ["add_parser", "run"]
