"""Locks what a batch says about every sampled id, in each layout, by reading it back through the attention rule."""

import collections

import jax
import numpy as np
import pytest

from burnish.rl import batch as batch_module
from burnish.rl.advantages import group_relative
from burnish.rl.aggregate import prompt_mean, sequence_mean, token_mean
from burnish.rl.batch import TokenBatch, build_batch, build_micro_batches, by_sequence, fit_shape, from_sequences
from burnish.rl.credit import credit, uncredited
from burnish.rl.layout import BatchShape, best_fit, bucket, cost, cut, lay_out, plan_shape
from burnish.types import Group, Status

from .batches import credit_all, episode, group

LAYOUTS = [("shared", None), ("shared", 64), ("shared", 27), ("packed", 40), ("padded", None)]


def read_back(batch: TokenBatch) -> dict[tuple, dict]:
    """For each scored id, by (episode, its place among the episode's scored ids): all that a model and a loss see of it."""
    seen, counts = {}, collections.Counter()
    for row, target in zip(*np.nonzero(batch.mask), strict=True):
        column = batch.columns[row, target]
        allowed = {int(batch.segments[row, column]), int(batch.parents[row, column])} - {0}
        keys = [j for j in range(column + 1) if batch.segments[row, j] in allowed]
        assert batch.positions[row, keys].tolist() == list(range(len(keys))), "a context is contiguous from position 0"
        sequence = int(batch.sequences[row, target])
        counts[sequence] += 1
        seen[sequence, counts[sequence]] = {
            "context": batch.tokens[row, keys].tolist(),
            "target": int(batch.target_ids[row, target]),
            "group": int(batch.prompts_index[row, target]),
            "sequence_tokens": int(batch.sequence_tokens[row, target]),
            "prompt_tokens": int(batch.prompt_tokens[row, target]),
            "advantage": float(batch.advantages[row, target]),
            "sampler_logp": float(batch.sampler_logps[row, target]),
            "temperature": float(batch.temperatures[row, target]),
            "kept": None if batch.kept_ids is None else [int(k) for k in batch.kept_ids[row, target] if k >= 0],
        }
    return seen


def truth(groups: list[Group], credits: dict, temperature: float) -> dict[tuple, dict]:
    """The same, straight from the episodes."""
    seen = {}
    episodes = [t for g in groups for t in g.trajectories]
    totals = {g.id: sum(t.num_sampled for t in g.trajectories if (t.group, t.sample) in credits) for g in groups}
    for number, t in enumerate(episodes):
        for place, i in enumerate(np.flatnonzero(t.sampled) if (t.group, t.sample) in credits else [], start=1):
            start = max((fork for fork in t.forks if fork <= i), default=t.prompt_length)
            seen[number, place] = {
                "context": [*t.ids[: t.prompt_length].tolist(), *t.ids[start:i].tolist()],
                "target": int(t.ids[i]),
                "group": [g.id for g in groups].index(t.group),
                "sequence_tokens": t.num_sampled,
                "prompt_tokens": totals[t.group],
                "advantage": float(np.float32(credits[t.group, t.sample])),
                "sampler_logp": float(t.sampler_logps[i]),
                "temperature": float(np.float32(temperature)),
                "kept": None if t.kept_ids is None else t.kept_ids[i].tolist(),
            }
    return seen


def random_groups(seed: int, *, kept: int = 0) -> list[Group]:
    """Uneven groups, completions of 0 to 9 tokens, some with an environment's tokens between two sampled stretches, some forked there."""
    rng = np.random.default_rng(seed)
    groups = []
    for draw in range(5):
        prompt = rng.integers(1, 100, rng.integers(1, 9)).tolist()
        made = group(draw, prompt, [])
        for sample in range(int(rng.integers(1, 6))):
            rest = rng.integers(1, 100, rng.integers(0, 10)).tolist()
            turns = [not (2 <= i < 5) for i in range(len(rest))] if sample % 2 else None
            forks = (len(prompt) + 2,) if turns and len(rest) > 5 else ()
            made.trajectories.append(episode(prompt, rest, turns, draw=draw, sample=sample, kept=kept, forks=forks))
        groups.append(made)
    return groups


