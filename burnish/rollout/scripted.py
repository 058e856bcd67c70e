"""An engine that says what a function tells it to: for tests of everything that waits for completions, and for replaying transcripts.

Owns no model and no jax. Budgets and stops behave as the protocol says, and what `rollout.slotted` has; log-probs are a constant, and what
is pushed is in `pushed` as it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from burnish.rollout.draft import DecodeText, Draft
from burnish.rollout.slotted import Call, SlottedEngine
from burnish.types import Request


def no_text(ids: Sequence[int]) -> str:
    """Of scripts whose requests name no stop strings."""
    raise ValueError(f"a request names stop strings, so ScriptedEngine needs `decode_text` to read {len(ids)} ids")


class ScriptedEngine(SlottedEngine):
    """Answers each request with `reply(request)`, cut at its stop ids, stop strings and budget, after `latency_s(request)` seconds.

    The reply is what a model would go on to say, so it should end in a stop id or be at least as long as the budget; one that runs out
    earlier is repeated. logp: the log-probability given to every id.
    """

    def __init__(
        self,
        reply: Callable[[Request], Sequence[int]],
        *,
        latency_s: Callable[[Request], float] = lambda request: 0.0,
        decode_text: DecodeText = no_text,
        context: int = 1 << 20,
        slots: int = 64,
        logp: float = -1.0,
        version: int = 0,
    ) -> None:
        super().__init__(context=context, slots=slots, version=version)
        self._reply, self._latency_s, self._decode_text, self._logp = reply, latency_s, decode_text, logp

    async def _answer(self, call: Call) -> None:
        deadline = time.monotonic() + self._latency_s(call.draft.request)
        await self._until(lambda: call.cancelled or time.monotonic() >= deadline)
        if not call.cancelled:
            self._say(call.draft)

    def _say(self, draft: Draft) -> None:
        request = draft.request
        reply = list(self._reply(request))
        if not reply:
            raise ValueError(f"the script has an empty reply to {request}; a model says at least one id")
        ids = (reply * -(-draft.budget // len(reply)))[: draft.budget]
        end = next((count for count, token in enumerate(ids, 1) if token in request.params.stop_ids), len(ids))
        kept = np.asarray(ids[:end], np.int32)[:, None]
        logps = np.full(end, 0.0 if request.params.truncates else self._logp, np.float32)  # all the mass is on the one id that was kept
        draft.extend(kept[:, 0], logps, kept, version=self._version, decode_text=self._decode_text)
