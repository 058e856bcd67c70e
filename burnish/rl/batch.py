"""The device batch: what losses see of a set of episodes, and the one function that builds it from groups.

Owns `TokenBatch`, `Scores` and `build_batch`. Which episode lies in which row is `rl.layout`; placing arrays on a mesh is the cluster's.
Models read the first four fields, losses only the others: a loss never sees the layout. Built in numpy, by the trainer.

Attention rule, everywhere: query i sees key j iff j <= i and segments[j] != 0 and segments[j] is segments[i] or parents[i].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int32

from burnish.pytree import pytree, static
from burnish.rl.credit import TrajectoryKey
from burnish.rl.layout import BatchShape, Layout, Row, bucket, cut, lay_out
from burnish.types import Group, Trajectory

Array: TypeAlias = jax.Array | np.ndarray
Credit: TypeAlias = Mapping[TrajectoryKey, float | np.ndarray]
"""By (group id, sample): one advantage for the episode, or one for each of its sampled ids. Who isn't in it carries no loss."""


@pytree
class TokenBatch:
    """R rows of T tokens, of which up to M a row are scored: the ids that the policy sampled.

    tokens, positions, segments, parents: [R, T]. A completion continues its prompt's positions. Segments are unique in a row, 0 is
    padding; a token may also attend to the segment in `parents`, its shared prompt (0: none).

    The rest is [R, M], one entry a scored id, padding where `mask` is False; the entries of an episode lie in one row, side by side, in
    order. columns: the column whose hidden state predicts the id (for the first id of a completion that is the prompt's last column).
    own_columns: the column where the id itself lies. sequences, prompts_index: index of the episode and of its group in the batch.
    sequence_tokens, prompt_tokens: how many scored ids the whole episode and the whole group have, however rows are cut into
    micro-batches (1 at padding); means over episodes and groups weigh by them. returns: what a critic should say before the id, 0
    without one. kept_ids: the support that the id was sampled from, padded with -1, or None when that was the whole vocabulary.
    """

    tokens: Int32[Array, "R T"]
    positions: Int32[Array, "R T"]
    segments: Int32[Array, "R T"]
    parents: Int32[Array, "R T"]
    columns: Int32[Array, "R M"]
    own_columns: Int32[Array, "R M"]
    target_ids: Int32[Array, "R M"]
    mask: Bool[Array, "R M"]
    sequences: Int32[Array, "R M"]
    prompts_index: Int32[Array, "R M"]
    sequence_tokens: Int32[Array, "R M"]
    prompt_tokens: Int32[Array, "R M"]
    advantages: Float[Array, "R M"]
    returns: Float[Array, "R M"]
    sampler_logps: Float[Array, "R M"]
    temperatures: Float[Array, "R M"]
    kept_ids: Int32[Array, "R M K"] | None
    num_sequences: int = static()
    num_prompts: int = static()


@pytree
class Scores:
    """What models say about the scored ids, [R, M] each: the policy now, the anchor policy (None: the policy now), the reference.

    entropy: of the policy now before each id, in nats; it has a gradient only if the algorithm asks for one. Values at padding mean
    nothing and may be NaN.
    """

    logps: Float[Array, "R M"]
    old_logps: Float[Array, "R M"] | None = None
    ref_logps: Float[Array, "R M"] | None = None
    entropy: Float[Array, "R M"] | None = None


def build_batch(
    groups: Sequence[Group],
    advantages: Credit,
    *,
    temperature: float,
    layout: Layout = "shared",
    row_tokens: int | None = None,
    shape: BatchShape | None = None,
    rows_multiple: int = 1,
    at_least: BatchShape | None = None,
) -> TokenBatch:
    """Lay groups out in rows and note, for every sampled id, what predicts it, whose it is and what it is worth.

    An episode without credit (failed, no reward, cut) is left out, as is one that sampled nothing; no episode at all gives rows of
    padding. temperature: what the completions were sampled at; log-probs of greedy ones (0) are those at 1. row_tokens: the longest row,
    see `lay_out`. shape: static sizes from `plan_shape` or `fit_shape`; None takes `fit_shape`'s, covering `at_least`.
    """
    rows = lay_out(_with_credit(groups, advantages), layout=layout, row_tokens=row_tokens)
    shape = shape or _fitted(rows, groups, layout, row_tokens, rows_multiple)
    shape = shape if at_least is None else shape.covering(at_least)
    return _fill(rows, shape, groups, advantages, temperature)


