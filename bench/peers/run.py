"""The same work by burnish and by others, one after the other in one invocation; each in its own environment, and in its best settings.

    python bench/peers/run.py [--steps 6] [--repeats 3] [--only SIDE …]

Makes the environments in `.venv-peers/` (pins: the .txt files here), runs each side's program, writes bench/baselines/peers.json with
the raw times of every step, and prints the tables. The machine must be quiet: torch's threads spin, and fall to a tenth beside others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from work import LENGTHS, PROMPTS, SAMPLES, TOKENS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = HERE.parent / "baselines" / "peers.json"
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""What an environment mustn't have: vLLM imports them where they are, and they don't fit."""


@dataclass(frozen=True)
class Side:
    """One program in one setting. times: how often it works, as its third argument. cold: with an empty compilation cache."""

    name: str
    program: str
    environment: str
    setting: str
    times: int
    cold: bool = False


def sides(steps: int, repeats: int) -> list[Side]:
    found = [
        Side("TRL", "trl_rl.py", "trl", "defaults", steps),
        Side("TRL", "trl_rl.py", "trl", "bf16", steps),
        Side("Tunix", "tunix_rl.py", "tunix", "f32", steps),
        Side("Tunix", "tunix_rl.py", "tunix", "bf16", steps),
    ]
    for setting in ("f32", "bf16"):
        found += [
            Side("burnish", "burnish_rl.py", "burnish", setting, 2, cold=True),
            Side("burnish", "burnish_rl.py", "burnish", setting, steps),
            Side("burnish", "burnish_generate.py", "burnish", setting, repeats),
            Side("vLLM", "vllm_generate.py", "vllm", setting, repeats),
            Side("transformers", "transformers_generate.py", "trl", setting, repeats),
        ]
    return found


def python_of(environment: str) -> str:
    """The interpreter of an environment, which is made where it isn't there."""
    if environment == "burnish":
        return sys.executable
    folder = ROOT / ".venv-peers" / environment
    python = str(folder / "bin" / "python")
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / f"{environment}.txt"], check=True)
        if unwanted := UNWANTED.get(environment):
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *unwanted], check=True)
        (folder / "made").touch()
    return python


def run(side: Side, model: str, scratch: Path) -> dict[str, Any]:
    """What a side says of itself; why it couldn't, where it failed."""
    cache = scratch / "compiled"
    if side.cold:
        shutil.rmtree(cache, ignore_errors=True)  # what it compiles is what the next ones find
    target = scratch / "said.json"
    target.unlink(missing_ok=True)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [python_of(side.environment), str(HERE / side.program), model, str(target), str(side.times), side.setting]
    print("…", side.name, side.program, side.setting, "cold" if side.cold else "", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not target.is_file():
        return {"side": side.name, "setting": side.setting, "failed": done.stderr[-2000:]}
    return json.loads(target.read_text(encoding="utf-8")) | {"cold": side.cold, "program": side.program}


def steps_table(records: list[dict[str, Any]]) -> str:
    """A line for each side that trains: medians over the steps after the first."""
    lines = ["| | s a step | generated tokens/s | trained tokens/s | first step − median | peak GiB |", "|---|---|---|---|---|---|"]
    tokens = PROMPTS * SAMPLES * TOKENS
    for record in (record for record in records if record.get("step_seconds") and not record["cold"]):
        step, sampling = (statistics.median(record[name][1:]) for name in ("step_seconds", "generate_seconds"))
        cells = (f"{record['side']} {record['setting']}", f"{step:.1f}", f"{tokens / sampling:.0f}", f"{tokens / (step - sampling):.0f}")
        lines.append(f"| {' | '.join(cells)} | {record['step_seconds'][0] - step:.1f} s | {record['peak_memory_gib']:.2f} |")
    for record in (record for record in records if record.get("step_seconds") and record["cold"]):
        first, second = record["step_seconds"][:2]
        lines.append(f"| {record['side']} {record['setting']}, nothing compiled yet | | | | {first - second:.1f} s | |")
    return "\n".join(lines)


def generation_table(records: list[dict[str, Any]]) -> str:
    lines = ["| | tokens/s, 32 × 64 | tokens/s, long tail | peak GiB |", "|---|---|---|---|"]
    for record in (record for record in records if "equal_seconds" in record):
        equal, tailed = (statistics.median(record[name][1:] or record[name]) for name in ("equal_seconds", "tailed_seconds"))
        cells = f"{record['side']} {record['setting']} | {PROMPTS * SAMPLES * TOKENS / equal:.0f} | {sum(LENGTHS) / tailed:.0f}"
        lines.append(f"| {cells} | {record['peak_memory_gib']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path("~/.cache/burnish/smollm2-135m").expanduser()))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", metavar="SIDE", help="TRL, Tunix, vLLM, transformers, burnish")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        subprocess.run([sys.executable, HERE / "machine.py", scratch / "machine.json"], check=True)
        machine = json.loads((scratch / "machine.json").read_text(encoding="utf-8"))
        wanted = [side for side in sides(args.steps, args.repeats) if not args.only or side.name in args.only]
        records = [run(side, args.model, scratch) for side in wanted]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv]), "commit": commit, "machine": machine}
    TARGET.write_text(json.dumps(result | {"sides": records}, indent=1) + "\n", encoding="utf-8")
    for record in (record for record in records if "failed" in record):
        print(f"{record['side']} {record['setting']} failed:\n{record['failed']}", file=sys.stderr)
    print(steps_table(records), generation_table(records), sep="\n\n")


if __name__ == "__main__":
    main()
