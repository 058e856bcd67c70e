"""Whether a configuration goes on with the run in a folder: which keys may have changed since, and which make it another run.

Owns the list of what may change. Reads only; `train` calls it before anything else is opened.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.checkpoint.store import committed
from burnish.cli.options import AnyConfig
from burnish.config import secrets
from burnish.config.errors import UserError
from burnish.config.layers import items, join
from burnish.config.loader import Resolved, load
from burnish.config.tuning import RunConfig
from burnish.observe.run_folder import read_status

MAY_CHANGE = (
    # how long, and what is seen and kept of it
    *("training.max_steps", "training.eval_every", "training.compare", "checkpoint.*", "observe.*", "run.folder", "run.name", "data.eval*"),
    # what "auto" comes to is compared with the checkpoint
    "model.precision",
    # where and in which portions the same sums are made: equal but for rounding
    *("cluster.*", "rollout.options.*", "rollout.slots", "rollout.prefill_rows", "rollout.decode_chunk", "rollout.evaluation.*"),
    *("training.train_micro_batch_size", "training.tokens_per_device", "training.compute_logps_micro_batch_size"),
    *("training.rollout_micro_batch_size", "training.remat", "training.head_chunk", "reward_model.micro_batch_size"),
)
"""Patterns of keys that a run that goes on may set otherwise. All others make another run."""
PLACES = frozenset({"path", "recipe", "fn", "env", "agent", "engine"})
"""Keys that name a file: another folder of the same file is the same run, moved."""


def check_same_run(run: Path, resolved: Resolved[AnyConfig], *, step: int | None) -> list[str]:
    """What has changed since the run in `run` was started, one line each, for people to see.

    resolved: with its files anchored, as the kept one is. step: the one to go on from, None for the newest. Raises UserError that names
    every change that makes it another run, and where the checkpoint isn't there or is beyond the end.
    """
    kept = run / "config.yaml"
    if not kept.is_file():  # killed before it wrote one: nothing was made yet
        return []
    _check_step(run, resolved.config, step)
    old, new = _values(_kept(run, resolved.config)), _values(resolved.config)
    allowed, refused = [], []
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        line = f"{key}: was {before!r}, is {now!r}"
        moved = key.rpartition(".")[2] in PLACES and Path(str(before)).name == Path(str(now)).name
        (allowed if moved or any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_CHANGE) else refused).append(line)
    stretched = any(line.startswith("training.max_steps:") for line in allowed)
    if stretched and resolved.config.training.optimizer.schedule != "constant":
        allowed.append("the schedule's end: learning rates from here on are those of a run of the new length, not of the old one")
    if refused:
        raise UserError(
            f"the run in {run} was started with other settings, and would be another run with these:\n  "
            + "\n  ".join(refused)
            + f"\nto go on, set them as they were (they are in {kept}); to change them, start a new run under another run.name"
        )
    return allowed


def _check_step(run: Path, config: RunConfig, step: int | None) -> None:
    saved = committed(run / "checkpoints")
    listed = ", ".join(map(str, saved)) or "none"
    if step is not None and step not in saved:
        raise UserError(f"there is no checkpoint of step {step} in {run}; kept are {listed}")
    if not saved and _has_saved(run):
        raise UserError(
            f"the run in {run} has saved checkpoints, but none is left in {run / 'checkpoints'}: put them back, or start a new run under "
            "another run.name; to start this one over, delete its folder"
        )
    if saved and config.training.max_steps < (step or saved[-1]):
        raise UserError(
            f"training.max_steps is {config.training.max_steps}, and the run in {run} has made {step or saved[-1]} steps: ask for more, or "
            f"go on from an earlier one with --resume=STEP (kept are {listed})"
        )


def _has_saved(run: Path) -> bool:
    """Whether this run ever committed a checkpoint, by its other files."""
    rows = run / "metrics.jsonl"
    if rows.is_file() and '"checkpoint/saves"' in rows.read_text(encoding="utf-8"):
        return True
    status = run / "status.json"
    return status.is_file() and (read_status(run)["state"] == "complete" or "is saved" in read_status(run).get("cause", ""))


def is_complete(run: Path, config: RunConfig) -> bool:
    """Whether the run in `run` has done all that `config` asks for."""
    if not (run / "status.json").is_file() or read_status(run)["state"] != "complete":
        return False
    return _kept(run, config).training.max_steps >= config.training.max_steps


def _kept(run: Path, config: RunConfig) -> RunConfig:
    """The configuration that the run was started with. It holds no secrets: they are taken from `config`."""
    given = [f"{path}={value}" for path, value in secrets.secrets(config.model_dump()) if isinstance(value, str)]
    return load(type(config), run / "config.yaml", given, {}).config


def _values(config: RunConfig) -> Mapping[str, Any]:
    """Every scalar and empty collection by its dotted path."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        inner = items(value)
        if not inner and path:
            yield path, value
        for key, item in inner:
            yield from walk(item, join(path, key))

    return dict(walk(config.model_dump(), ""))
