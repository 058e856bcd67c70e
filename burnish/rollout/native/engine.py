"""The engine that is part of burnish: continuous batching over fixed slots, on one device or a mesh.

Owns the worker thread and the asynchronous protocol of `rollout.engine`. One thread owns cache, weights and scheduler; coroutines reach it
through a mailbox, which it empties between two compiled programs. Learners, evaluation and `burnish chat` call this.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from burnish import faults
from burnish.models.config import ModelConfig
from burnish.models.sharding import check_mesh
from burnish.models.transformer import Adapter, Params, Precision
from burnish.observe import trace
from burnish.observe.devices import dispatched
from burnish.observe.trace import span
from burnish.rollout.draft import DecodeText
from burnish.rollout.engine import EngineClosed, EngineStats
from burnish.rollout.native.cache import Spread, allocate, capacity_for, resize
from burnish.rollout.native.decode import Slots, decode, prefill
from burnish.rollout.native.host_state import prompt_rows, slot_state
from burnish.rollout.native.layout import Layout
from burnish.rollout.native.lease import Lease
from burnish.rollout.native.mailbox import Mailbox, settle
from burnish.rollout.native.scheduler import Job, Prefill, Scheduler
from burnish.sync.checksum import Tally
from burnish.types import Completion, Request, StopReason

_ALONE = contextlib.nullcontext()


class _Update:
    """Weights on their way in, and the callers who wait for the last running request to finish: to get lent ones back, or to commit."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.leaves: dict[str, Any] = {}
        self.recall: Future[None] | None = None
        self.recalled = False
        self.commit: Future[None] | None = None
        self.checksum: int | None = None


