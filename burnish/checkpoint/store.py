"""Checkpoints on disk: arrays and a JSON blob, with one commit point, and nothing read that wasn't written whole.

Owns what is under `checkpoints/`: `N/` holds `arrays/` (orbax; named leaves), `extra.json` (cursors, counters, whatever the caller gives)
and `COMMITTED`, which lists every file with its size and digest and is written before the folder gets its name by one rename. So
whatever kills a save, the checkpoint before it is the newest; and a file that was cut, lost or changed later is found before it is used.
A folder with another name (`N.partial`, `N.deleting`, `N.set-aside`) or without `COMMITTED` (a copy that was cut) is no checkpoint. No
pickle anywhere. Of several processes one writes; all read, so they must see the same folder. Doesn't own what is saved (any tree of arrays)
nor when (`saver`).

Fault points (id: step): `save.before_arrays`, `save.after_arrays`, `save.before_commit`, `save.after_commit`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from burnish import faults
from burnish.config.errors import BurnishError
from burnish.sync.reshard import on_host

log = logging.getLogger(__name__)

FORMAT = 1
MARKER = "COMMITTED"
EXTRA = "extra.json"
PARTIAL, DELETING, SET_ASIDE = ".partial", ".deleting", ".set-aside"
FACTS = "facts"
"""Key of `extra` for what must be the same when the run goes on, as plain values."""


class CheckpointError(BurnishError):
    """A checkpoint is missing, unreadable, or of another model, adapter or optimizer."""


class DamagedCheckpoint(CheckpointError):
    """A file of a committed checkpoint isn't as it was written."""


def snapshot(tree: Any, *, keep: bool = True) -> dict[str, np.ndarray]:
    """The leaves by their dotted paths, copied to the host: whatever becomes of the arrays later, these stay as they are now.

    Of arrays of several processes all take part, leaf by leaf; one that doesn't `keep` them gets none.
    """
    copies = {}
    for name, leaf in named_leaves(tree).items():
        copy = on_host(leaf)
        if keep:
            copies[name] = np.array(copy)
    return copies


def write(folder: Path, step: int, arrays: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> Path:
    """Write `arrays` and `extra` (JSON) as checkpoint `step`; it exists, whole, when this returns.

    Raises CheckpointError if that step is already there: a checkpoint is never changed. OSError where the disk refuses.
    """
    folder = folder.absolute()
    final, partial = folder / str(step), folder / f"{step}{PARTIAL}"
    if _is_committed(final):
        raise CheckpointError(f"checkpoint {final} exists already: save later steps, or use another folder")
    for leftover in (partial, final):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    faults.point("save.before_arrays", step=step)
    with _checkpointer() as writer:
        writer.save(partial / "arrays", dict(arrays))
    faults.point("save.after_arrays", step=step)
    _write(partial / EXTRA, json.dumps(extra, allow_nan=False))
    files = {str(path.relative_to(partial)): [path.stat().st_size, _digest(path)] for path in sorted(partial.rglob("*")) if path.is_file()}
    _write(partial / MARKER, json.dumps({"format": FORMAT, "step": step, "files": files}, separators=(",", ":")))
    faults.point("save.before_commit", step=step)
    partial.rename(final)
    _sync(folder)
    faults.point("save.after_commit", step=step)
    shutil.rmtree(folder / f"{step}{SET_ASIDE}", ignore_errors=True)  # what this one replaces
    return final


def committed(folder: Path) -> list[int]:
    """The steps of all committed checkpoints, oldest first."""
    return sorted(int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal() and _is_committed(entry))


def newest_intact(folder: Path) -> int | None:
    """The newest step of which every file is as it was written, None where nothing was ever committed.

    Newer ones that are damaged or were never finished are named in a warning. Raises DamagedCheckpoint where none is left: to start over
    in silence would throw the run away.
    """
    for entry in sorted(folder.glob("*")):
        if entry.name.endswith(PARTIAL) or (entry.name.isdecimal() and not _is_committed(entry)):
            log.warning("%s was never finished: it is ignored", entry)
    damaged = []
    for step in reversed(committed(folder)):
        try:
            verify(folder, step)
        except DamagedCheckpoint as damage:
            log.warning("%s; trying the one before", damage)
            damaged.append(damage)
        else:
            return step
    if damaged:
        raise DamagedCheckpoint(f"no checkpoint in {folder} can be used; the newest: {damaged[0]}")
    return None


def verify(folder: Path, step: int) -> None:
    """Read every file of a committed checkpoint and compare it with what was written. Raises DamagedCheckpoint with the file's name."""
    source = folder / str(step)
    if not _is_committed(source):
        newest = max(committed(folder), default=None)
        raise CheckpointError(f"{source} is no finished checkpoint: the newest in {folder} is {newest}")
    try:
        marker = json.loads((source / MARKER).read_text(encoding="utf-8"))
        found_format, of_step, files = marker["format"], marker["step"], {name: tuple(entry) for name, entry in marker["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{source / MARKER} can't be read ({type(error).__name__}): the checkpoint is damaged") from error
    if found_format != FORMAT:
        raise CheckpointError(f"{source} is of format {found_format!r}, this version of burnish reads {FORMAT}")
    if of_step != step:
        raise DamagedCheckpoint(f"{source} holds the checkpoint of step {of_step}: it was renamed or damaged")
    for name, (size, digest) in files.items():
        path = source / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing: the checkpoint is damaged")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, {size} were written: the checkpoint is damaged")
        if _digest(path) != digest:
            raise DamagedCheckpoint(f"{path} is not what was written (digest): the checkpoint is damaged")


def read_extra(folder: Path, step: int) -> dict[str, Any]:
    """The JSON blob of a checkpoint, unverified."""
    return json.loads((folder / str(step) / EXTRA).read_text(encoding="utf-8"))


def read(folder: Path, step: int, like: Any, *, facts: Mapping[str, Any] = {}) -> tuple[Any, dict[str, Any]]:
    """The tree and the blob of checkpoint `step`, verified; each leaf with the dtype and on the devices of its namesake in `like`.

    like: a tree of arrays, or of `jax.ShapeDtypeStruct` with shardings. facts: what `extra["facts"]` must say.
    Raises CheckpointError that names every fact that is another, and every leaf that is missing, unknown, or of another shape or dtype.
    """
    verify(folder, step)
    source, wanted, extra = folder.absolute() / str(step), named_leaves(like), read_extra(folder, step)
    with _checkpointer() as reader:
        found = reader.metadata(source / "arrays").item_metadata.tree
        if wrong := [*_other_facts(facts, extra.get(FACTS, {})), *_other_leaves(wanted, found)]:
            raise CheckpointError(f"{source} is not of this run; {len(wrong)} differences:\n  " + "\n  ".join(wrong))
        targets = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
        leaves = reader.restore(source / "arrays", targets)
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted]), extra


