"""Save and restore one step of training: arrays and a JSON blob, with one commit point.

Owns what is on disk under `checkpoints/`: `N/` holds `arrays/` (orbax; named leaves), `extra.json` (cursors, counters, whatever the caller
gives) and `COMMITTED`, written before the folder gets its name by one rename. So whatever kills a save, `latest` sees the one before:
a folder that has another name, or that lacks the marker (a copy that was cut), is no checkpoint. No pickle anywhere.
Doesn't own what is saved: the caller gives any tree (the trainable leaves, the optimizer's state, counters).

Fault points: `save.after_arrays`, `save.before_commit` (id: step).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from burnish import faults
from burnish.config.errors import BurnishError

MARKER = "COMMITTED"


class CheckpointError(BurnishError):
    """A checkpoint is missing, unreadable, or of another model, adapter or optimizer."""


def save(folder: Path, step: int, state: Any, extra: dict[str, Any]) -> Path:
    """Write `state` (a tree of arrays) and `extra` (JSON) as checkpoint `step`; it exists, whole, when this returns.

    Raises CheckpointError if that step is already there: a checkpoint is never changed.
    """
    folder = folder.absolute()
    final, partial = folder / str(step), folder / f"{step}.partial"
    if _is_committed(final):
        raise CheckpointError(f"checkpoint {final} exists already: save later steps, or use another folder")
    for leftover in (partial, final):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    with ocp.StandardCheckpointer() as writer:
        writer.save(partial / "arrays", _named_leaves(state))
    faults.point("save.after_arrays", step=step)
    _write(partial / "extra.json", json.dumps(extra, allow_nan=False))
    _write(partial / MARKER, "")
    faults.point("save.before_commit", step=step)
    partial.rename(final)
    _sync(folder)
    return final


def latest(folder: Path) -> int | None:
    """The newest committed step, None where there is none."""
    committed = [int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal() and _is_committed(entry)]
    return max(committed, default=None)


def restore(folder: Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The tree and the blob of checkpoint `step`, each leaf with the dtype and on the devices of its namesake in `like`.

    Raises CheckpointError that names every leaf that is missing, unknown, or of another shape or dtype.
    """
    source = folder.absolute() / str(step)
    if not _is_committed(source):
        raise CheckpointError(f"{source} is no finished checkpoint: the newest in {folder} is {latest(folder)}")
    wanted = _named_leaves(like)
    with ocp.StandardCheckpointer() as reader:
        found = reader.metadata(source / "arrays").item_metadata.tree
        _check(source, wanted, found)
        targets = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
        leaves = reader.restore(source / "arrays", targets)
    extra = json.loads((source / "extra.json").read_text())
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted]), extra


def _check(source: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    wrong = [f"missing from the checkpoint: {name} {_describe(wanted[name])}" for name in sorted(wanted.keys() - found.keys())]
    wrong += [f"only in the checkpoint: {name} {_describe(found[name])}" for name in sorted(found.keys() - wanted.keys())]
    wrong += [
        f"{name}: the checkpoint has {_describe(found[name])}, this run {_describe(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if _describe(found[name]) != _describe(wanted[name])
    ]
    if wrong:
        raise CheckpointError(
            f"{source} doesn't fit this model, adapter and optimizer; {len(wrong)} leaves differ:\n  " + "\n  ".join(wrong)
        )


def _describe(leaf: Any) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _named_leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _is_committed(entry: Path) -> bool:
    return (entry / MARKER).is_file()


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