def test_a_batch_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shape is that of `fit_shape`, or what covers that."""
    calls: list[int] = []
    groups = [group(0, [11, 12, 13], [[21, 22], [31], [41, 42]])]
    credits = credit_all(groups)
    fitted = fit_shape(groups, credits, rows_multiple=3)
    monkeypatch.setattr(batch_module, "lay_out", lambda *args, **options: calls.append(1) or lay_out(*args, **options))
    batch = build_batch(groups, credits, temperature=1.0, rows_multiple=3)
    wider = build_batch(groups, credits, temperature=1.0, rows_multiple=3, at_least=BatchShape(6, 0, 0, 9, 0))
    assert len(calls) == 2
    assert (batch.tokens.shape, batch.mask.shape) == ((fitted.rows, fitted.columns), (fitted.rows, fitted.targets))
    assert (wider.tokens.shape, wider.num_sequences) == ((6, fitted.columns), 9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layout", "row_tokens"), LAYOUTS)
def test_each_sampled_id_has_its_own_context_in_every_layout(layout, row_tokens, seed):
    groups = random_groups(seed, kept=3 if seed % 2 else 0)
    credits = credit_all(groups)
    for key in list(credits)[::5]:
        del credits[key]
    batch = build_batch(groups, credits, temperature=0.7, layout=layout, row_tokens=row_tokens)
    expected = truth(groups, credits, 0.7)
    assert len(expected) > 20
    assert read_back(batch) == expected
    assert int(batch.mask.sum()) == len(expected)


def test_shared_row_holds_the_prompt_once():
    batch = build_batch([group(0, [11, 12, 13], [[21, 22], [31], [41, 42]])], credit_all([group(0, [1], [[1]] * 3)]), temperature=1.0)
    assert batch.tokens[0, :8].tolist() == [11, 12, 13, 21, 22, 31, 41, 42]
    assert batch.positions[0, :8].tolist() == [0, 1, 2, 3, 4, 3, 3, 4]
    assert batch.segments[0, :9].tolist() == [1, 1, 1, 2, 2, 3, 4, 4, 0]
    assert batch.parents[0, :9].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert batch.columns[0, :5].tolist() == [2, 3, 2, 2, 6]
    assert batch.target_ids[0, :5].tolist() == [21, 22, 31, 41, 42]
    assert batch.tokens.shape == (1, 64) and batch.mask.shape == (1, 32)


def test_packed_rows_restart_positions_and_segments():
    groups = [group(0, [1, 1], [[2, 2, 2]]), group(1, [3], [[4, 4]]), group(2, [5, 5, 5], [[6, 6, 6, 6]])]
    batch = build_batch(groups, credit_all(groups), temperature=1.0, layout="packed", row_tokens=10)
    assert batch.tokens[:, :10].tolist() == [[5, 5, 5, 6, 6, 6, 6, 3, 4, 4], [1, 1, 2, 2, 2, 0, 0, 0, 0, 0]]
    assert batch.segments[0, :10].tolist() == [1] * 7 + [2] * 3
    assert batch.positions[0, :10].tolist() == [*range(7), *range(3)]
    assert not batch.parents.any()


def test_a_group_longer_than_a_row_repeats_its_prompt_and_short_groups_share_one():
    long, short = group(0, [9] * 4, [[1] * 6] * 4), [group(1, [8] * 2, [[2, 2]] * 2), group(2, [7] * 2, [[3, 3]] * 2)]
    rows = lay_out([t for g in (long, *short) for t in g.trajectories], layout="shared", row_tokens=16)
    assert [row.tokens.tolist() for row in rows] == [
        [9] * 4 + [1] * 12,
        [9] * 4 + [1] * 12,
        [8, 8, 2, 2, 2, 2, 7, 7, 3, 3, 3, 3],
    ]
    assert rows[2].segments.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert rows[2].parents.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 4, 4, 4, 4]


def test_episodes_of_a_group_that_forked_before_the_completion_dont_share_a_prompt():
    forked = group(0, [1, 2], [[3], [4]])
    forked.trajectories.append(episode([1, 9], [5], sample=2))
    credits = credit_all([forked])
    assert read_back(build_batch([forked], credits, temperature=1.0)) == truth([forked], credits, 1.0)


def test_continuations_of_an_episode_that_forked_lie_side_by_side_after_its_prompt():
    forked = episode([1, 2], [3, 4, 5, 6, 7], [1, 0, 0, 1, 1], forks=(4,))  # [1 2 3 4] and [1 2 5 6 7]
    for layout in ("shared", "padded", "packed"):
        (row,) = lay_out([forked], layout=layout, row_tokens=8 if layout == "packed" else None)
        assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7] and row.positions.tolist() == [0, 1, 2, 3, 2, 3, 4]
        assert row.segments.tolist() == [1, 1, 2, 2, 3, 3, 3] and row.parents.tolist() == [0, 0, 1, 1, 1, 1, 1]
        assert row.placed[0].columns.tolist() == [1, 4, 5] and row.placed[0].own_columns.tolist() == [2, 5, 6]


def test_an_id_that_follows_nothing_after_a_fork_is_refused():
    forked = group(0, [1, 2], [])
    forked.trajectories.append(episode([1, 2], [3, 4, 5], forks=(4,)))
    with pytest.raises(ValueError, match=r"first id after one of its forks \(4,\) is marked as sampled"):
        build_batch([forked], credit_all([forked]), temperature=1.0)


def test_best_fit_fills_the_fullest_row():
    assert best_fit([5, 3, 7], 10) == [[2, 1], [0]]
    assert best_fit([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_completions_of_no_token_one_and_two_B073(layout):
    groups = [group(0, [5, 6], [[], [7], [8, 9]])]
    batch = build_batch(groups, credit_all(groups), temperature=1.0, layout=layout)
    assert read_back(batch) == truth(groups, credit_all(groups), 1.0)
    assert sorted(batch.sequences[batch.mask].tolist()) == [1, 2, 2]
    assert batch.num_sequences == 3


def test_the_stop_id_is_trained_and_padding_is_not_B055():
    stop = 2
    groups = [group(0, [stop, 6], [[7, stop], [8, 9, stop]])]
    batch = build_batch(groups, credit_all(groups), temperature=1.0, layout="padded")
    assert batch.target_ids[batch.mask].tolist() == [7, stop, 8, 9, stop]
    assert batch.mask.dtype == bool


def test_failed_and_unrewarded_episodes_are_left_out_and_counted_nowhere():
    made = group(0, [5], [[1, 2], [3], [4, 4]])
    made.trajectories[1].status, made.trajectories[2].reward = Status.ENV_ERROR, None
    made.trajectories.append(episode([5], [6, 7, 8], sample=3, reward=0.0))
    credits = credit([made], group_relative, train_truncated=True)
    batch = build_batch([made], credits, temperature=1.0)
    assert set(batch.sequences[batch.mask].tolist()) == {0, 3}
    assert set(batch.prompt_tokens[batch.mask].tolist()) == {5}
    assert 4 not in batch.tokens


def test_no_episode_at_all_is_a_batch_of_padding():
    made = group(0, [5], [[1, 2]])
    batch = build_batch([made], {}, temperature=1.0, shape=BatchShape(rows=2, columns=64, targets=32, sequences=1, prompts=1))
    assert batch.tokens.shape == (2, 64) and not batch.mask.any() and not batch.segments.any()
    assert build_batch([made], {}, temperature=1.0).tokens.shape == (1, 64)


def test_padding_divides_by_nothing():
    batch = build_batch([group(0, [5], [[1]])], credit_all([group(0, [5], [[1]])]), temperature=0.5)
    for values in (batch.temperatures, batch.sequence_tokens, batch.prompt_tokens):
        assert (values > 0).all()


def test_greedy_log_probs_are_scored_at_temperature_1():
    made = [group(0, [5], [[1]])]
    assert build_batch(made, credit_all(made), temperature=0.0).temperatures[0, 0] == 1.0


def test_one_advantage_for_each_sampled_id():
    made = [group(0, [5], [[1, 2, 3]])]
    batch = build_batch(made, {((0, 0), 0): np.array([0.5, -1.0, 2.0])}, temperature=1.0)
    assert batch.advantages[batch.mask].tolist() == [0.5, -1.0, 2.0]


@pytest.mark.parametrize(("layout", "row_tokens"), LAYOUTS)
def test_a_planned_shape_holds_every_batch_within_its_limits(layout, row_tokens):
    row_tokens = max(row_tokens or 0, 27) if row_tokens else None
    shape = plan_shape(
        layout=layout,
        num_prompts=3,
        num_generations=4,
        max_prompt_tokens=8,
        max_completion_tokens=10,
        row_tokens=row_tokens,
        rows_multiple=4,
    )
    assert shape.rows % 4 == 0
    rng = np.random.default_rng(0)
    for trial in range(20):
        low = 10 if trial == 0 else 1
        groups = [
            group(d, [1 + d] * (8 if trial == 0 else int(rng.integers(1, 9))), [[2] * int(rng.integers(low, 11)) for _ in range(4)])
            for d in range(3)
        ]
        batch = build_batch(groups, credit_all(groups), temperature=1.0, layout=layout, row_tokens=row_tokens, shape=shape)
        assert batch.tokens.shape == (shape.rows, shape.columns) and batch.mask.shape == (shape.rows, shape.targets)
        assert int(batch.mask.sum()) == sum(t.num_sampled for g in groups for t in g.trajectories)


def test_lengths_that_vary_give_few_shapes():
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(50):
        groups = [group(d, [1] * 48, [[2] * int(rng.integers(8, 200)) for _ in range(4)]) for d in range(2)]
        shapes.add(fit_shape(groups, credit_all(groups)))
    assert len(shapes) <= 16
    sizes = [bucket(n, multiple=64) for n in range(1, 100_000)]
    assert all(size >= n and size % 64 == 0 for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 50
    assert all(size <= 1.25 * n + 64 for n, size in enumerate(sizes, start=1))


def test_shapes_cover_each_other():
    covering = BatchShape(1, 64, 32, 8, 1).covering(BatchShape(2, 32, 64, 4, 1, kept=8))
    assert covering == BatchShape(2, 64, 64, 8, 1, kept=8)


def test_what_no_row_or_shape_can_hold_is_refused():
    made = [group(0, [1] * 20, [[2] * 20])]
    credits = credit_all(made)
    with pytest.raises(ValueError, match="40 tokens, a row only 32"):
        build_batch(made, credits, temperature=1.0, row_tokens=32)
    with pytest.raises(ValueError, match="needs row_tokens"):
        build_batch(made, credits, temperature=1.0, layout="packed")
    with pytest.raises(ValueError, match="room for 8"):
        build_batch(made, credits, temperature=1.0, shape=BatchShape(1, 64, 8, 1, 1))
    with pytest.raises(ValueError, match="fill 1 rows, the shape has 0"):
        build_batch(made, credits, temperature=1.0, shape=BatchShape(0, 64, 64, 1, 1))
    with pytest.raises(ValueError, match="row_tokens 16 can't hold"):
        plan_shape(layout="packed", num_prompts=1, num_generations=1, max_prompt_tokens=10, max_completion_tokens=10, row_tokens=16)


def test_mixed_support_and_a_sampled_prompt_are_refused():
    mixed = group(0, [1], [[2]])
    mixed.trajectories.append(episode([1], [3], sample=1, kept=2))
    with pytest.raises(ValueError, match="sample a batch in one way"):
        build_batch([mixed], credit_all([mixed]), temperature=1.0)
    wrong = group(0, [1], [[2]])
    wrong.trajectories[0].sampled[0] = True
    with pytest.raises(ValueError, match="marked as sampled"):
        build_batch([wrong], credit_all([wrong]), temperature=1.0)


def test_a_group_without_credit_keeps_the_shape_and_so_the_compiled_program():
    groups = [group(d, [1, 2], [[3], [4]]) for d in range(4)]
    credits = credit_all(groups)
    some = {key: value for key, value in credits.items() if key[0] != (0, 2)}
    for layout in ("shared", "padded"):
        assert fit_shape(groups, some, layout=layout) == fit_shape(groups, credits, layout=layout)


@pytest.mark.parametrize(("layout", "row_tokens"), LAYOUTS)
def test_what_is_taken_apart_by_sequence_goes_back_to_its_place(layout, row_tokens):
    groups = random_groups(2)
    credits = uncredited(groups, train_truncated=True)
    batch = build_batch(groups, credits, temperature=1.0, layout=layout, row_tokens=row_tokens)
    members = [t for g in groups for t in g.trajectories]
    parts = by_sequence(batch.target_ids, batch)
    assert set(parts) == {i for i, t in enumerate(members) if t.num_sampled} and len(parts) > 5
    for number, ids in parts.items():
        assert ids.tolist() == members[number].ids[members[number].sampled].tolist(), "in the order in which they were sampled"
    back = from_sequences({number: ids.astype(np.float32) for number, ids in parts.items()}, batch, fill=-1.0)
    np.testing.assert_array_equal(back, np.where(batch.mask, batch.target_ids, -1))
    assert back.dtype == np.float32


def test_one_advantage_an_episode_or_one_an_id_fill_the_same_places_B019():
    made = [group(0, [5], [[1, 2], [3, 4, 5]])]
    batch = build_batch(made, credit_all(made), temperature=1.0, layout="padded")
    for one, two in [(2.0, -1.0), (np.array([2.0]), np.array([-1.0])), (np.array([2.0, 2.0]), np.array([-1.0] * 3))]:
        filled = from_sequences({0: one, 1: two}, batch)
        assert filled[:, :4].tolist() == [[2, 2, 0, 0], [-1, -1, -1, 0]] and not filled[:, 4:].any()
        assert (
            build_batch(made, {((0, 0), 0): one, ((0, 0), 1): two}, temperature=1.0, layout="padded").advantages.tolist() == filled.tolist()
        )
    with pytest.raises(ValueError, match=r"sequence 0 has 2 scored ids and was given an array of shape \(1, 2\)"):
        from_sequences({0: np.array([[2.0, 2.0]]), 1: 0.0}, batch)


def test_numbers_for_another_batch_are_refused():
    made = [group(0, [5], [[1, 2], [3]])]
    batch = build_batch(made, credit_all(made), temperature=1.0)
    with pytest.raises(ValueError, match=r"only on one side: \[1, 7\]"):
        from_sequences({0: 1.0, 7: 1.0}, batch)
    with pytest.raises(ValueError, match="one number for each"):
        by_sequence(np.zeros((1, 2)), batch)
    empty = build_batch(made, {}, temperature=1.0)
    assert by_sequence(empty.mask, empty) == {} and not from_sequences({}, empty).any()


def test_segments_weigh_the_same_and_the_mask_is_boolean_B033():
    """Three episodes of two ids in one row: segment numbers 1, 2, 3 are no weights."""
    made = [group(d, [5], [[6, 7]]) for d in range(3)]
    batch = build_batch(made, credit_all(made, 1.0), temperature=1.0, layout="packed", row_tokens=9)
    assert batch.mask.dtype == bool and batch.segments[0, :9].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]

    def mean(values):
        return token_mean(values, batch).value()

    ones = np.ones(batch.mask.shape, np.float32)
    assert float(mean(ones)) == 1.0
    np.testing.assert_allclose(jax.grad(mean)(ones)[batch.mask], np.full(6, 1 / 6), rtol=1e-6)


# -------------------------------------------------------------------------------------------------- micro-batches of so many tokens


@pytest.mark.parametrize("rows_multiple", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_say_together_what_one_batch_says(seed, rows_multiple):
    groups = random_groups(seed, kept=3 if seed % 2 else 0)
    credits = credit_all(groups)
    for key in list(credits)[::5]:
        del credits[key]
    micros = build_micro_batches(groups, credits, temperature=0.7, tokens_per_device=27, rows_multiple=rows_multiple)
    assert {batch.tokens.shape for batch in micros} == {(rows_multiple, 27)}
    found = [read_back(batch) for batch in micros]
    assert {key: seen for each in found for key, seen in each.items()} == truth(groups, credits, 0.7)
    assert sum(len(each) for each in found) == len(truth(groups, credits, 0.7)), "an id is scored in one micro-batch"


def test_padding_rows_of_a_tail_weigh_nothing_B035():
    """Five rows on four devices: the second micro-batch has one real row, and its sums are that row's."""
    groups = [group(d, [1 + d] * 10, [[2] * 20]) for d in range(5)]
    micros = build_micro_batches(groups, credit_all(groups, 1.0), temperature=1.0, tokens_per_device=30, rows_multiple=4)
    assert [batch.mask.any(axis=1).tolist() for batch in micros] == [[True] * 4, [True, False, False, False]]
    tail = micros[1]
    per_token = np.where(tail.mask, 3.0, np.nan).astype(np.float32)
    for aggregate in (token_mean, sequence_mean, prompt_mean):
        mean = aggregate(per_token, tail)
        np.testing.assert_allclose([float(mean.value()), float(mean.total)], [3.0, 3.0 * float(mean.weight)], rtol=1e-6)


