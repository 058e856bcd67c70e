"""The pictures of docs/images, of a run's report: `make screenshots RUN=runs/NAME`. Ends with 1 where the page complains of anything."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from burnish.cli.main import main
from tests.observe.browser import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {
    "report-overview": ("1", 1360, False),
    "report-samples": ("2", 1360, False),
    "report-batches-dark": ("3", 1360, True),
    "report-timeline-dark": ("4", 1360, True),
    "report-narrow": ("2", 420, False),
}
"""By name: the key of the part, the width in pixels, whether it is dark."""


def take(run: Path, folder: Path) -> list[str]:
    """Make the run's report and its pictures; returns what the page has complained of."""
    assert main(["report", str(run)]) == 0
    complaints: list[str] = []
    for name, (key, width, dark) in PICTURES.items():
        with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), width=width, dark=dark) as browser:
            browser.open((run / "report.html").absolute())
            browser.press(key)
            browser.picture(folder / f"{name}.png")
            paints = dict(browser.value("performance.getEntriesByType('paint').map(e => [e.name, e.startTime])"))
            print(f"{name}: first paint after {paints['first-contentful-paint']:.0f} ms")
            complaints += browser.errors
    return complaints


if __name__ == "__main__":
    found = take(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else IMAGES)
    print("\n".join(found) or "no complaints")
    sys.exit(bool(found))
