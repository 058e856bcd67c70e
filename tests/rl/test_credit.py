"""Locks who counts, which turn and which token a reward belongs to, and the values of the estimators over tokens."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rl.advantages import Advantages, WeightedReward, batch_normalised, gdpo, group_relative, leave_one_out
from burnish.rl.batch import build_batch, by_sequence, from_sequences
from burnish.rl.credit import (
    ScoredEpisode,
    TokenAdvantages,
    TokenEstimator,
    counts,
    credit,
    discounted_returns,
    episode_keys,
    gae,
    informative,
    kl_in_reward,
    returns_to_go,
    scored_episodes,
    token_rewards,
    turns,
    uncredited,
    whitened,
)
from burnish.testing.byte_tokenizer import make_byte_tokenizer
from burnish.text.codec import Codec
from burnish.types import Completion, Group, Prompt, Status, Step, StopReason, Trajectory
from tests.agentic.episodes import END, Talk, context, play, script

from .batches import episode, group


def played(
    lengths: list[int],
    step_rewards: list[float | None],
    final: float | None = None,
    *,
    sample: int = 0,
    draw: int = 0,
    status: Status = Status.OK,
) -> Trajectory:
    """An episode of turns that sampled `lengths` ids, with 2 of the environment's between them; `final` from a reward function "judge"."""
    rest, sampled, steps = [], [], []
    for number, length in enumerate(lengths):
        if number:
            rest, sampled = [*rest, 8, 9], [*sampled, False, False]
        ids = np.full(length, 20 + number, np.int32)
        completion = Completion(ids, np.zeros(length, np.float32), np.zeros(length, np.int32), StopReason.STOP_ID)
        steps.append(Step(np.array([5, 6, *rest], np.int32), completion, "", reward=step_rewards[number]))
        rest, sampled = [*rest, *ids.tolist()], [*sampled, *[True] * length]
    trajectory = episode([5, 6], rest, sampled, draw=draw, sample=sample, status=status)
    given = [reward for reward in step_rewards if reward is not None]
    trajectory.steps = steps
    trajectory.rewards = {"judge": final, **({"environment": sum(given)} if given else {})}
    trajectory.reward_weights = {"judge": 0.5, "environment": 1.0}
    applying = given + ([] if final is None else [0.5 * final])
    trajectory.reward = float(sum(applying)) if applying else None
    return trajectory


def of(*members: Trajectory, draw: int = 0) -> Group:
    return Group((0, draw), Prompt(f"p{draw}", ()), list(members))


def scored(rewards, values=None, kl=None, **options) -> ScoredEpisode:
    rewards = np.array(rewards, np.float32)
    options = {"group": (0, 0), "sample": 0, "reward": float(rewards.sum())} | options
    as_array = (None if x is None else np.array(x, np.float32) for x in (values, kl))
    return ScoredEpisode(token_rewards=rewards, **dict(zip(("values", "kl"), as_array, strict=True)), **options)


# --------------------------------------------------------------------------------------------------------------------------- who counts


@pytest.mark.parametrize("train_truncated", [True, False])
def test_credit_goes_to_episodes_that_ended_and_have_a_reward(train_truncated):
    members = [
        episode([5], [6], reward=1.0),
        episode([5], [6], sample=1, reward=0.0),
        episode([5], [6], sample=2, reward=0.5, status=Status.TRUNCATED),
        episode([5], [6], sample=3, reward=9.0, status=Status.ENV_ERROR),
        episode([5], [6], sample=4, reward=None),
        episode([5], [6], sample=5, reward=float("nan")),
        episode([5], [], sample=6, reward=9.0),
    ]
    given = credit([of(*members)], group_relative, train_truncated=train_truncated)
    assert sorted(sample for _, sample in given) == ([0, 1, 2] if train_truncated else [0, 1])
    assert given[(0, 0), 0] == pytest.approx(0.999998 if train_truncated else 0.7071058, abs=1e-5)
    assert uncredited([of(*members)], train_truncated=train_truncated) == dict.fromkeys(given, 0.0)


def test_an_episode_that_sampled_nothing_counts_for_nobody_B013():
    assert not counts(episode([5], [], reward=1.0), train_truncated=True)
    assert counts(episode([5], [6], reward=1.0), train_truncated=True)


