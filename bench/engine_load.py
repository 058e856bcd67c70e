"""What continuous batching is worth, on SmolLM2-135M: a long-tailed list of lengths against static batches at equal memory, slots that
never idle while requests wait, tokens a second at 1 to 64 concurrent requests, and how many programs an engine compiles.

    python bench/engine_load.py [--precision bf16]

Ratios are of runs that alternate in one process; the trace is read for the slots. Writes bench/baselines/engine_load.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from burnish.models.locate import locate
from burnish.models.weights import load
from burnish.observe import trace
from burnish.rollout.native.engine import NativeEngine
from burnish.train.compiles import programs_compiled
from burnish.types import Request, SamplingParams

TARGET = Path(__file__).parent / "baselines" / "engine_load.json"
LENGTHS = (
    *(18, 28, 12, 44, 22, 192, 34, 16, 62, 24, 14, 38, 20, 88, 26, 32),
    *(50, 16, 22, 30, 176, 18, 12, 56, 28, 20, 74, 24, 36, 14, 42, 26),
    *(24, 12, 66, 20, 32, 40, 16, 104, 22, 28, 18, 192, 48, 26, 14, 30),
    *(36, 22, 54, 18, 26, 14, 184, 20, 80, 32, 16, 24, 44, 12, 28, 60),
)
"""Tokens of 64 completions, four to a prompt: most are short, one in sixteen is not."""
SLOTS, CHUNK, MOST_PROGRAMS = 16, 8, 24


def requests(lengths: Sequence[int]) -> list[Request]:
    return [Request(tuple(range(100 + i // 4, 140 + i // 4)), SamplingParams(length), (i,)) for i, length in enumerate(lengths)]


async def at_once(engine: NativeEngine, asked: Sequence[Request]) -> int:
    return sum(len(out.ids) for out in await asyncio.gather(*(engine.generate(one) for one in asked)))


async def in_batches(engine: NativeEngine, asked: Sequence[Request]) -> int:
    """As an engine without continuous batching: a batch ends when its longest row does."""
    return sum([await at_once(engine, asked[start : start + SLOTS]) for start in range(0, len(asked), SLOTS)])


def tokens_per_second(work: Any) -> float:
    start = time.perf_counter()
    count = asyncio.run(work)
    return count / (time.perf_counter() - start)


def idle_while_waiting(spans: Sequence[Any]) -> int:
    """The most decoding chunks in a row in which requests waited and a slot was free."""
    longest = run = 0
    for span in spans:
        if span.name == "engine.decode":
            run = run + 1 if span.ids["waiting"] and span.ids["running"] < SLOTS else 0
            longest = max(longest, run)
    return longest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what else ran on the machine, say")
    args = parser.parse_args()
    config, params = load(locate("smollm2-135m"))
    options: dict[str, Any] = {"decode_text": str, "context": 256, "precision": args.precision, "decode_chunk": CHUNK}
    engine = NativeEngine(config, params, slots=SLOTS, prefill_rows=4, **options)
    before = programs_compiled()
    asked, continuous, static = requests(LENGTHS), [], []
    asyncio.run(at_once(engine, asked[:20]))  # compiles
    trace.take()
    idle = 0
    for _ in range(args.rounds):
        continuous.append(tokens_per_second(at_once(engine, asked)))
        idle = max(idle, idle_while_waiting(trace.take()))
        static.append(tokens_per_second(in_batches(engine, asked)))
        trace.take()
    kv_bytes = engine.stats().kv_bytes
    asyncio.run(engine.close())
    compiled = [programs_compiled() - before]
    wide = NativeEngine(config, params, slots=64, prefill_rows=8, **options)
    del params
    asyncio.run(at_once(wide, requests([8] * 64)))
    concurrent = {n: [tokens_per_second(at_once(wide, requests([24] * n))) for _ in range(args.rounds)] for n in (1, 4, 16, 64)}
    asyncio.run(wide.close())
    compiled.append(programs_compiled() - before - compiled[0])
    record = {
        "what": "continuous batching of the native engine on SmolLM2-135M: 64 completions of a long-tailed list of lengths in 16 slots",
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "precision": args.precision,
        "note": args.note,
        "kv_bytes": kv_bytes,
        "continuous_tokens_per_second": continuous,
        "static_tokens_per_second": static,
        "continuous_over_static": statistics.median(continuous) / statistics.median(static),
        "most_chunks_with_an_idle_slot_while_requests_wait": idle,
        "tokens_per_second_at": concurrent,
        "64_over_1": statistics.median(concurrent[64]) / statistics.median(concurrent[1]),
        "programs_compiled_by_each_engine": compiled,
        "at_most": MOST_PROGRAMS,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    if max(compiled) > MOST_PROGRAMS:
        raise SystemExit(f"an engine compiled {max(compiled)} programs, and {MOST_PROGRAMS} were to be enough")


if __name__ == "__main__":
    main()
