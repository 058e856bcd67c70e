"""Makes the report's file: styles, programs and data in one HTML page that asks the network for nothing.

Owns the putting together and the limit of its size. The data are compressed (the browser has `DecompressionStream`), so what a run sampled
can't be read as markup either.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from burnish.config.secrets import scrub
from burnish.observe.report.data import gather

MOST_BYTES = 8 * 10**6
PROGRAMS = ("format.js", "charts.js", "tokens.js", "samples.js", "batches.js", "timeline.js", "overview.js", "app.js")
"""In the order in which they are read: each uses what stands before it."""


def build(folders: Sequence[str | Path]) -> str:
    """The page of a run, or of two beside each other. Raises what `gather` raises."""
    page = _page([gather(folder) for folder in folders])
    for every, most in ((2, 4000), (4, 4000), (10, 4000), (10**6, 2000), (10**6, 500)):
        if len(page) <= MOST_BYTES:
            break
        page = _page([gather(folder, every=every, most_episodes=most) for folder in folders])
    return page


def _page(runs: list[dict[str, Any]]) -> str:
    data = zlib.compress(scrub(json.dumps(runs, ensure_ascii=False, separators=(",", ":"))).encode(), 9)
    values = {
        "TITLE": html.escape(" · ".join(run["name"] for run in runs)),
        "STYLE": "\n".join((_asset("vendor/uPlot.min.css"), _asset("assets/page.css"))),
        "VENDOR": f"/*\n{_asset('vendor/uPlot.LICENSE')}*/\n{_asset('vendor/uPlot.iife.min.js')}",
        "PROGRAM": "\n".join(_asset(f"assets/{name}") for name in PROGRAMS),
        "DATA": base64.b64encode(data).decode(),
    }
    page = _asset("assets/page.html")
    for name, value in values.items():
        page = page.replace("{{" + name + "}}", value)
    return page


def _asset(name: str) -> str:
    return resources.files("burnish.observe.report").joinpath(name).read_text(encoding="utf-8")


__all__ = ["MOST_BYTES", "PROGRAMS", "build"]