def test_no_more_micro_batches_than_the_tokens_need_and_rows_no_longer_than_that_takes():
    """10 episodes of 30 tokens, at most 100 a row: 4 rows of 3 hold them, where filling row by row would leave the last with one."""
    members = [t for g in [group(d, [1 + d] * 10, [[2] * 20]) for d in range(10)] for t in g.trajectories]
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=100)] == [[90], [90], [60], [60]]
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=100, rows_multiple=2)] == [[90, 90], [60, 60]]
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=100, rows_multiple=8)] == [[60, 60] + [30] * 6]
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=300)] == [[300]]


def test_a_group_is_split_where_devices_would_have_nothing_to_do():
    """One group of 8 completions fits a row; four devices take two each, with the prompt."""
    members = group(0, [1] * 10, [[2] * 25] * 8).trajectories
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=500, rows_multiple=4)] == [[60] * 4]
    assert [[len(row.tokens) for row in rows] for rows in cut(members, tokens=500)] == [[210]]


def test_work_is_balanced_by_attention_too():
    """As many tokens in one long context cost more than in two short ones, so the device with the long one gets fewer others."""
    lengths = [1000, 500, 500] + [100] * 6
    members = [t for d, n in enumerate(lengths) for t in group(d, [1 + d], [[2] * (n - 1)]).trajectories]

    def tokens(pairs_per_token: float) -> list[int]:
        (rows,) = cut(members, tokens=2000, rows_multiple=2, pairs_per_token=pairs_per_token)
        return [len(row.tokens) for row in rows]

    assert tokens(1e9) == [1300, 1300]
    assert tokens(500.0) == [1100, 1500], "the costlier first"


