"""The engine that is part of burnish: continuous batching over fixed slots and a paged KV cache, on one device or a mesh.

Owns the worker thread and the asynchronous protocol of `rollout.engine`. One thread owns cache, weights and scheduler; coroutines reach it
through a mailbox, which it empties between two compiled programs. Learners, evaluation and `burnish chat` call this. `docs/engine.md` says
how it works and what is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from jax.sharding import Mesh

from burnish import faults
from burnish.models.config import ModelConfig
from burnish.models.sharding import check_mesh
from burnish.models.transformer import Adapter, Params, Precision
from burnish.rollout.draft import DecodeText
from burnish.rollout.engine import EngineClosed, EngineStats
from burnish.rollout.native.cache import Spread
from burnish.rollout.native.layout import Layout
from burnish.rollout.native.lease import Lease
from burnish.rollout.native.mailbox import Mailbox, settle
from burnish.rollout.native.memory import Memory, budget_pages
from burnish.rollout.native.runner import Limits, Runner
from burnish.rollout.native.scheduler import Job, Scheduler
from burnish.rollout.native.update import Updates
from burnish.types import Completion, Request, StopReason

InFlight = Literal["finish", "recompute", "keep"]
_ALONE = contextlib.nullcontext()
_PREFILLS = 4
"""Prefills between two chunks of decoding, where somebody decodes already: long prompts don't stop the others."""


class NativeEngine:
    """Samples with a `ModelConfig` decoder; see `rollout.engine.Engine` for the protocol.

    params, adapter: the first weights. They are copied, but for the base matrices under an adapter (see `layout.Layout`). lent: they
    aren't, and neither is what is pushed (see `lease.Lease`): whoever donates them must `recall` them before; float32, no adapter.
    decode_text: ids → text, for stop strings; called on the worker thread. context: the most tokens of prompt and completion together.
    slots: sequences that decode together. prefill_rows: pages of prompts in one prefill. decode_chunk: tokens between two looks at the
    queue. max_kept: the largest kept set of a truncated distribution. kv_cache_bytes: most bytes of keys and values on each device; None:
    whole contexts for all slots, and half as much for kept prefixes. in_flight: what becomes of running requests when weights change: they
    `finish` on the old ones and the update waits; or go on under the new ones, what they have so far prefilled again (`recompute`) or left
    as it is (`keep`: no longer what any one version would compute). mesh: weights are cut as a trainer's are (`models.sharding`), slots and
    heads spread (`cache.Spread`); None: the first device. dispatch: held while a program is started, where other threads start programs on
    the same devices: all devices must see them in one order.

    Between `begin_update` and its commit or abort new requests wait.
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
        kv_cache_bytes: int | None = None,
        in_flight: InFlight = "finish",
        precision: Precision = "f32",
        version: int = 0,
        mesh: Mesh | None = None,
        dispatch: contextlib.AbstractContextManager[Any] = _ALONE,
    ) -> None:
        if not 2 <= context <= config.max_positions:
            raise ValueError(f"context must be between 2 and the model's {config.max_positions} positions, got {context}")
        if mesh is not None:
            check_mesh(config, mesh)
        if lent and (adapter is not None or precision != "f32"):
            raise ValueError(
                "weights can be lent in float32 and without an adapter only: the engine merges the one and rounds for the other"
            )
        if lent and in_flight != "finish":
            raise ValueError(f"in_flight is {in_flight}, but lent weights can't change under running requests: these must finish")
        spread = None if mesh is None else Spread.over(mesh, slots=slots)
        budget = budget_pages(config, slots=slots, context=context, num_bytes=kv_cache_bytes, precision=precision, spread=spread)
        with dispatch:
            layout = Lease.of(config, params, mesh=mesh) if lent else Layout.build(config, params, adapter, precision=precision, mesh=mesh)
        memory = Memory(config, slots=slots, context=context, budget=budget, precision=precision, spread=spread, dispatch=dispatch)
        self._scheduler = Scheduler(slots=slots, rows=-(-prefill_rows // memory.banks), decode_chunk=decode_chunk, pool=memory.pool)
        limits = Limits(context=context, decode_chunk=decode_chunk, max_kept=max_kept)
        self._runner = Runner(config, layout, self._scheduler, memory, limits, version=version, decode_text=decode_text)
        self._mesh, self._context, self._in_flight = mesh, context, in_flight
        self.lent = lent
        self._updates = Updates()
        self._mailbox = Mailbox()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="native-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------------- the protocol

    @property
    def version(self) -> int:
        return self._runner.version

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
                self._runner.finish(job)

        await self._mailbox.ask(action)

    async def begin_update(self, version: int) -> None:
        await self._mailbox.ask(partial(self._updates.begin, version))

    async def push(self, name: str, array: Any) -> None:
        """Hand in one leaf; leaves that aren't pushed keep their value. A bad one ends the update: the old weights stay as a whole."""
        await self._mailbox.ask(lambda: self._updates.push(self._runner.layout, name, array))

    async def commit_update(self, checksum: int | None = None) -> None:
        """Swap the weights, with `in_flight: finish` when the running requests have finished. The pushed arrays aren't needed afterwards,
        unless lent.

        checksum: `sync.checksum` of what was pushed; if what came has another, the update fails and the old weights stay.
        """
        future: Future[None] = Future()
        self._mailbox.post(future, partial(self._updates.commit, future, checksum))
        await asyncio.wrap_future(future)

    async def recall(self) -> None:
        """Wait until the running requests have finished; lent weights are the lender's again then. Within an update, before its commit,
        which must follow: the engine has nothing to fall back on."""
        future: Future[None] = Future()
        self._mailbox.post(future, partial(self._updates.recall, future))
        await asyncio.wrap_future(future)

    async def abort_update(self) -> None:
        await self._mailbox.ask(self._updates.abort)

    def stats(self) -> EngineStats:
        return self._runner.stats()

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
        """Listen, let go of whom nobody waits for, change weights, admit, prefill, decode a chunk."""
        self._mailbox.listen(wait=not self._busy())
        faults.point("engine.step", version=self.version)
        for job in self._scheduler.forsaken():
            self._scheduler.release(job)
        self._apply_update()
        if self._updates.forfeited is not None:
            version = self._updates.forfeited.version
            raise RuntimeError(f"lent weights were recalled for version {version}, whose update failed: there is nothing to sample from")
        if not self._scheduler.begun:
            self._runner.memory.reset()
        self._runner.admit(new=self._updates.open is None)
        self._runner.fill()
        self._runner.decode()

    def _busy(self) -> bool:
        """Whether there is something to do that nobody needs to ask for."""
        if self._updates.open is None:
            return bool(self._scheduler.begun or self._scheduler.waiting)
        return bool(self._scheduler.begun) or self._updates.open.is_awaited  # nobody is admitted

    def _apply_update(self) -> None:
        """Change the weights, if it is time."""
        update = self._updates.open
        if update is None or (self._in_flight == "finish" and self._scheduler.begun):
            return
        update.give_back()
        if update.commit is None:
            return
        self._updates.close()
        try:
            layout = update.applied(self._runner.layout, self._runner.memory.dispatch)
        except Exception as error:
            self._updates.forfeited = update if update.recalled else None
            settle(update.commit, error)
            return
        self._runner.renew(layout, version=update.version, keep=self._in_flight == "keep")
        settle(update.commit, None)