def set_aside_after(folder: Path, step: int) -> None:
    """Take the names from later checkpoints: the run goes on from `step`, so they belong to a past that didn't happen.

    Each is kept as `N.set-aside` until the run commits that step again.
    """
    for later in committed(folder):
        if later > step:
            aside = folder / f"{later}{SET_ASIDE}"
            shutil.rmtree(aside, ignore_errors=True)
            (folder / str(later)).rename(aside)
            log.warning("the checkpoint of step %d is set aside: the run goes on from step %d and makes it again", later, step)


def delete(folder: Path, step: int) -> None:
    """Remove a checkpoint; killed on the way, it leaves none that looks whole."""
    doomed = folder / f"{step}{DELETING}"
    shutil.rmtree(doomed, ignore_errors=True)
    (folder / str(step)).rename(doomed)
    shutil.rmtree(doomed)


def clean(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted. Only for the owner of the run's lock."""
    for entry in folder.glob("*"):
        if entry.name.endswith((PARTIAL, DELETING)):
            shutil.rmtree(entry)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their dotted paths, in jax's order."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _checkpointer() -> ocp.StandardCheckpointer:
    """One that waits for no other process of the run: the first alone writes, arrays that are on its host; each reads for its devices."""
    if jax.process_count() == 1:
        return ocp.StandardCheckpointer()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}")
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _other_facts(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the checkpoint has {found.get(name)!r}, this run {value!r}" for name, value in wanted.items() if found.get(name) != value
    ]


def _other_leaves(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    wrong = [f"missing from the checkpoint: {name} {_describe(wanted[name])}" for name in sorted(wanted.keys() - found.keys())]
    wrong += [f"only in the checkpoint: {name} {_describe(found[name])}" for name in sorted(found.keys() - wanted.keys())]
    return wrong + [
        f"{name}: the checkpoint has {_describe(found[name])}, this run {_describe(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if _describe(found[name]) != _describe(wanted[name])
    ]


def _describe(leaf: Any) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _is_committed(entry: Path) -> bool:
    return (entry / MARKER).is_file()


def _digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, which are on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
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