def test_informative_groups_are_those_with_an_advantage():
    groups = [group(0, [1], [[2], [3]]), group(1, [1], [[2], [3]]), group(2, [1], [[2], [3]], reward=None)]
    groups[1].trajectories[0].reward = 0.0
    credits = credit(groups, group_relative, train_truncated=True)
    assert [g.id for g in informative(groups, credits)] == [(0, 1)]
    assert len(credits) == 4, "no signal isn't no loss: who wants such groups out takes them out"
    normalised = credit(groups, batch_normalised, train_truncated=True)
    assert [g.id for g in informative(groups, normalised)] == [(0, 0), (0, 1)], "the batch tells a constant group something"
    assert informative(groups[:1], {}) == []


def test_gdpo_finds_signal_where_different_rewards_sum_to_the_same():
    members = [episode([5], [6], sample=i) for i in range(2)]
    for t, (right, short) in zip(members, [(1.0, 0.0), (0.0, 1.0)], strict=True):
        t.rewards, t.reward_weights, t.reward = {"right": right, "short": short}, {"right": 1.0, "short": 1.0}, 1.0
    assert not informative([of(*members)], credit([of(*members)], group_relative, train_truncated=True))
    for t in members:
        t.reward_weights["short"] = 0.5
    members[0].reward, members[1].reward = 1.0, 0.5
    given = credit([of(*members)], gdpo, train_truncated=True)
    assert given[(0, 0), 0] == pytest.approx(0.707106, abs=1e-5) and given[(0, 0), 1] == -given[(0, 0), 0]


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2,)])
def test_an_estimator_must_answer_one_number_an_episode_B019(shape):
    def wrong(rewards, group_ids, /, *, valid):
        return Advantages(np.zeros(shape, np.float32), valid)

    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        credit([group(0, [1], [[2], [3], [4]])], wrong, train_truncated=True)


# --------------------------------------------------------------------------------------------------------------------------------- turns


def test_what_turns_earn_and_what_follows_them():
    """Step rewards 1 and 2, a judge's 1.0 at weight .5, discount .9."""
    t = played([2, 3], [1.0, 2.0], 1.0)
    assert t.reward == 3.5
    assert [(turn.index, turn.start, turn.end) for turn in turns(t)] == [(0, 0, 2), (1, 2, 5)]

    def seen(rewards, group_ids, /, *, valid):
        return Advantages(np.array(rewards, np.float32), valid)

    for per, expected in {"turn": [1.0, 2.5], "return_to_go": [3.25, 2.5]}.items():
        got = credit([of(t)], seen, train_truncated=True, per=per, gamma=0.9)[(0, 0), 0]
        np.testing.assert_allclose(got, np.repeat(expected, [2, 3]), rtol=1e-6)
    assert credit([of(t)], seen, train_truncated=True) == {((0, 0), 0): 3.5}
    assert [turn.parts for turn in returns_to_go(turns(t), gamma=0.5)] == [
        {"environment": 2.0, "judge": 0.5},
        {"environment": 2.0, "judge": 1.0},
    ]


def test_turns_are_compared_with_the_same_turn_of_their_siblings():
    """First turns 1, 0, 2; second turns 4 and 2; the one third turn stands alone."""
    members = [played([1, 2], [1.0, 4.0]), played([2, 1, 1], [0.0, 2.0, 7.0], sample=1), played([3], [2.0], sample=2)]
    got = credit([of(*members)], functools.partial(group_relative, scale="none"), train_truncated=True, per="turn")
    assert {sample: values.tolist() for (_, sample), values in got.items()} == {0: [0, 1, 1], 1: [-1, -1, -1, 0], 2: [1, 1, 1]}


def test_a_turn_without_reward_is_in_no_baseline():
    members = [played([1, 1], [None, 1.0]), played([1, 1], [3.0, 0.0], sample=1), played([1, 1], [1.0, 0.5], sample=2)]
    got = credit([of(*members)], functools.partial(group_relative, scale="none"), train_truncated=True, per="turn")
    assert {sample: values.tolist() for (_, sample), values in got.items()} == {0: [0, 0.5], 1: [1, -0.5], 2: [-1, 0]}
    to_go = credit([of(*members)], leave_one_out, train_truncated=True, per="return_to_go")
    np.testing.assert_allclose([to_go[(0, 0), sample][0] for sample in range(3)], [-1.25, 1.75, -0.5])


