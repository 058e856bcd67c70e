"""From the scheduler's jobs to the arrays that the compiled programs take: built anew for each call, so nothing can go stale."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from burnish.rollout.native.cache import Table
from burnish.rollout.native.decode import Rows, Slots
from burnish.rollout.native.pool import PAGE
from burnish.rollout.native.sample import Rules
from burnish.rollout.native.scheduler import Chunk, Job


def slot_state(jobs: Sequence[Job | None], *, min_stop_ids: int) -> Slots:
    """The state of every slot, from its job; active are those that are ready. Stop ids get room in steps of 8, `min_stop_ids` at least."""
    size = len(jobs)
    tokens, positions, remaining, indices = (np.zeros(size, np.int32) for _ in range(4))
    active, keys = np.zeros(size, bool), np.zeros((size, 2), np.uint32)
    most = max((len(job.draft.request.params.stop_ids) for job in jobs if job is not None), default=0)
    stop_ids = np.full((size, max(min_stop_ids, 8 * -(-most // 8), 8)), -1, np.int32)
    rules = (np.ones(size, np.float32), np.zeros(size, np.int32), np.ones(size, np.float32), np.zeros(size, np.float32))
    for slot, job in enumerate(jobs):
        if job is None or not job.ready:
            continue
        draft, params = job.draft, job.draft.request.params
        tokens[slot] = draft.ids[-1] if draft.ids else draft.request.prompt_ids[-1]
        positions[slot] = job.target
        remaining[slot], indices[slot] = draft.budget - len(draft.ids), len(draft.ids)
        active[slot], keys[slot] = True, job.key
        stop_ids[slot, : len(params.stop_ids)] = params.stop_ids
        for column, value in zip(rules, (params.temperature, params.top_k, params.top_p, params.min_p), strict=True):
            column[slot] = value
    columns = (tokens, positions, active, remaining, indices, keys, stop_ids)
    return Slots(*map(jnp.asarray, columns), rules=Rules(*map(jnp.asarray, rules)))


def page_table(jobs: Sequence[Job | None], *, banks: int, pages: int) -> Table:
    """Who owns which of the pool's pages. As wide as the longest needs, in powers of two."""
    seats = len(jobs) // banks
    longest = max((len(job.pages) for job in jobs if job is not None), default=1)
    of_slots = np.full((len(jobs), max(2, 1 << (longest - 1).bit_length())), -1, np.int32)
    owners, starts = np.full((banks, pages), -1, np.int32), np.zeros((banks, pages), np.int32)
    for slot, job in enumerate(jobs):
        if job is None or not job.ready:
            continue
        of_slots[slot, : len(job.pages)] = job.pages
        owners[slot // seats, job.pages] = slot % seats
        starts[slot // seats, job.pages] = PAGE * np.arange(len(job.pages))
    return Table(*map(jnp.asarray, (of_slots, owners, starts)))


def chunk_rows(
    chunks: Sequence[Chunk], *, banks: int, seats: int, rows: int, context_pages: int, pages: int
) -> tuple[Rows, list[tuple[int, int]]]:
    """The arrays of one prefill, and in which bank and row each chunk stands. seats: slots of a bank; pages: of a bank."""
    tokens = np.zeros((banks, rows, PAGE), np.int32)
    starts, places = np.zeros((banks, rows), np.int32), np.full((banks, rows), pages, np.int32)
    of_rows = np.full((banks, rows, context_pages), -1, np.int32)
    where: list[tuple[int, int]] = []
    used = [0] * banks
    for job, index in chunks:
        bank = job.slot // seats
        row, used[bank] = used[bank], used[bank] + 1
        where.append((bank, row))
        ids = job.tokens[:-1][index * PAGE : (index + 1) * PAGE]
        tokens[bank, row, : len(ids)] = ids
        starts[bank, row], places[bank, row] = index * PAGE, job.pages[index]
        of_rows[bank, row, : index + 1] = job.pages[: index + 1]
    count = np.int32(max(index + 1 for _, index in chunks))
    return Rows(*map(jnp.asarray, (tokens, starts, places, of_rows, count))), where