def test_cost_counts_the_pairs_that_attend():
    """Prompt 3, completions 2 and 1: each token sees itself, its own earlier ones and the prompt."""
    piece = group(0, [9, 9, 9], [[1, 1], [2]]).trajectories
    (row,) = lay_out(piece, layout="shared")
    visible = [(i, j) for i in range(6) for j in range(i + 1) if row.segments[j] in (row.segments[i], row.parents[i])]
    assert len(visible) == 6 + (4 + 5) + 4
    assert cost(piece, pairs_per_token=2.0) == 6 + len(visible) / 2


def test_bigger_steps_have_few_shapes_of_micro_batches():
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(30):
        groups = [group(d, [1] * 48, [[2] * int(rng.integers(8, 200)) for _ in range(4)]) for d in range(int(rng.integers(4, 12)))]
        micros = build_micro_batches(groups, credit_all(groups), temperature=1.0, tokens_per_device=1024)
        shapes |= {batch.tokens.shape + batch.mask.shape for batch in micros}
        tokens = sum(len(set(range(48))) + sum(len(t.ids) - 48 for t in g.trajectories) for g in groups)
        assert len(micros) <= -(-tokens // 1024) + 1
    assert len(shapes) <= 6, shapes


def test_no_episode_at_all_is_one_micro_batch_of_padding():
    made = [group(0, [5], [[1, 2]])]
    (batch,) = build_micro_batches(made, {}, temperature=1.0, tokens_per_device=500, rows_multiple=2)
    assert batch.tokens.shape == (2, 64) and not batch.mask.any() and (batch.num_sequences, batch.num_prompts) == (1, 1)
    with pytest.raises(ValueError, match="3 tokens, a row only 2"):
        build_micro_batches(made, credit_all(made), temperature=1.0, tokens_per_device=2)
