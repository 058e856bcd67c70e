"""Which episode lies where: from trajectories to rows of tokens with segments.

Owns the three layouts and their sizes; knows nothing of rewards or losses. Host numpy, no jax. `rl.batch` turns rows into a device batch.

"shared": the prompt of a group lies in a row once, followed by its completions, each with the prompt's segment as its parent, so the prompt
is computed once. "packed": each episode repeats its prompt, several lie in a row. "padded": one episode a row. In all of them an episode
that forked has several continuations of its prompt, which lie side by side and don't see each other.

`lay_out` fills rows of a given length; `cut` makes micro-batches of rows that fit a device's memory and keep all devices equally busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from burnish.types import Trajectory

Layout = Literal["shared", "packed", "padded"]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """An episode in a row. columns: what predicts each of its sampled ids; own_columns: where the id itself lies. int[num_sampled] each."""

    trajectory: Trajectory
    columns: np.ndarray
    own_columns: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """tokens, positions, segments, parents: int32[T] as in `TokenBatch`, unpadded. placed: the episodes in the row."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    parents: np.ndarray
    placed: tuple[Placed, ...]

    @property
    def num_targets(self) -> int:
        return sum(len(episode.columns) for episode in self.placed)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchShape:
    """The static sizes of a batch; equal shapes share one compiled program. `kept` is the width of `kept_ids`, 0 for none."""

    rows: int
    columns: int
    targets: int
    sequences: int
    prompts: int
    kept: int = 0

    def covering(self, other: BatchShape) -> BatchShape:
        """The smallest shape that holds what either holds."""
        return BatchShape(*(max(a, b) for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def bucket(size: int, *, multiple: int) -> int:
    """Round up to one of few sizes: up to 8 multiples of `multiple`, then 4 sizes an octave. At most a quarter is added beyond that."""
    units = max(1, -(-size // multiple))
    grain = 1 << max(0, (units - 1).bit_length() - 3)
    return -(-units // grain) * grain * multiple


def plan_shape(
    *,
    layout: Layout,
    num_prompts: int,
    num_generations: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    row_tokens: int | None = None,
    rows_multiple: int = 1,
    kept: int = 0,
) -> BatchShape:
    """A shape that every batch of these limits fits, so that a run compiles once; what is shorter is padding.

    max_completion_tokens counts everything after the prompt, an environment's tokens included. `fit_shape` is the other way: less
    padding, a few programs.
    """
    num_sequences, alone = num_prompts * num_generations, max_prompt_tokens + max_completion_tokens
    if layout != "padded" and row_tokens is not None and row_tokens < alone:
        raise ValueError(f"row_tokens {row_tokens} can't hold a prompt of {max_prompt_tokens} and a completion of {max_completion_tokens}")
    if layout == "padded":
        rows, columns, targets = num_sequences, alone, max_completion_tokens
    elif layout == "packed":
        columns = targets = _given(row_tokens)
        rows = -(-num_sequences // (columns // alone))
    elif row_tokens is None:
        targets = num_generations * max_completion_tokens
        rows, columns = num_prompts, max_prompt_tokens + targets
    else:
        columns = targets = row_tokens
        rows = num_prompts * -(-num_generations // ((row_tokens - max_prompt_tokens) // max_completion_tokens))
    return BatchShape(
        rows=-(-rows // rows_multiple) * rows_multiple,
        columns=bucket(columns, multiple=64),
        targets=bucket(targets, multiple=32),
        sequences=num_sequences,
        prompts=num_prompts,
        kept=kept,
    )


def lay_out(trajectories: Sequence[Trajectory], *, layout: Layout, row_tokens: int | None = None) -> list[Row]:
    """Place each trajectory in exactly one row; the same trajectories in the same order give the same rows.

    row_tokens: the longest row. The shared layout may go without: then a group is a row. A group that is longer than a row is split over
    several that each repeat its prompt; groups that are shorter share one. Raises ValueError for an episode longer than a row.
    """
    if row_tokens is not None:
        _check_lengths(trajectories, row_tokens)
    if layout == "padded":
        return [_join([[t]]) for t in trajectories]
    if layout == "packed":
        return [_join([[trajectories[i]] for i in row]) for row in best_fit([len(t.ids) for t in trajectories], _given(row_tokens))]
    pieces = _pieces(_same_prompt(trajectories), row_tokens)
    if row_tokens is None:
        return [_join([piece]) for piece in pieces]
    return [_join([pieces[i] for i in row]) for row in best_fit([_num_tokens(piece) for piece in pieces], row_tokens)]


def cut(trajectories: Sequence[Trajectory], *, tokens: int, rows_multiple: int = 1, pairs_per_token: float = 4096.0) -> list[list[Row]]:
    """Micro-batches of at most `rows_multiple` rows, prompts shared, no row longer than `tokens`: one row a device at a time.

    As few micro-batches as `tokens` allows. Then the shortest row length at which the episodes still fit into so many rows, so that the
    work is spread over all devices and micro-batches instead of filling all but the last; it is a bucket's, since every length is a
    program. Then the costliest first, each to the row that has the least to do so far (`cost`; Graham, 1969). Rows of about the same cost
    go through together, as the fastest waits for the slowest. Depends on the episodes and their order alone; raises ValueError for an
    episode that is longer than `tokens`. Without any episode: one micro-batch of no rows.
    """
    _check_lengths(trajectories, tokens)
    groups = _same_prompt(trajectories)
    fewest = len(best_fit([_num_tokens(p) for p in _pieces(groups, tokens)], tokens))
    num_rows = -(-fewest // rows_multiple) * rows_multiple
    longest = max((len(t.ids) for t in trajectories), default=0)
    for length in _lengths(tokens):
        if length >= longest and (rows := _spread(_pieces(groups, length), num_rows, length, pairs_per_token)) is not None:
            return [rows[i : i + rows_multiple] for i in range(0, len(rows), rows_multiple)] or [[]]
    raise AssertionError(f"{fewest} rows of {tokens} tokens held the episodes and then didn't")


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: longest first, each into the fullest bin that still takes it."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(bins)) if free[b] >= lengths[index]]
        if not fitting:
            bins.append([])
            free.append(capacity)
        chosen = min(fitting, key=lambda b: free[b], default=len(bins) - 1)
        bins[chosen].append(index)
        free[chosen] -= lengths[index]
    return bins


def _same_prompt(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each group that begin with the same ids: normally all of it, fewer where an episode forked."""
    siblings: dict[tuple[tuple[int, int], bytes], list[Trajectory]] = {}
    for t in trajectories:
        siblings.setdefault((t.group, t.ids[: t.prompt_length].astype(np.int64).tobytes()), []).append(t)
    return list(siblings.values())


def _pieces(groups: Sequence[list[Trajectory]], row_tokens: int | None) -> list[list[Trajectory]]:
    """The groups, those that are longer than a row in several pieces."""
    return [piece for siblings in groups for piece in _split(siblings, row_tokens)]


def _lengths(longest: int) -> Iterator[int]:
    """The lengths that rows are padded to, ascending; the last is `longest` itself."""
    length = 64
    while length < longest:
        yield length
        length = bucket(length + 1, multiple=64)
    yield longest


def cost(piece: Sequence[Trajectory], *, pairs_per_token: float) -> float:
    """The work of a pass over a prompt and the completions that share it, in tokens.

    Matrix products by the token, attention by the pair of query and key that sees it. pairs_per_token: pairs that cost as much as one
    token does apart from attention.
    """
    prompt = piece[0].prompt_length
    lengths = [len(t.ids) - prompt for t in piece]
    pairs = prompt * (prompt + 1) / 2 + sum(prompt * length + length * (length + 1) / 2 for length in lengths)
    return prompt + sum(lengths) + pairs / pairs_per_token


def _spread(pieces: Sequence[Sequence[Trajectory]], num_rows: int, length: int, pairs_per_token: float) -> list[Row] | None:
    """The pieces in at most `num_rows` rows of at most `length` tokens, evenly by cost if that fits, else wherever they fit.

    The costliest row first; None if they don't fit.
    """
    lengths = [_num_tokens(piece) for piece in pieces]
    if sum(lengths) > num_rows * length:
        return None
    costs = [cost(piece, pairs_per_token=pairs_per_token) for piece in pieces]
    bins = _even(costs, lengths, num_rows, length) or best_fit(lengths, length)
    if len(bins) > num_rows:
        return None
    bins.sort(key=lambda row: -sum(costs[i] for i in row))
    return [_join([pieces[i] for i in sorted(row)]) for row in bins]


def _even(costs: Sequence[float], lengths: Sequence[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Bins of indices: the costliest first, each into the cheapest bin that still takes it; None where one fits nowhere. None is empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    total, free = [0.0] * num_bins, [capacity] * num_bins
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        fitting = [b for b in range(num_bins) if free[b] >= lengths[index]]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda b: total[b])
        bins[chosen].append(index)
        total[chosen] += costs[index]
        free[chosen] -= lengths[index]
    return [indices for indices in bins if indices]


def _split(siblings: list[Trajectory], row_tokens: int | None) -> list[list[Trajectory]]:
    """Pieces of one group, each short enough for a row with its prompt."""
    if row_tokens is None:
        return [siblings]
    room = row_tokens - siblings[0].prompt_length
    return [[siblings[i] for i in sorted(piece)] for piece in best_fit([len(t.ids) - t.prompt_length for t in siblings], room)]


def _num_tokens(piece: Sequence[Trajectory]) -> int:
    return piece[0].prompt_length + sum(len(t.ids) - t.prompt_length for t in piece)


def _join(pieces: Sequence[Sequence[Trajectory]]) -> Row:
    """One row of pieces, each a prompt with the continuations that share it; a single one is one segment with its prompt."""
    tokens, positions, segments, parents, placed = [], [], [], [], []
    column = segment = 0
    for piece in pieces:
        prompt_length, prompt_segment = piece[0].prompt_length, segment + 1
        continuations = [ids for t in piece for ids in np.split(t.ids, [prompt_length, *t.forks])[1:]]
        parent = prompt_segment if len(continuations) > 1 else 0
        spans = [(piece[0].ids[:prompt_length], 0, prompt_segment, 0)]
        spans += [(ids, prompt_length, prompt_segment + (n if parent else 0), parent) for n, ids in enumerate(continuations, start=1)]
        start = column + prompt_length
        for t in piece:
            own = np.flatnonzero(t.sampled)
            columns, own_columns = (np.where(i < prompt_length, column + i, start + i - prompt_length) for i in (own - 1, own))
            placed.append(Placed(t, columns, own_columns))
            start += len(t.ids) - prompt_length
        for ids, first, own, above in spans:
            tokens.append(ids)
            positions.append(first + np.arange(len(ids)))
            segments.append(np.full(len(ids), own))
            parents.append(np.full(len(ids), above))
        column, segment = start, spans[-1][2]
    joined = (np.concatenate(parts).astype(np.int32) for parts in (tokens, positions, segments, parents))
    return Row(*joined, placed=tuple(placed))


def _check_lengths(trajectories: Sequence[Trajectory], row_tokens: int) -> None:
    for t in trajectories:
        if len(t.ids) > row_tokens:
            raise ValueError(
                f"episode {(t.group, t.sample)} has {len(t.ids)} tokens, a row only {row_tokens}: raise row_tokens or lower the limits on "
                "prompts and completions"
            )


def _given(row_tokens: int | None) -> int:
    if row_tokens is None:
        raise ValueError("the packed layout needs row_tokens, the length of a row")
    return row_tokens