def test_equal_turns_are_exactly_zero_whatever_else_differs():
    """.1 + .7 - .1 isn't .7 in floats: what a turn earned must not be a difference of sums."""
    members = [played([1, 1], [0.1, None], 0.7), played([1, 1], [0.3, None], 0.7, sample=1), played([1, 1], [0.2, None], 0.7, sample=2)]
    got = credit([of(*members)], group_relative, train_truncated=True, per="turn")
    assert [got[(0, 0), sample][1] for sample in range(3)] == [0.0] * 3


def test_a_turn_that_sampled_nothing_leaves_its_reward_to_its_neighbour():
    assert [(t.index, t.parts) for t in turns(played([2, 0, 1], [1.0, 2.0, 4.0]))] == [(0, {"environment": 3.0}), (2, {"environment": 4.0})]
    assert [(t.index, t.parts) for t in turns(played([0, 2, 0], [1.0, 2.0, 4.0]))] == [(1, {"environment": 7.0})]
    assert turns(played([0], [1.0])) == []


def test_turns_that_dont_fit_the_row_are_refused():
    broken = played([2, 2], [1.0, 1.0])
    broken.sampled[-1] = False
    with pytest.raises(ValueError, match="sampled 4 ids, but 3"):
        turns(broken)


def test_turns_of_a_played_episode_whose_second_was_cut(tmp_path):
    """Two turns of 100 in a budget that leaves 150: the second call is cut to 50 and still has its own ids and reward."""
    make_byte_tokenizer(tmp_path)
    codec = Codec.load(tmp_path)
    free = play(context(script(codec, "x" * 99, "y" * 200), codec, context=1000), Talk(says=("one", "two")), max_tokens=100)
    room = len(free.steps[1].prompt_ids) + 50
    cut = play(context(script(codec, "x" * 99, "y" * 200, context=room), codec, context=room), Talk(says=("one", "two")), max_tokens=100)
    assert cut.status is Status.TRUNCATED and cut.num_sampled == 150
    cut.reward = 1.0
    assert [(t.start, t.end, sum(t.parts.values())) for t in turns(cut)] == [(0, 100, 0.5), (100, 150, 0.5)]
    assert np.flatnonzero(token_rewards(cut)).tolist() == [99, 149]
    assert cut.ids[cut.sampled][[99, 149]].tolist() == [END, *codec.tokenizer.encode("y")]


@pytest.mark.parametrize("per", ["trajectory", "turn", "return_to_go"])
def test_episodes_of_one_turn_get_the_same_whatever_credit_is_per(per):
    members = [played([2], [None], value, sample=i) for i, value in enumerate([1.0, 0.25, 0.5])]
    got = credit([of(*members)], group_relative, train_truncated=True, per=per, gamma=0.5)
    one = credit([of(*members)], group_relative, train_truncated=True)
    assert {key: np.unique(value).tolist() for key, value in got.items()} == {key: [value] for key, value in one.items()}


# -------------------------------------------------------------------------------------------------------------------------------- tokens


def test_a_reward_lies_on_the_last_sampled_id_of_its_turn_B013():
    assert token_rewards(episode([1], [7, 8, 2], reward=1.0)).tolist() == [0, 0, 1]
    assert token_rewards(episode([1], [7, 8, 2, 0, 0], [1, 1, 1, 0, 0], reward=1.0)).tolist() == [0, 0, 1], "not on what follows"
    assert token_rewards(played([2, 3], [1.0, 2.0], 1.0)).tolist() == [0, 1, 0, 0, 2.5]
    assert token_rewards(played([1, 2], [None, None], 1.0)).tolist() == [0, 0, 0.5]
    with pytest.raises(ValueError, match="sampled nothing"):
        token_rewards(episode([1], [], reward=1.0))


