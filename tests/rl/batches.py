"""Small batches and groups for the tests of this folder."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from burnish.rl.batch import TokenBatch
from burnish.types import Group, Prompt, Status, Trajectory


def scored(
    mask: ArrayLike,
    advantages: ArrayLike = 0.0,
    *,
    sequences: ArrayLike | None = None,
    prompts: ArrayLike | None = None,
    sampler_logps: ArrayLike = 0.0,
) -> TokenBatch:
    """A batch of which only the [R, M] half matters: by default a row is an episode and its own group."""
    mask = np.array(mask, bool)
    rows, width = mask.shape
    sequences = np.broadcast_to(np.arange(rows)[:, None] if sequences is None else np.array(sequences), mask.shape).astype(np.int32)
    prompts = sequences if prompts is None else np.broadcast_to(np.array(prompts), mask.shape).astype(np.int32)
    blank = np.zeros((rows, 2), np.int32)

    def count(ids: np.ndarray) -> np.ndarray:
        return np.maximum(np.bincount(ids[mask], minlength=ids.max() + 1)[ids], 1).astype(np.int32)

    def spread(values) -> np.ndarray:
        values = np.asarray(values, np.float32)
        return np.array(np.broadcast_to(values[:, None] if values.ndim == 1 else values, mask.shape))

    return TokenBatch(
        tokens=blank,
        positions=blank,
        segments=blank,
        parents=blank,
        columns=np.zeros((rows, width), np.int32),
        own_columns=np.zeros((rows, width), np.int32),
        target_ids=np.zeros((rows, width), np.int32),
        mask=mask,
        sequences=sequences,
        prompts_index=prompts,
        sequence_tokens=count(sequences),
        prompt_tokens=count(prompts),
        advantages=spread(advantages),
        returns=np.zeros((rows, width), np.float32),
        sampler_logps=spread(sampler_logps),
        temperatures=np.ones((rows, width), np.float32),
        kept_ids=None,
        num_sequences=int(sequences.max()) + 1,
        num_prompts=int(prompts.max()) + 1,
    )


def episode(
    prompt,
    rest,
    sampled=None,
    *,
    draw: int = 0,
    sample: int = 0,
    reward: float | None = 1.0,
    status=Status.OK,
    kept: int = 0,
    forks: tuple[int, ...] = (),
) -> Trajectory:
    """prompt ids, then `rest`, of which `sampled` (default all) came from the policy. forks: where it begins anew, as indices of ids."""
    ids = np.array([*prompt, *rest], np.int32)
    mask = np.array([False] * len(prompt) + ([True] * len(rest) if sampled is None else [bool(s) for s in sampled]))
    return Trajectory(
        steps=[],
        ids=ids,
        sampled=mask,
        sampler_logps=np.where(mask, -ids / 100, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_length=len(prompt),
        group=(0, draw),
        sample=sample,
        status=status,
        reward=reward,
        forks=forks,
        kept_ids=np.where(mask[:, None], ids[:, None] + np.arange(kept), -1).astype(np.int32) if kept else None,
    )


def group(draw: int, prompt, completions, **options) -> Group:
    members = [episode(prompt, rest, draw=draw, sample=i, **options) for i, rest in enumerate(completions)]
    return Group((0, draw), Prompt(f"p{draw}", ()), members)


def credit_all(groups, value=None) -> dict:
    """Credit for every episode, each a different number unless one is given."""
    members = [t for g in groups for t in g.trajectories]
    return {(t.group, t.sample): float(i + 1 if value is None else value) for i, t in enumerate(members)}
