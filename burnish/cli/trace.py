"""`burnish trace RUN`: where the time of a run went, who waited for whom, and which setting to change. Works while the run goes on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.observe.bottlenecks import Bottlenecks, Calls

BAR = 24


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", help="where a run's time went, and what to change", description=__doc__)
    parser.add_argument("folder", metavar="RUN", help="a run's folder, e.g. runs/first")
    parser.add_argument("--json", action="store_true", help="the numbers, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from burnish.observe.bottlenecks import analyse
    from burnish.observe.run_files import read_config, run_path
    from burnish.observe.trace_reader import read

    folder = run_path(args.folder)
    found = analyse(read(folder / "trace.pftrace"), read_config(folder))
    if args.json:
        print(json.dumps(dataclasses.asdict(found) | {"findings": [finding._asdict() for finding in found.findings]}, indent=1))
    else:
        print("\n".join(lines(found, folder)))
    return 0


def lines(found: Bottlenecks, folder: Path) -> list[str]:
    """The analysis in words, for a terminal or a log."""
    trainer = dict(found.trainer)
    wait = trainer.pop("wait")
    out = [f"{folder}: {found.steps} steps of {found.step_s:.2f} s (median); the first step, which compiles, is left out", ""]
    out.append(_role("trainer", 1 - wait, f"{_shares(trainer)}"))
    return out + (_of_sampling(found, wait) if found.samples else [""]) + _ending(found)


def _of_sampling(found: Bottlenecks, wait: float) -> list[str]:
    rollout, out = found.rollout, [f"{'':>12} waits {_percent(wait)}{_for(found.waits_for)}"]
    out.append(_role("rollout", rollout["rollout"] + rollout["data"] + rollout["batch"], _shares({k: rollout[k] for k in WORK})))
    out.append(f"{'':>12} waits {_percent(rollout['gate.wait'])} for new weights, {_percent(rollout['queue.put'])} for room in the queue")
    out.append(_role("engine", found.engine_busy, f"{found.slots_used:.1f} requests in its slots while it computes"))
    out.append("")
    out += [_calls(name, calls, found.steps) for name, calls in _kinds(found) if calls.count]
    if found.hidden is not None:
        out.append(
            f"{_percent(found.hidden)} of the time of environments and tools is hidden: the engine or the trainer computes meanwhile"
        )
    out.append(f"stragglers: for {_percent(found.tail)} of a rollout at most a tenth of its episodes still plays")
    out.append(f"queue: {found.queue:.2f} batches wait on average; sync: {found.sync_s:.3f} s a step")
    return out


def _ending(found: Bottlenecks) -> list[str]:
    out = [f"a step: {' → '.join(f'{name} {seconds:.3f}' for name, seconds in found.path if seconds >= 0.005 * found.step_s)} s", ""]
    if not found.alarms:
        out.append("nothing stands out")
    out += [f"{'!' if finding.alarm else '·'} {finding.name}: {finding.text}" for finding in found.findings]
    return out


WORK = ("rollout", "data", "batch")


def _kinds(found: Bottlenecks) -> list[tuple[str, Calls]]:
    return [("environments", found.environment), ("tools", found.tools), ("rewards", found.rewards)]


def _role(name: str, busy: float, detail: str) -> str:
    filled = round(min(max(busy, 0.0), 1.0) * BAR)
    return f"{name:>12} {'█' * filled}{'░' * (BAR - filled)} {_percent(busy):>5} busy: {detail}"


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if share >= 0.005) or "–"


def _for(waits: Any) -> str:
    named = {("hand-over" if name == "other" else name): share for name, share in waits.items() if share >= 0.005}
    return f", while this went on: {_shares(named)}" if named else ""


def _calls(name: str, calls: Calls, steps: int) -> str:
    each = f"median {1000 * calls.median_s:.0f} ms, p95 {1000 * calls.p95_s:.0f} ms"
    return f"{name}: {calls.count / steps:.0f} calls a step, {calls.seconds / steps:.2f} s together; {each}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


__all__ = ["add_parser", "lines", "run"]