def test_a_reward_of_unknown_origin_lies_on_the_last_turn():
    t = played([1, 1], [1.0, None])
    t.rewards, t.reward = {}, 3.0
    assert token_rewards(t).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("rewards", "values", "advantages", "returns"),
    [
        ([0, 0, 1], [0.1, 0.2, 0.3], [0.82675, 0.765, 0.7], [0.92675, 0.965, 1.0]),
        ([0, 0, 1], [0.5, 0.5, 0.5], [0.45125, 0.475, 0.5], [0.95125, 0.975, 1.0]),
    ],
)
def test_gae_values_B017(rewards, values, advantages, returns):
    (got,) = gae([scored(rewards, values)], gamma=1.0, lam=0.95, whiten=False)
    np.testing.assert_allclose(got.advantages, advantages, atol=1e-6)
    np.testing.assert_allclose(got.returns, returns, atol=1e-6)
    assert got.advantages.dtype == np.float32


def test_gae_whitens_advantages_and_never_returns():
    (got,) = gae([scored([0, 0, 1], [0.1, 0.2, 0.3])], gamma=1.0, lam=0.95, whiten=True)
    np.testing.assert_allclose(got.advantages, [0.99134, 0.01709, -1.00844], atol=1e-4)
    np.testing.assert_allclose(got.returns, [0.92675, 0.965, 1.0], atol=1e-6)


def test_gae_bootstraps_only_where_the_episode_was_cut_B017():
    """gamma .5, lambda 1: the last delta is 1 - .4, and + .5 * 2 if more would have followed."""
    for truncated, last in ((False, 0.6), (True, 1.6)):
        (got,) = gae([scored([0, 1], [0.2, 0.4], last_value=2.0, truncated=truncated)], gamma=0.5, lam=1.0, whiten=False)
        np.testing.assert_allclose(got.advantages, [0.5 * 0.4 - 0.2 + 0.5 * last, last], atol=1e-6)


def test_gae_at_its_ends_is_monte_carlo_and_one_step():
    rewards, values = np.array([0.5, 0, 1]), np.array([0.3, -0.2, 0.6])
    (monte_carlo,) = gae([scored(rewards, values)], gamma=0.9, lam=1.0, whiten=False)
    np.testing.assert_allclose(monte_carlo.returns, [0.5 + 0.81, 0.9, 1.0], atol=1e-6)
    (one_step,) = gae([scored(rewards, values)], gamma=0.9, lam=0.0, whiten=False)
    np.testing.assert_allclose(one_step.advantages, rewards + 0.9 * np.array([-0.2, 0.6, 0]) - values, atol=1e-6)


def test_gae_takes_the_penalty_of_each_id_from_its_reward():
    (got,) = gae([scored([0, 1], [0, 0], kl=[0.25, 0.5])], gamma=1.0, lam=1.0, whiten=False)
    np.testing.assert_allclose(got.returns, [0.25, 0.5], atol=1e-7)
    with pytest.raises(ValueError, match="needs the critic's values"):
        gae([scored([0, 1])])


def test_whitening_one_id_or_none_is_finite_B015():
    (got,) = gae([scored([3], [0])], whiten=True)
    assert got.advantages.tolist() == [0.0] and got.returns.tolist() == [3.0]
    assert gae([], whiten=True) == []
    assert [a.tolist() for a in whitened([np.array([0.7] * 3), np.zeros(0), np.array([0.7])])] == [[0, 0, 0], [], [0]]
    assert whitened([]) == []


def test_whitening_is_over_the_ids_of_all_episodes():
    got = np.concatenate(whitened([np.array([1.0, 2.0]), np.array([6.0])]))
    np.testing.assert_allclose(got, [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5], rtol=1e-6)


