"""Runs what the scheduler says: prefill, decoding, swapping and reuse of pages; hands sampled tokens to the drafts.

Owns the weights in use and their version, the KV memory and the counts of an engine. Called by the engine's worker only, which decides when
(`engine.py`); all state of a request is in its `Job`, so each program's arguments are built anew.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from burnish import faults
from burnish.models.config import ModelConfig
from burnish.observe import trace
from burnish.observe.devices import dispatched
from burnish.observe.trace import span
from burnish.rollout.draft import DecodeText
from burnish.rollout.engine import EngineStats
from burnish.rollout.native.cache import Page
from burnish.rollout.native.decode import decode, prefill
from burnish.rollout.native.host_state import chunk_rows, page_table, slot_state
from burnish.rollout.native.layout import Layout
from burnish.rollout.native.lease import Lease
from burnish.rollout.native.mailbox import settle
from burnish.rollout.native.memory import Memory
from burnish.rollout.native.pool import PAGE, pages_for
from burnish.rollout.native.scheduler import Chunk, Job, Scheduler

_PREFILLS = 4
"""Prefills between two chunks of decoding, where somebody decodes already: long prompts don't stop the others."""


class Limits(NamedTuple):
    """As in `NativeEngine`."""

    context: int
    decode_chunk: int
    max_kept: int