def build_micro_batches(
    groups: Sequence[Group],
    advantages: Credit,
    *,
    temperature: float,
    tokens_per_device: int,
    rows_multiple: int = 1,
    pairs_per_token: float = 4096.0,
    at_least: BatchShape | None = None,
) -> list[TokenBatch]:
    """A mini-batch in as many micro-batches as `layout.cut` makes: `rows_multiple` rows each, at most `tokens_per_device` tokens a row.

    All of them have one shape and number episodes and groups through the whole mini-batch. Where rows don't come out even the last
    micro-batch has rows of padding, which weigh nothing. at_least: sizes below which the shape doesn't go, for fewer programs.
    """
    micro_batches = cut(
        _with_credit(groups, advantages), tokens=tokens_per_device, rows_multiple=rows_multiple, pairs_per_token=pairs_per_token
    )
    longest = max((len(row.tokens) for rows in micro_batches for row in rows), default=0)
    columns = min(bucket(longest, multiple=64), tokens_per_device)
    # As many places for scored ids as columns: a narrower array saves next to nothing and would be a second size to compile for.
    shape = dataclasses.replace(_numbers_shape(groups), rows=rows_multiple, columns=columns, targets=columns)
    shape = shape if at_least is None else shape.covering(at_least)
    return [_fill(rows, shape, groups, advantages, temperature) for rows in micro_batches]


def _fill(rows: Sequence[Row], shape: BatchShape, groups: Sequence[Group], advantages: Credit, temperature: float) -> TokenBatch:
    """The rows as arrays of one shape. groups: all that episodes are numbered through, whether they lie in these rows or not."""
    if len(rows) > shape.rows:
        raise ValueError(f"the episodes fill {len(rows)} rows, the shape has {shape.rows}: use fewer groups or a larger shape")
    grid, scored = (shape.rows, shape.columns), (shape.rows, shape.targets)
    numbers = _Numbers.of(groups, advantages)
    targets = [_targets(row, numbers, advantages) for row in rows]

    def padded(name: str, fill: int | float, dtype: type) -> np.ndarray:
        return _pad([row[name] for row in targets], scored, fill=fill, dtype=dtype)

    return TokenBatch(
        tokens=_pad([row.tokens for row in rows], grid),
        positions=_pad([row.positions for row in rows], grid),
        segments=_pad([row.segments for row in rows], grid),
        parents=_pad([row.parents for row in rows], grid),
        **{name: padded(name, 0, np.int32) for name in ("columns", "own_columns", "target_ids", "sequences", "prompts_index")},
        **{name: padded(name, 1, np.int32) for name in ("sequence_tokens", "prompt_tokens")},
        **{name: padded(name, 0.0, np.float32) for name in ("advantages", "sampler_logps")},
        returns=np.zeros(scored, np.float32),
        mask=_pad([np.ones(row.num_targets) for row in rows], scored, dtype=bool),
        temperatures=np.full(scored, temperature or 1.0, np.float32),
        kept_ids=_pad_kept(rows, (*scored, shape.kept)) if shape.kept else None,
        num_sequences=shape.sequences,
        num_prompts=shape.prompts,
    )


def split_rows(batch: TokenBatch, parts: int) -> list[TokenBatch]:
    """Cut a batch into micro-batches of equally many rows; losses and gradients summed over them are those of the whole."""
    rows = batch.mask.shape[0]
    if rows % parts:
        raise ValueError(f"{rows} rows can't be cut into {parts} equal micro-batches; build the batch with a multiple of {parts} rows")
    step = rows // parts
    return [jax.tree.map(lambda x, i=i: x[i * step : (i + 1) * step], batch) for i in range(parts)]