class NativeEngine:
    """Samples with a `ModelConfig` decoder; see `rollout.engine.Engine` for the protocol.

    params, adapter: the first weights. They are copied, but for the base matrices under an adapter (see `layout.Layout`). lent: they
    aren't, and neither is what is pushed (see `lease.Lease`): whoever donates them must `recall` them before; float32, no adapter.
    decode_text: ids → text, for stop strings; called on the worker thread. context: the most tokens of prompt and completion together.
    slots: sequences that decode together. prefill_rows: prompts in one prefill. decode_chunk: tokens between two looks at the queue.
    max_kept: the largest kept set of a truncated distribution. mesh: weights are cut as a trainer's are (`models.sharding`), slots and
    heads spread (`cache.Spread`); None: the first device. dispatch: held while a program is started, where other threads start programs on
    the same devices: all devices must see them in one order.

    Between `begin_update` and its commit or abort new requests wait; running ones finish on the weights they began with.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        adapter: Adapter | None = None,
        lent: bool = False,
        decode_text: DecodeText,
        context: int,
        slots: int = 64,
        prefill_rows: int = 8,
        decode_chunk: int = 16,
        max_kept: int = 512,
        precision: Precision = "f32",
        version: int = 0,
        mesh: Mesh | None = None,
        dispatch: contextlib.AbstractContextManager[Any] = _ALONE,
    ) -> None:
        if not 2 <= context <= config.max_positions:
            raise ValueError(f"context must be between 2 and the model's {config.max_positions} positions, got {context}")
        if mesh is not None:
            check_mesh(config, mesh)
        self._spread = None if mesh is None else Spread.over(mesh, slots=slots)
        self._dispatch = dispatch
        if lent and (adapter is not None or precision != "f32"):
            raise ValueError(
                "weights can be lent in float32 and without an adapter only: the engine merges the one and rounds for the other"
            )
        with dispatch:
            self._layout: Layout | Lease = (
                Lease.of(config, params, mesh=mesh) if lent else Layout.build(config, params, adapter, precision=precision, mesh=mesh)
            )
        place = SingleDeviceSharding(jax.local_devices()[0]) if self._spread is None else self._spread.cache
        self._cache = allocate(config, slots=slots, capacity=capacity_for(1), precision=precision, place=place)
        self._scheduler = Scheduler(slots=slots, prefill_rows=prefill_rows, context=context)
        self._config, self._mesh, self._version, self._decode_text = config, mesh, version, decode_text
        self._context, self._prefill_rows, self._decode_chunk, self._max_kept = context, prefill_rows, decode_chunk, max_kept
        self._stop_width = 0
        self._num_tokens = 0
        self.lent = lent
        self._update: _Update | None = None
        self._forfeited: _Update | None = None  # failed after its recall
        self._mailbox = Mailbox()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="native-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------------- the protocol

    @property
    def version(self) -> int:
        return self._version

    @property
    def mesh(self) -> Mesh | None:
        return self._mesh

    async def generate(self, request: Request) -> Completion:
        job = Job.make(request, context=self._context)
        self._mailbox.post(job.future, partial(self._scheduler.waiting.append, job))
        return await asyncio.wrap_future(job.future)

    async def cancel(self, request: Request) -> None:
        """End this request with what it has sampled so far (stop reason `cancelled`); its slot is free afterwards."""

        def action() -> None:
            for job in self._scheduler.find(request):
                job.draft.stop = StopReason.CANCELLED
                self._finish(job)

        await self._mailbox.ask(action)

    async def begin_update(self, version: int) -> None:
        def action() -> None:
            if self._update is not None:
                raise RuntimeError(f"the update to version {self._update.version} is still open; commit or abort it before {version}")
            self._update = _Update(version)

        await self._mailbox.ask(action)

    async def push(self, name: str, array: Any) -> None:
        """Hand in one leaf; leaves that aren't pushed keep their value. A bad one ends the update: the old weights stay as a whole."""

        def action() -> None:
            update = self._opened("push")
            try:
                faults.point("engine.push", leaf=name, version=update.version)
                self._layout.check(name, array)
            except Exception:
                self._abort()
                raise
            update.leaves[name] = array

        await self._mailbox.ask(action)

    async def commit_update(self, checksum: int | None = None) -> None:
        """Wait until the running requests have finished, then swap the weights. The pushed arrays aren't needed afterwards, unless lent.

        checksum: `sync.checksum` of what was pushed; if what came has another, the update fails and the old weights stay.
        """
        future: Future[None] = Future()

        def action() -> None:
            try:
                update = self._opened("commit")
                if not update.leaves:
                    raise RuntimeError(f"nothing was pushed for version {update.version}; push the changed leaves, or abort the update")
                update.commit, update.checksum = future, checksum
            except RuntimeError as error:
                settle(future, error)

        self._mailbox.post(future, action)
        await asyncio.wrap_future(future)

    async def recall(self) -> None:
        """Wait until the running requests have finished; lent weights are the lender's again then. Within an update, before its commit,
        which must follow: the engine has nothing to fall back on."""
        future: Future[None] = Future()

        def action() -> None:
            try:
                self._opened("recall weights for").recall = future
            except RuntimeError as error:
                settle(future, error)

        self._mailbox.post(future, action)
        await asyncio.wrap_future(future)

    async def abort_update(self) -> None:
        await self._mailbox.ask(self._abort)

    def stats(self) -> EngineStats:
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache)
        return EngineStats(len(self._scheduler.slots), running, waiting, kv_bytes, self._num_tokens)

    async def close(self) -> None:
        """Stop after the program that is running. Callers that wait get `EngineClosed`. Closing twice is fine."""
        self._closing = True
        self._mailbox.wake()
        while self._thread.is_alive():
            await asyncio.sleep(0.002)
        self._thread.join()

    # ---------------------------------------------------------------------------------------------------------- on the worker

    def _work(self) -> None:
        ending: BaseException = EngineClosed("the engine was closed")
        try:
            while not self._closing:
                self._step()
        except BaseException as error:
            ending = error
        self._mailbox.end(ending)

    def _step(self) -> None:
        """Listen, let go of whom nobody waits for, change weights when drained, admit, decode a chunk."""
        self._mailbox.listen(wait=not self._busy())
        faults.point("engine.step", version=self._version)
        for job in self._scheduler.forsaken():
            self._scheduler.release(job)
        self._apply_update()
        if self._forfeited is not None:
            version = self._forfeited.version
            raise RuntimeError(f"lent weights were recalled for version {version}, whose update failed: there is nothing to sample from")
        idle = not self._scheduler.running
        while self._update is None and (plans := self._scheduler.admit()):
            self._fit(shrink=idle)
            for plan in plans:
                self._prefill(plan)
        if self._scheduler.running:
            self._fit(shrink=False)
            self._decode()

    def _busy(self) -> bool:
        """Whether there is something to do that nobody needs to ask for."""
        if self._update is None:
            return bool(self._scheduler.running or self._scheduler.waiting)
        return bool(self._scheduler.running) or self._update.commit is not None or self._update.recall is not None  # nobody is admitted

    def _apply_update(self) -> None:
        update = self._update
        if update is None or self._scheduler.running:
            return
        if update.recall is not None:
            update.recalled = True
            settle(update.recall, None)
            update.recall = None
        if update.commit is None:
            return
        self._update = None
        try:
            faults.point("engine.commit", version=update.version)
            tally = Tally()
            with self._dispatch:
                layout = self._layout.updated(
                    update.leaves, lambda name, array: None if update.checksum is None else tally.add(name, array)
                )
            if update.checksum is not None and (came := tally.total()) != update.checksum:
                raise RuntimeError(
                    f"version {update.version} came with the checksum {came} and was sent with {update.checksum}: the old weights stay"
                )
            self._layout = jax.block_until_ready(layout)
        except Exception as error:
            settle(update.commit, error)
            self._forfeited = update if update.recalled else None
            return
        self._version = update.version
        settle(update.commit, None)

    def _opened(self, verb: str) -> _Update:
        if self._update is None:
            raise RuntimeError(f"there is no update to {verb}: begin_update wasn't called, or a bad push or an abort ended the update")
        return self._update

    def _abort(self) -> None:
        update, self._update = self._update, None
        if update is None:
            return
        for waiting in (update.commit, update.recall):
            if waiting is not None:
                settle(waiting, RuntimeError(f"the update to version {update.version} was aborted"))
        self._forfeited = update if update.recalled else None

    def _fit(self, *, shrink: bool) -> None:
        """Give the cache room for what may be written before the next look at the queue; an idle engine may also give room back."""
        capacity = capacity_for(self._scheduler.reach(self._decode_chunk))
        current = self._cache[0].keys.shape[-1]
        if capacity > current or (shrink and capacity < current):
            with self._dispatch:
                self._cache = resize(self._cache, capacity=capacity, spread=self._spread)

    def _prefill(self, plan: Prefill) -> None:
        jobs = [(slot, self._scheduler.seated(slot)) for targets in plan.targets for slot in targets]
        rows = prompt_rows(plan, num_rows=self._prefill_rows, num_slots=len(self._scheduler.slots))
        with span("engine.prefill", length=plan.length, prompts=len(plan.prompts), requests=len(jobs), version=self._version):
            start = time.monotonic_ns()
            with self._dispatch:
                self._cache, sampled = prefill(self._layout.weights, self._cache, *rows, self._slots(), **self._options(jobs))
            dispatched("engine", "prefill", sampled[0], start_ns=start, length=plan.length, version=self._version)
            ids, logps, kept_ids = map(np.asarray, sampled)
        self._collect(jobs, ids[None], logps[None], kept_ids[None])

    def _decode(self) -> None:
        jobs = self._scheduler.running
        with span("engine.decode", running=len(jobs), waiting=len(self._scheduler.waiting), version=self._version):
            trace.count("engine running", len(jobs))
            trace.count("engine waiting", len(self._scheduler.waiting))
            options = self._options(jobs) | {"num_tokens": self._decode_chunk}
            start = time.monotonic_ns()
            with self._dispatch:
                self._cache, sampled = decode(self._layout.weights, self._cache, self._slots(), **options)
            dispatched("engine", "decode", sampled[0], start_ns=start, version=self._version)
            ids, logps, kept_ids = map(np.asarray, sampled)
        self._collect(jobs, ids, logps, kept_ids)

    def _slots(self) -> Slots:
        """The device's view of every slot. The room for stop ids only grows, so that few programs compile."""
        state = slot_state(self._scheduler.slots, min_stop_ids=self._stop_width)
        self._stop_width = state.stop_ids.shape[1]
        return state if self._spread is None else jax.device_put(state, self._spread.slots)

    def _options(self, jobs: list[tuple[int, Job]]) -> dict[str, Any]:
        """What both programs are compiled for; the one for truncated distributions only where some job needs it."""
        truncates = any(job.draft.request.params.truncates for _, job in jobs)
        return {
            "config": self._config,
            "max_kept": self._max_kept if truncates else 0,
            "precision": self._layout.precision,
            "spread": self._spread,
        }

    def _collect(self, jobs: list[tuple[int, Job]], ids: np.ndarray, logps: np.ndarray, kept_ids: np.ndarray) -> None:
        """Hand each job its column of [N, S] results; ids are -1 where nothing was sampled."""
        counts = (ids >= 0).sum(0)
        for slot, job in jobs:
            new = slice(0, int(counts[slot]))
            self._num_tokens += new.stop
            job.draft.extend(ids[new, slot], logps[new, slot], kept_ids[new, slot], version=self._version, decode_text=self._decode_text)
            if job.draft.stop is not None:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        self._scheduler.release(job)
        settle(job.future, job.draft.completion())