def test_discounted_returns_are_the_reward_less_the_penalties_that_follow():
    """R = r - sum of kl from here on: 1 - .6, 1 - .5, 1 - .3 and 0 - .1; mean .375, squares sum to .3075 / 3 about it."""
    episodes = [scored([0, 0, 1], kl=[0.1, 0.2, 0.3]), scored([0], kl=[0.1], sample=1)]
    raw = np.array([0.4, 0.5, 0.7, -0.1])
    got = np.concatenate([a.advantages for a in discounted_returns(episodes)])
    np.testing.assert_allclose(got, (raw - 0.375) / np.sqrt(np.sum((raw - 0.375) ** 2) / 3 + 1e-8), rtol=1e-5)
    discounted = np.concatenate([a.advantages for a in discounted_returns(episodes, gamma=0.5)])
    raw = np.array([-0.1 + 0.5 * (-0.2 + 0.35), -0.2 + 0.35, 0.7, -0.1])
    np.testing.assert_allclose(discounted, (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5)
    assert all(a.returns is None for a in discounted_returns(episodes))


def test_discounted_returns_with_a_baseline_compare_whole_episodes_of_a_group():
    episodes = [scored([0, r], group=(0, g), sample=i) for i, (r, g) in enumerate([(1, 0), (0, 0), (5, 1), (5, 1), (0.7, 2)])]
    got = [a.advantages.tolist() for a in discounted_returns(episodes, baseline=True)]
    assert got[2:] == [[0, 0]] * 3
    np.testing.assert_allclose(got[:2], [[1.5, 1.5], [-1.5, -1.5]], rtol=1e-6)  # +-.5, whose deviation over ten ids is 1/3
    same = [scored([0.1, 0.7], group=(0, 0), sample=i) for i in range(3)]
    assert all(a.advantages.tolist() == [0, 0] for a in discounted_returns(same, baseline=True)), "no signal is exactly none"


def test_kl_in_reward_asks_the_estimator_about_penalised_episodes():
    episodes = [scored([0, 1], kl=[0.2, 0.3], sample=0), scored([0], kl=[0.1], sample=1), scored([1, 0, 0], kl=[0, 0, 0.5], sample=2)]
    got = kl_in_reward(episodes, estimator=leave_one_out)
    expected = leave_one_out([0.5, -0.1, 0.5], ["g"] * 3, valid=np.ones(3, bool)).values
    assert [a.advantages.shape for a in got] == [(2,), (1,), (3,)]
    for answer, value in zip(got, expected, strict=True):
        np.testing.assert_allclose(answer.advantages, value, rtol=1e-5)


def test_only_a_limit_that_came_before_the_environments_end_is_bootstrapped():
    """A last turn that was cut, but that the environment took as the end, is an end: else being cut would pay."""
    for done, status, expected in ((True, Status.TRUNCATED, False), (False, Status.TRUNCATED, True), (True, Status.OK, False)):
        t = played([1, 2], [None, 1.0], status=status)
        t.reward, t.steps[-1].done = 1.0, done
        assert scored_episodes([of(t)], [0])[0].truncated is expected


def test_no_penalty_in_the_reward_is_the_estimator_itself():
    groups = [group(0, [1], [[2, 3], [4], [5]]), group(1, [1], [[2], [3, 4, 5]])]
    for number, t in enumerate(t for g in groups for t in g.trajectories):
        t.reward = [0.7, 0.1, 0.7, 0.3, 0.3][number]
    credits = credit(groups, group_relative, train_truncated=True)
    episodes = scored_episodes(groups, range(5), kl={i: np.zeros(t.num_sampled) for i, t in enumerate(_members(groups))})
    for e, answer in zip(episodes, kl_in_reward(episodes, estimator=group_relative), strict=True):
        assert set(answer.advantages.tolist()) == {credits[e.group, e.sample]}


def test_gdpo_in_the_trainer_needs_rewards_without_a_penalty():
    episodes = scored_episodes([of(played([1], [None], 1.0), played([1], [None], 0.0, sample=1))], [0, 1])
    assert isinstance(episodes[0].reward, WeightedReward)
    assert kl_in_reward(episodes, estimator=gdpo)[0].advantages[0] == pytest.approx(0.7071, abs=1e-4)
    with pytest.raises(TypeError, match="bare reward"):
        kl_in_reward([scored([1.0], kl=[0.1])], estimator=gdpo)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1,), ()])
def test_a_token_estimator_must_answer_one_number_an_id_B019(shape):
    wrong = TokenEstimator(lambda episodes: [TokenAdvantages(np.zeros(shape, np.float32)) for _ in episodes])
    with pytest.raises(ValueError, match=r"shape \(2,\); got"):
        wrong([scored([0, 1])])
    with pytest.raises(ValueError, match="answered 0 times for 1"):
        TokenEstimator(lambda episodes: [])([scored([0, 1])])


# ----------------------------------------------------------------------------------------------------------------- into a batch and back