def take_rows(batches: Sequence[TokenBatch], rows: Sequence[tuple[int, int]], *, num_rows: int) -> TokenBatch:
    """One batch of rows from several on the host, each (batch, row); as wide as the widest batch, filled up to `num_rows` with padding."""

    def taken(name: str) -> np.ndarray | None:
        arrays = [getattr(batch, name) for batch in batches]
        widths = [array.shape[1:] for array in arrays if array is not None]
        if not widths:
            return None
        shape, dtype = tuple(map(max, zip(*widths, strict=True))), next(array.dtype for array in arrays if array is not None)
        out = np.full((num_rows, *shape), _PADDING.get(name, 0), dtype)
        for target, (i, row) in zip(out, rows, strict=False):
            if arrays[i] is not None:
                target[tuple(map(slice, arrays[i].shape[1:]))] = arrays[i][row]
        return out

    arrays = [field.name for field in dataclasses.fields(batches[0]) if not field.metadata.get("static")]
    numbers = {name: max(getattr(batch, name) for batch in batches) for name in ("num_sequences", "num_prompts")}
    return TokenBatch(**{name: taken(name) for name in arrays}, **numbers)


_PADDING = {"sequence_tokens": 1, "prompt_tokens": 1, "temperatures": 1, "kept_ids": -1}
"""What stands where there is nothing, in fields where that isn't 0."""


def by_sequence(array: Array, batch: TokenBatch) -> dict[int, np.ndarray]:
    """The entries of a [R, M] array that belong to each episode of the batch, in order: sequence number -> [num_sampled].

    Numbers index the episodes of the groups that the batch was built from (`credit.episode_keys`); only those that lie in it are there.
    """
    values = np.asarray(array)
    if values.shape != batch.mask.shape:
        raise ValueError(f"the array has shape {values.shape}, the batch's scored ids {batch.mask.shape}: give one number for each")
    return {number: values[where] for number, where in _entries(batch).items()}


def from_sequences(values: Mapping[int, float | np.ndarray], batch: TokenBatch, *, fill: float = 0.0) -> np.ndarray:
    """float32[R, M] of one number, or one for each scored id, for every episode of the batch; `fill` at padding. Undoes `by_sequence`."""
    entries = _entries(batch)
    if values.keys() != entries.keys():
        odd = sorted(values.keys() ^ entries.keys())
        raise ValueError(f"the batch holds {len(entries)} sequences and {len(values)} were given; only on one side: {odd[:8]}")
    out = np.full(batch.mask.shape, fill, np.float32)
    for number, where in entries.items():
        given = np.asarray(values[number], np.float32)
        if given.shape not in ((), (1,), where[0].shape):
            raise ValueError(f"sequence {number} has {len(where[0])} scored ids and was given an array of shape {given.shape}")
        out[where] = given
    return out


def _entries(batch: TokenBatch) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Where the scored ids of each episode lie: (rows, columns) in [R, M], in order."""
    rows, columns = np.nonzero(np.asarray(batch.mask))
    numbers = np.asarray(batch.sequences)[rows, columns]
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    parts = np.split(order, starts[1:]) if len(order) else []
    return {int(number): (rows[part], columns[part]) for number, part in zip(found, parts, strict=True)}


def fit_shape(
    groups: Sequence[Group], advantages: Credit, *, layout: Layout = "shared", row_tokens: int | None = None, rows_multiple: int = 1
) -> BatchShape:
    """The smallest bucketed shape that holds the groups: lengths vary from step to step, buckets rarely, so a run compiles few programs.

    Where a row is a group or an episode, those without credit keep their (empty) row: that costs less than a compilation.
    rows_multiple: the devices that rows are spread over, times the parts that `split_rows` cuts. `plan_shape` is the other way.
    """
    rows = lay_out(_with_credit(groups, advantages), layout=layout, row_tokens=row_tokens)
    return _fitted(rows, groups, layout, row_tokens, rows_multiple)


def _fitted(rows: Sequence[Row], groups: Sequence[Group], layout: Layout, row_tokens: int | None, rows_multiple: int) -> BatchShape:
    trajectories = [t for group in groups for t in group.trajectories]
    fixed = len(trajectories) if layout == "padded" else len(groups) if layout == "shared" and row_tokens is None else 0
    return dataclasses.replace(
        _numbers_shape(groups),
        rows=bucket(max(len(rows), fixed), multiple=rows_multiple),
        columns=bucket(max((len(row.tokens) for row in rows), default=0), multiple=64),
        targets=bucket(max((row.num_targets for row in rows), default=0), multiple=32),
    )


def _numbers_shape(groups: Sequence[Group]) -> BatchShape:
    """The sizes that don't depend on the layout; the others are 0."""
    trajectories = [t for group in groups for t in group.trajectories]
    kept = max((bucket(t.kept_ids.shape[1], multiple=8) for t in trajectories if t.kept_ids is not None), default=0)
    return BatchShape(rows=0, columns=0, targets=0, sequences=len(trajectories), prompts=len(groups), kept=kept)


