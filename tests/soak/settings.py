"""How much a soak does, from the environment, and where it writes down what came of it: tests/soak/results.json."""

import json
import os
from datetime import date
from pathlib import Path

KILLS = int(os.environ.get("BURNISH_SOAK_KILLS", "50"))
RUNS = int(os.environ.get("BURNISH_SOAK_RUNS", "20"))
SIGTERMS = int(os.environ.get("BURNISH_SOAK_SIGTERMS", "20"))
CYCLES = int(os.environ.get("BURNISH_SOAK_CYCLES", "200"))
MINUTES = float(os.environ.get("BURNISH_SOAK_MINUTES", "30"))
RESULTS = Path(os.environ.get("BURNISH_SOAK_RESULTS") or Path(__file__).with_name("results.json"))


def record(row: str, done: str, ended: str) -> None:
    """What was done and how it ended, in place of what was known of `done`'s row before."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    name = f"{row} {done.split(',')[0].lstrip('0123456789 ')}"
    known[name] = {"row": row, "done": done, "ended": ended, "date": date.today().isoformat()}
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