def _members(groups: list[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


def _values(t: Trajectory) -> np.ndarray:
    """A critic that knows an episode by its name: a value for each sampled id."""
    return (np.arange(t.num_sampled) * 0.1 + t.group[1] + 0.01 * t.sample).astype(np.float32)


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_token_advantages_dont_depend_on_micro_batches_or_layout(layout, micro):
    """Build, estimate over the whole mini-batch, scatter: each id gets what its episode got, however the mini-batch is cut."""
    groups = [
        of(played([2, 3], [1.0, 2.0], 1.0), played([1], [0.5], sample=1), draw=0),
        of(played([4], [None], 0.3, draw=1), played([2], [None], None, draw=1, sample=1), draw=1),
        of(
            played([1, 1], [0.0, 1.0], draw=2, status=Status.TRUNCATED),
            played([3], [1.0], draw=2, status=Status.ENV_ERROR, sample=1),
            draw=2,
        ),
    ]
    credits = uncredited(groups, train_truncated=True)
    assert len(credits) == 4
    parts = [groups[i : i + micro] for i in range(0, 3, micro)]
    batches = [build_batch(part, credits, temperature=1.0, layout=layout) for part in parts]
    episodes = []
    for part, batch in zip(parts, batches, strict=True):
        numbered = dict(enumerate(_members(part)))
        present = by_sequence(batch.sampler_logps, batch)
        scores = from_sequences({i: _values(numbered[i]) for i in present}, batch)
        values = by_sequence(scores, batch)
        episodes += scored_episodes(part, present, values=values, last_values={i: float(v[-1]) for i, v in values.items()})
    estimator = TokenEstimator(functools.partial(gae, gamma=0.9, lam=0.8, whiten=True))
    answers = {(e.group, e.sample): answer for e, answer in zip(episodes, estimator(episodes), strict=True)}
    assert answers.keys() == credits.keys()
    placed = {}
    for part, batch in zip(parts, batches, strict=True):
        keys = episode_keys(part)
        filled = from_sequences({i: answers[keys[i]].advantages for i in by_sequence(batch.mask, batch)}, batch)
        assert not filled[~batch.mask].any()
        placed |= {keys[i]: values for i, values in by_sequence(filled, batch).items()}
    whole = [e for e in (_scored_alone(t) for t in _members(groups)) if (e.group, e.sample) in credits]
    for e, expected in zip(whole, estimator(whole), strict=True):
        np.testing.assert_allclose(placed[e.group, e.sample], expected.advantages, rtol=1e-6)
    total = np.concatenate(list(placed.values()))
    assert abs(total.mean()) < 1e-6 and total.std(ddof=1) == pytest.approx(1, abs=1e-5)


def _scored_alone(t: Trajectory) -> ScoredEpisode:
    values, reward = _values(t), 0.0 if t.reward is None else t.reward
    return ScoredEpisode(t.group, t.sample, reward, token_rewards(t), t.status is Status.TRUNCATED, values, float(values[-1]))


EPISODES = st.lists(st.lists(st.sampled_from([0.0, 0.5, -1.0, 3.0]), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(EPISODES, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_laws_of_gae(rewards, gamma, lam, whiten):
    """Returns are advantages before whitening plus values; order of the episodes doesn't matter; perfect values leave nothing to learn."""
    episodes = [scored(r, np.arange(len(r)) / 4, sample=i) for i, r in enumerate(rewards)]
    got = gae(episodes, gamma=gamma, lam=lam, whiten=whiten)
    for e, raw, answer in zip(episodes, gae(episodes, gamma=gamma, lam=lam, whiten=False), got, strict=True):
        np.testing.assert_allclose(answer.returns, raw.advantages + e.values, atol=1e-5)
        assert np.isfinite(answer.advantages).all()
    for answer, moved in zip(got[::-1], gae(episodes[::-1], gamma=gamma, lam=lam, whiten=whiten), strict=True):
        np.testing.assert_allclose(answer.advantages, moved.advantages, atol=1e-5)
    perfect = [scored(r, gae([scored(r, np.zeros(len(r)))], gamma=gamma, lam=1.0, whiten=False)[0].returns) for r in rewards]
    assert all(abs(a.advantages).max() < 1e-5 for a in gae(perfect, gamma=gamma, lam=lam, whiten=False))