def _with_credit(groups: Sequence[Group], advantages: Credit) -> list[Trajectory]:
    """The episodes that carry loss, in the order of their groups. Refuses what no layout can express."""
    chosen = [t for group in groups for t in group.trajectories if (t.group, t.sample) in advantages and t.num_sampled]
    for t in chosen:
        if t.sampled[: max(1, t.prompt_length)].any():
            raise ValueError(f"episode {(t.group, t.sample)}: an id of its prompt (length {t.prompt_length}) is marked as sampled")
        if t.sampled[list(t.forks)].any():
            raise ValueError(f"episode {(t.group, t.sample)}: the first id after one of its forks {t.forks} is marked as sampled")
    if len({t.kept_ids is None for t in chosen}) > 1:
        raise ValueError("some episodes carry the support that they were sampled from and others none: sample a batch in one way")
    return chosen


def _targets(row: Row, numbers: _Numbers, advantages: Credit) -> dict[str, np.ndarray]:
    """The scored ids of one row, unpadded: field of `TokenBatch` -> one value an id."""
    placed = [episode.trajectory for episode in row.placed]
    counts = [len(episode.columns) for episode in row.placed]

    def each(values: Iterable[int]) -> np.ndarray:
        return np.repeat(np.fromiter(values, np.int64), counts)

    worth = [np.broadcast_to(advantages[t.group, t.sample], count) for t, count in zip(placed, counts, strict=True)]
    return {
        "columns": np.concatenate([episode.columns for episode in row.placed]),
        "own_columns": np.concatenate([episode.own_columns for episode in row.placed]),
        "target_ids": np.concatenate([t.ids[t.sampled] for t in placed]),
        "sequences": each(numbers.sequences[t.group, t.sample] for t in placed),
        "prompts_index": each(numbers.prompts[t.group] for t in placed),
        "sequence_tokens": each(counts),
        "prompt_tokens": each(numbers.prompt_tokens[t.group] for t in placed),
        "advantages": np.concatenate(worth),
        "sampler_logps": np.concatenate([t.sampler_logps[t.sampled] for t in placed]),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Numbers:
    """Of each episode its index in the batch; of each group its index and how many scored ids it has."""

    sequences: Mapping[TrajectoryKey, int]
    prompts: Mapping[tuple[int, int], int]
    prompt_tokens: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, groups: Sequence[Group], advantages: Credit) -> _Numbers:
        credited = {g.id: [t.num_sampled for t in g.trajectories if (t.group, t.sample) in advantages] for g in groups}
        return cls(
            sequences={(t.group, t.sample): i for i, t in enumerate(t for group in groups for t in group.trajectories)},
            prompts={group.id: i for i, group in enumerate(groups)},
            prompt_tokens={group: sum(tokens) for group, tokens in credited.items()},
        )


def _pad(rows: Sequence[np.ndarray], shape: tuple[int, int], *, fill: int | float = 0, dtype: type = np.int32) -> np.ndarray:
    out = np.full(shape, fill, dtype)
    for target, row in zip(out, rows, strict=False):
        if len(row) > len(target):
            raise ValueError(
                f"a row holds {len(row)} entries, the shape has room for {len(target)}: use a larger shape or fewer row_tokens"
            )
        target[: len(row)] = row
    return out


def _pad_kept(rows: Sequence[Row], shape: tuple[int, int, int]) -> np.ndarray:
    """The kept set of each scored id, -1 beyond it and at padding."""
    out = np.full(shape, -1, np.int32)
    for target, row in zip(out, rows, strict=False):
        at = 0
        for episode in row.placed:
            t, count = episode.trajectory, len(episode.columns)
            if t.kept_ids is not None:
                kept = t.kept_ids[t.sampled]
                target[at : at + count, : kept.shape[1]] = kept
            at += count
    return out