class Runner:
    """layout, version: the weights that programs run with."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout | Lease,
        scheduler: Scheduler,
        memory: Memory,
        limits: Limits,
        *,
        version: int,
        decode_text: DecodeText,
    ) -> None:
        self.layout, self.version, self.memory = layout, version, memory
        self._config, self._scheduler, self._limits, self._decode_text = config, scheduler, limits, decode_text
        self._stop_width = 0
        self._fresh: dict[bytes, Page] = {}  # pages made since nobody waited for any, by name
        self._num_tokens = self._num_prefilled = self._num_reused = self._num_swaps = 0

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            slots=len(scheduler.slots),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.parked),
            kv_bytes=self.memory.num_bytes,
            tokens=self._num_tokens,
            pages=self.memory.pool.taken,
            prefilled=self._num_prefilled,
            reused=self._num_reused,
            swaps=self._num_swaps,
        )

    def renew(self, layout: Layout | Lease, *, version: int, keep: bool) -> None:
        """Other weights: what was computed with the old ones is forgotten. keep: but not what requests that sample already have."""
        self.layout, self.version = layout, version
        if not faults.point("engine.stale_prefix", version=version):
            self.memory.prefixes.clear()
        self._fresh.clear()
        for job in self._scheduler.begun:
            if not (keep and job.ready):
                job.restart()

    def admit(self, *, new: bool) -> None:
        """Seat who may run, and bring swapped pages back. new: not only who was swapped out."""
        for job in self._scheduler.admit(new=new):
            self.memory.fit()
            for index, page in enumerate(job.swapped):
                self._put(page, job, index)
            job.swapped = []

    def _put(self, page: Page, job: Job, index: int) -> None:
        self.memory.put(page, self._scheduler.bank(job.slot), job.pages[index])

    def fill(self) -> None:
        """Prefill what seated jobs lack, some of it if others could decode."""
        limit = _PREFILLS if any(job.ready for job in self._scheduler.running) else None
        count = 0
        while unfilled := self._scheduler.unfilled():
            for job in unfilled:
                self._reuse(job)
            if count == limit or not (chunks := self._scheduler.chunks()):
                return
            self._prefill(chunks)
            count += 1
        self._fresh.clear()

    def _reuse(self, job: Job) -> None:
        """Take the next pages of a job from those that were just made, for others, or kept, as far as there are any."""
        for number in range(job.filled // PAGE, len(job.names)):
            page = self._fresh.get(job.names[number]) or self.memory.prefixes.get(job.names[number])
            if page is None:
                return
            self._put(page, job, number)
            self._num_reused += self._count(job, number)
        self._keep(job)

    def _count(self, job: Job, number: int) -> int:
        """One more page of a job is filled: with so many tokens."""
        before, job.filled = number * PAGE, min((number + 1) * PAGE, job.target)
        return job.filled - before

    def _keep(self, job: Job) -> None:
        """A job is filled: its prompt's pages are kept for others that begin with the same tokens."""
        for name in reversed(job.names):
            page = self._fresh.get(name) or self.memory.prefixes.get(name)
            if page is not None:
                self.memory.keep(name, page)

    def _prefill(self, chunks: list[Chunk]) -> None:
        rows, where = chunk_rows(
            chunks,
            banks=self.memory.banks,
            seats=len(self._scheduler.slots) // self.memory.banks,
            rows=self._scheduler.rows,
            context_pages=pages_for(self._limits.context),
            pages=self.memory.pool.size,
        )
        tokens = sum(self._count(job, number) for job, number in chunks)
        with span("engine.prefill", pages=len(chunks), tokens=tokens, version=self.version):
            start = time.monotonic_ns()
            with self.memory.dispatch:
                self.memory.cache, filled = prefill(
                    self.layout.weights,
                    self.memory.cache,
                    self._placed(rows),
                    config=self._config,
                    precision=self.layout.precision,
                    spread=self.memory.spread,
                )
            dispatched("engine", "prefill", filled, start_ns=start, tokens=tokens, version=self.version)
            jax.block_until_ready(filled)
        self._num_prefilled += tokens
        for (job, number), (bank, row) in zip(chunks, where, strict=True):
            self._fresh[job.names[number]] = self.memory.made(filled, bank, row)
        for job in dict.fromkeys(job for job, _ in chunks if job.ready):
            self._keep(job)

    def decode(self) -> None:
        """A chunk of tokens for all who are ready, the youngest making room where pages run out."""
        while (job := self._scheduler.short_of_pages()) is not None:
            self._swap_out(job)
        self.memory.fit()
        jobs = [job for job in self._scheduler.running if job.ready]
        if not jobs:
            return
        slots = self._scheduler.slots
        state = slot_state(slots, min_stop_ids=self._stop_width)
        self._stop_width = state.stop_ids.shape[1]  # only grows, so that few programs compile
        table = page_table(slots, banks=self.memory.banks, pages=self.memory.pool.size)
        truncates = any(job.draft.request.params.truncates for job in jobs)
        with span("engine.decode", running=len(jobs), waiting=len(self._scheduler.waiting), version=self.version):
            trace.count("engine running", len(jobs))
            trace.count("engine waiting", len(self._scheduler.waiting))
            start = time.monotonic_ns()
            with self.memory.dispatch:
                self.memory.cache, sampled = decode(
                    self.layout.weights,
                    self.memory.cache,
                    self._placed(state),
                    self._placed(table),
                    config=self._config,
                    num_tokens=self._limits.decode_chunk,
                    max_kept=self._limits.max_kept if truncates else 0,
                    precision=self.layout.precision,
                    spread=self.memory.spread,
                )
            dispatched("engine", "decode", sampled[0], start_ns=start, version=self.version)
            ids, logps, kept_ids = map(np.asarray, sampled)
        self._collect(jobs, ids, logps, kept_ids)

    def _swap_out(self, job: Job) -> None:
        bank = self._scheduler.bank(job.slot)
        with span("engine.swap", pages=pages_for(job.filled), version=self.version):
            job.swapped = [self.memory.swapped(bank, page) for page in job.pages[: pages_for(job.filled)]]
        self._scheduler.park(job)
        self._num_swaps += 1

    def _placed(self, arrays: Any) -> Any:
        """Small arrays of a call, spread as the slots or the banks are."""
        if self.memory.spread is None:
            return arrays
        everywhere = jax.sharding.NamedSharding(self.memory.spread.slots.mesh, jax.sharding.PartitionSpec())
        slots = self.memory.spread.slots
        return jax.tree.map(lambda array: jax.device_put(array, slots if array.ndim else everywhere), arrays)

    def _collect(self, jobs: list[Job], ids: np.ndarray, logps: np.ndarray, kept_ids: np.ndarray) -> None:
        """Hand each job its column of [T, S] results; ids are -1 where nothing was sampled."""
        counts = (ids >= 0).sum(0)
        for job in jobs:
            new, slot = slice(0, int(counts[job.slot])), job.slot
            self._num_tokens += new.stop
            job.draft.extend(ids[new, slot], logps[new, slot], kept_ids[new, slot], version=self.version, decode_text=self._decode_text)
            job.filled = job.target
            if job.draft.stop is not None:
                self.finish(job)

    def finish(self, job: Job) -> None:
        self._scheduler.release(job)
        settle(job.future, job.draft.completion())
