"""From the scheduler's jobs to the arrays that the compiled programs take: built anew for each call, so nothing can go stale."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from burnish.rollout.native.decode import Slots
from burnish.rollout.native.sample import Rules
from burnish.rollout.native.scheduler import Job, Prefill


def slot_state(jobs: Sequence[Job | None], *, min_stop_ids: int) -> Slots:
    """The state of every slot, from its job. Stop ids get room in steps of 8, `min_stop_ids` at least."""
    size = len(jobs)
    tokens, positions, remaining, indices = (np.zeros(size, np.int32) for _ in range(4))
    active, keys = np.zeros(size, bool), np.zeros((size, 2), np.uint32)
    most = max((len(job.draft.request.params.stop_ids) for job in jobs if job is not None), default=0)
    stop_ids = np.full((size, max(min_stop_ids, 8 * -(-most // 8), 8)), -1, np.int32)
    rules = (np.ones(size, np.float32), np.zeros(size, np.int32), np.ones(size, np.float32), np.zeros(size, np.float32))
    for slot, job in enumerate(jobs):
        if job is None:
            continue
        draft, params, count = job.draft, job.draft.request.params, len(job.draft.ids)
        tokens[slot] = draft.ids[-1] if count else 0
        positions[slot] = len(draft.request.prompt_ids) + count - 1
        remaining[slot], indices[slot] = draft.budget - count, count
        active[slot], keys[slot] = True, job.key
        stop_ids[slot, : len(params.stop_ids)] = params.stop_ids
        for column, value in zip(rules, (params.temperature, params.top_k, params.top_p, params.min_p), strict=True):
            column[slot] = value
    columns = (tokens, positions, active, remaining, indices, keys, stop_ids)
    return Slots(*map(jnp.asarray, columns), rules=Rules(*map(jnp.asarray, rules)))


def prompt_rows(plan: Prefill, *, num_rows: int, num_slots: int) -> tuple[Array, Array, Array]:
    """prompts [R, P] padded right, lengths [R], and of each slot the row it starts from ([S], -1 for none)."""
    prompts = np.zeros((num_rows, plan.length), np.int32)
    lengths = np.zeros(num_rows, np.int32)
    source = np.full(num_slots, -1, np.int32)
    for row, (prompt, targets) in enumerate(zip(plan.prompts, plan.targets, strict=True)):
        prompts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        source[targets] = row
    return jnp.asarray(prompts), jnp.asarray(lengths), jnp.asarray(source)
