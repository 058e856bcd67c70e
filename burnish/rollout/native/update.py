"""Weights on their way into the engine: one update at a time, wholly in or not at all.

Owns what was pushed and who waits for it. Runs on the engine's worker; when the weights change, and what becomes of running requests then,
is `engine.py`'s business.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

import jax

from burnish import faults
from burnish.rollout.native.layout import Layout
from burnish.rollout.native.lease import Lease
from burnish.rollout.native.mailbox import settle
from burnish.sync.checksum import Tally


class Update:
    """One version's leaves, and the callers who wait for running requests: to get lent weights back, or to commit."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.leaves: dict[str, Any] = {}
        self.recall: Future[None] | None = None
        self.recalled = False
        self.commit: Future[None] | None = None
        self.checksum: int | None = None

    @property
    def is_awaited(self) -> bool:
        return self.commit is not None or self.recall is not None

    def give_back(self) -> None:
        """Tell who recalled lent weights that they are theirs."""
        if self.recall is not None:
            self.recalled = True
            settle(self.recall, None)
            self.recall = None

    def applied(self, layout: Layout | Lease, dispatch: contextlib.AbstractContextManager[Any]) -> Layout | Lease:
        """The new weights; the old ones are whole beside them. Raises what goes wrong, another checksum than was sent among it."""
        faults.point("engine.commit", version=self.version)
        tally = Tally()
        with dispatch:
            changed = layout.updated(self.leaves, lambda name, array: None if self.checksum is None else tally.add(name, array))
        if self.checksum is not None and (came := tally.total()) != self.checksum:
            raise RuntimeError(
                f"version {self.version} came with the checksum {came} and was sent with {self.checksum}: the old weights stay"
            )
        return jax.block_until_ready(changed)


class Updates:
    """open: the update that was begun. forfeited: one that failed after its recall, so that there is nothing to sample from."""

    def __init__(self) -> None:
        self.open: Update | None = None
        self.forfeited: Update | None = None

    def begin(self, version: int) -> None:
        if self.open is not None:
            raise RuntimeError(f"the update to version {self.open.version} is still open; commit or abort it before {version}")
        self.open = Update(version)

    def push(self, layout: Layout | Lease, name: str, array: Any) -> None:
        """Take one leaf; a bad one ends the update."""
        update = self.opened("push")
        try:
            faults.point("engine.push", leaf=name, version=update.version)
            layout.check(name, array)
        except Exception:
            self.abort()
            raise
        update.leaves[name] = array

    def commit(self, future: Future[None], checksum: int | None) -> None:
        try:
            update = self.opened("commit")
            if not update.leaves:
                raise RuntimeError(f"nothing was pushed for version {update.version}; push the changed leaves, or abort the update")
            update.commit, update.checksum = future, checksum
        except RuntimeError as error:
            settle(future, error)

    def recall(self, future: Future[None]) -> None:
        try:
            self.opened("recall weights for").recall = future
        except RuntimeError as error:
            settle(future, error)

    def opened(self, verb: str) -> Update:
        if self.open is None:
            raise RuntimeError(f"there is no update to {verb}: begin_update wasn't called, or a bad push or an abort ended the update")
        return self.open

    def abort(self) -> None:
        update = self.close()
        if update is None:
            return
        for waiting in (update.commit, update.recall):
            if waiting is not None:
                settle(waiting, RuntimeError(f"the update to version {update.version} was aborted"))
        self.forfeited = update if update.recalled else None

    def close(self) -> Update | None:
        update, self.open = self.open, None
        return update
