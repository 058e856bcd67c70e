"""Supervised training by burnish and by others: the same packed rows, one side after the other in one invocation, each in f32 and bf16.

    python bench/peers/sft.py [--steps 6] [--only SIDE …]

Environments are those of `run.py`. Writes bench/baselines/peers_sft.json with the raw times of every step, and prints trained tokens a
second, and the ratios of each side's best. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from run import HERE, ROOT, Side, run
from sft_work import TOKENS

TARGET = HERE.parent / "baselines" / "peers_sft.json"
SIDES = (("burnish", "burnish_sft.py", "burnish"), ("TRL", "trl_sft.py", "trl"), ("Tunix", "tunix_sft.py", "tunix"))
LIMITS = {"TRL": 1.5, "Tunix": 2.5}


def speed(record: dict[str, Any]) -> float:
    """Tokens a second, by the median over the steps after the first, in which programs are compiled."""
    return TOKENS / statistics.median(record["step_seconds"][1:] or record["step_seconds"])


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| | trained tokens/s | first step, s | peak GiB |", "|---|---|---|---|"]
    for record in records:
        cells = (f"{record['side']} {record['setting']}", f"{speed(record):.0f}", f"{record['step_seconds'][0]:.1f}")
        lines.append(f"| {' | '.join(cells)} | {record['peak_memory_gib']:.2f} |")
    best = {side: max(speed(r) for r in records if r["side"] == side) for side in {r["side"] for r in records}}
    for side in sorted(best.keys() & LIMITS.keys()):
        if "burnish" in best:
            lines.append(f"\nburnish at its best over {side} at its best: {best['burnish'] / best[side]:.2f} (limit {LIMITS[side]})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path("~/.cache/burnish/smollm2-135m").expanduser()))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="*", metavar="SIDE", help="burnish, TRL, Tunix")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        subprocess.run([sys.executable, HERE / "machine.py", scratch / "machine.json"], check=True)
        machine = json.loads((scratch / "machine.json").read_text(encoding="utf-8"))
        wanted = [
            Side(name, program, environment, setting, args.steps)
            for name, program, environment in SIDES
            for setting in ("f32", "bf16")
            if not args.only or name in args.only
        ]
        records = [run(side, args.model, scratch) for side in wanted]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv]), "commit": commit, "machine": machine}
    TARGET.write_text(json.dumps(result | {"sides": records}, indent=1) + "\n", encoding="utf-8")
    for record in (record for record in records if "failed" in record):
        print(f"{record['side']} {record['setting']} failed:\n{record['failed']}", file=sys.stderr)
    print(table([record for record in records if "failed" not in record]))


if __name__ == "__main__":
    main()
