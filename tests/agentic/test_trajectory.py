"""One episode, locked:

the sampler's ids are kept as sampled and never encoded again; between turns stands exactly the template's own text; only sampled ids are
marked as such; whatever the environment does becomes a status; it is closed exactly once; a failing engine is an exception.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from burnish.agentic.agents import Action, ModelAgent
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult, TaskEnvironment
from burnish.agentic.trajectory import TrajectoryCollectEngine
from burnish.config.errors import UserError
from burnish.config.schema import EpisodeLimits
from burnish.faults import armed
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import SamplingParams, Status, StopReason
from tests.agentic.episodes import END, Talk, context, play, script


def test_one_turn_is_the_prompt_and_what_was_sampled(codec: Codec) -> None:
    engine = script(codec, "Paris.", logp=-0.25, version=7)
    got = play(context(engine, codec), TaskEnvironment({"prompt": [{"role": "user", "content": "Capital?"}]}))
    prompt = codec.tokenizer.encode("<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    said = [*codec.tokenizer.encode("Paris."), END]
    assert got.ids.tolist() == prompt + said
    assert got.sampled.tolist() == [False] * len(prompt) + [True] * len(said)
    assert got.sampler_logps.tolist() == [0.0] * len(prompt) + [-0.25] * len(said)
    assert got.versions.tolist() == [-1] * len(prompt) + [7] * len(said)
    assert (got.prompt_length, got.status, got.group, got.sample, got.kept_ids) == (len(prompt), Status.OK, (3, 1), 0, None)
    assert got.messages == [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris."}]
    assert (got.final_text, got.steps[0].completion.stop, got.steps[0].done) == ("Paris.", StopReason.STOP_ID, True)


def test_sampled_ids_that_encoding_would_never_give_stay_as_they_are(codec: Codec) -> None:
    """The ids of a special token and of half a character, in the middle of a turn and before another turn."""
    odd = [*codec.tokenizer.encode("a"), 1, *codec.tokenizer.encode("é")[:1], END]
    engine = ScriptedEngine(lambda request: odd)
    got = play(context(engine, codec), Talk(says=("one", "two")))
    assert [got.ids[got.sampled].tolist()] == [odd + odd]
    assert codec.tokenizer.encode(got.steps[0].text) != odd[:-1]


def test_between_turns_stands_what_the_template_writes(codec: Codec) -> None:
    """Token in, token out: the row decodes to the template's rendering of the whole conversation, each special id once."""
    env = Talk(says=("one", "two", "three"))
    got = play(context(script(codec, "uno", "dos", "tres"), codec), env)
    written = codec.template.encode(got.messages, add_generation_prompt=False)
    newline = codec.tokenizer.encode("\n")
    assert [*got.ids.tolist(), *newline] == written
    assert codec.tokenizer.decode(got.ids[got.sampled].tolist(), skip_special=False) == "uno<|im_end|>dos<|im_end|>tres<|im_end|>"
    assert env.heard == ["uno", "dos", "tres"]
    assert [step.reward for step in got.steps] == [0.5, 0.5, 0.5]
    for step in got.steps:
        shown = len(step.prompt_ids)
        row = [*step.prompt_ids.tolist(), *step.completion.ids.tolist()]
        assert row == got.ids[: len(row)].tolist() and got.sampled[shown : len(row)].all() and not got.sampled[shown - 1]


def test_a_turn_that_was_cut_is_closed_by_masked_ids(codec: Codec) -> None:
    got = play(context(script(codec, "a long answer", "b"), codec), Talk(says=("one", "two")), max_tokens=6)
    text = codec.tokenizer.decode(got.ids.tolist(), skip_special=False)
    assert "assistant\na long<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in text
    assert codec.tokenizer.decode(got.ids[got.sampled].tolist(), skip_special=False) == "a longb<|im_end|>"
    assert [step.completion.stop for step in got.steps] == [StopReason.LENGTH, StopReason.STOP_ID]
    assert got.status is Status.OK


def test_what_the_environment_says_is_text_even_where_it_looks_like_a_special_token(codec: Codec) -> None:
    got = play(context(script(codec, "a", "b"), codec), Talk(says=("one", "two<|im_end|>three")))
    assert int((got.ids == END).sum()) == 4  # two of the user's turns, two of the model's; none from the text


@pytest.mark.parametrize(
    "max_tokens, room, status, stop",
    [
        (50, 400, Status.OK, StopReason.STOP_ID),
        (6, 400, Status.TRUNCATED, StopReason.LENGTH),
        (50, 30, Status.TRUNCATED, StopReason.CONTEXT),
    ],
)
def test_an_answer_that_was_cut_is_truncated(codec: Codec, max_tokens: int, room: int, status: Status, stop: StopReason) -> None:
    got = play(context(script(codec, "twelve bytes", context=room), codec, context=room), Talk(), max_tokens=max_tokens)
    assert (got.status, got.steps[0].completion.stop, got.error) == (status, stop, None)


def test_an_episode_that_has_filled_the_context_is_truncated_without_another_request(codec: Codec) -> None:
    engine = script(codec, "uno", "dos")
    got = play(context(engine, codec, context=70), Talk(says=("one", "x" * 40)))
    assert (got.status, len(got.steps)) == (Status.TRUNCATED, 1)


def test_an_episode_ends_as_truncated_at_max_steps(codec: Codec) -> None:
    env = Talk(says=("one", "two", "three"), max_steps=2)
    got = play(context(script(codec, "uno", "dos", "tres"), codec), env)
    assert (got.status, len(got.steps), env.closed) == (Status.TRUNCATED, 2, 1)


def test_the_kept_set_of_each_sampled_id_travels_along(codec: Codec) -> None:
    got = play(context(script(codec, "ab", "c"), codec), Talk(says=("one", "two")), top_p=0.9)
    assert got.kept_ids is not None and got.kept_ids.shape == (len(got.ids), 1)
    assert got.kept_ids[got.sampled, 0].tolist() == got.ids[got.sampled].tolist()
    assert set(got.kept_ids[~got.sampled, 0].tolist()) == {-1}


def test_every_turn_has_its_own_noise(codec: Codec) -> None:
    seen: list[tuple[int, ...]] = []

    def reply(request: Any) -> list[int]:
        seen.append(request.seed_path)
        return [5, END]

    play(context(ScriptedEngine(reply), codec), Talk(says=("one", "two")), seed_path=(9, 3, 1, 4))
    assert seen == [(9, 3, 1, 4, 0), (9, 3, 1, 4, 1)]


def raises(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize("method, steps", [("reset", 0), ("step", 1)])
@pytest.mark.parametrize("error", [ValueError("no board"), TimeoutError("socket"), SystemExit(3), StopIteration("end")], ids=repr)
def test_an_environment_that_raises_is_a_status_with_the_place(codec: Codec, method: str, steps: int, error: BaseException) -> None:
    env = Talk(faults={method: raises(error)})
    got = play(context(script(codec, "ab"), codec), env)
    assert (got.status, len(got.steps), env.closed) == (Status.ENV_ERROR, steps, 1)
    assert got.reward is None and got.error is not None
    assert got.error.startswith(f"{type(error).__name__}: {error} (test_trajectory.py:")


def test_an_error_in_closing_doesnt_undo_the_episode(codec: Codec) -> None:
    env = Talk(faults={"close": raises(OSError("gone"))})
    assert play(context(script(codec, "ab"), codec), env).status is Status.OK
    assert env.closed == 1


@pytest.mark.parametrize("method", ["reset", "step", "close"])
def test_an_environment_that_hangs_is_left_behind(codec: Codec, method: str) -> None:
    """R26: within the limit, closed once even so, and the process doesn't wait for the thread."""
    release = threading.Event()
    env = Talk(faults={method: lambda: release.wait(30)})
    start = time.monotonic()
    try:
        got = play(context(script(codec, "ab"), codec, limits={"step_timeout_s": 0.1}), env)
    finally:
        release.set()
    assert time.monotonic() - start < 5
    assert env.closed == 1
    assert got.status is (Status.OK if method == "close" else Status.ENV_TIMEOUT)
    assert method == "close" or got.error == f"{Talk.__qualname__}.{'_step_impl' if method == 'step' else '_initial_observation'} took " + (
        "longer than 0.1 s"
    )


def test_a_plain_environment_lives_on_one_thread_of_its_own(codec: Codec) -> None:
    before = set(threading.enumerate())
    env = Talk(says=("one", "two"))
    play(context(script(codec, "a", "b"), codec), env)
    assert len(env.threads) == 1 and threading.get_ident() not in env.threads
    deadline = time.monotonic() + 5
    while not set(threading.enumerate()) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


class Coroutines(BaseTaskEnv):
    """An environment whose methods are coroutines."""

    def __init__(self, error: BaseException | None = None, delay_s: float = 0.0) -> None:
        super().__init__({})
        self.error, self.delay_s, self.closed = error, delay_s, 0

    async def _initial_observation(self) -> str:
        return "hi"

    async def _step_impl(self, action: Action) -> EnvStepResult:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return EnvStepResult("", 1.0, True)

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    "env, status",
    [
        (Coroutines(), Status.OK),
        (Coroutines(delay_s=30), Status.ENV_TIMEOUT),
        (Coroutines(ValueError("x")), Status.ENV_ERROR),
        (Coroutines(TimeoutError("its own")), Status.ENV_ERROR),
        (Coroutines(SystemExit(1)), Status.ENV_ERROR),
        (Coroutines(asyncio.CancelledError("its own")), Status.ENV_ERROR),
    ],
)
def test_coroutines_are_awaited_within_the_same_limit(codec: Codec, env: Coroutines, status: Status) -> None:
    assert play(context(script(codec, "ab"), codec, limits={"step_timeout_s": 0.1}), env).status is status
    assert env.closed == 1


def test_injected_faults_strike_at_each_method(codec: Codec) -> None:
    for point in ("env.reset", "env.step"):
        with armed(f"{point}:raise"):
            got = play(context(script(codec, "ab"), codec), Talk())
        assert got.status is Status.ENV_ERROR and got.error is not None and "InjectedFault" in got.error


@pytest.mark.parametrize("failing", ["engine", "agent"])
def test_what_is_no_environments_failure_is_an_exception(codec: Codec, failing: str) -> None:
    class Deaf(ModelAgent):
        def update_from_model(self, response: str) -> Action:
            raise KeyError("tool")

    env = Talk()
    broken = ScriptedEngine(lambda request: [])
    episode = context(broken if failing == "engine" else script(codec, "a"), codec)
    with pytest.raises(ValueError, match="empty reply") if failing == "engine" else pytest.raises(KeyError, match="tool"):
        play(episode, env, agent=None if failing == "engine" else Deaf())
    assert env.closed == 1


def test_a_cancelled_episode_closes_its_environment(codec: Codec) -> None:
    env = Talk()
    episode = context(script(codec, "ab", latency_s=lambda request: 30.0), codec)

    async def cancel_it() -> None:
        collector = TrajectoryCollectEngine(episode, params=SamplingParams(5), seed_path=(0,))
        task = asyncio.create_task(collector.collect(ModelAgent(), env, group=(0, 0), sample=0))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_it())
    assert env.closed == 1


def test_b069_a_prompt_over_the_limit_follows_the_one_policy(codec: Codec) -> None:
    """B069: dropped (never sampled, counted as aborted), cut on the left, or an error; never cut silently."""
    engine = script(codec, "ab")
    whole = play(context(engine, codec), Talk(says=("0123456789",))).ids
    length = len(codec.template.encode([{"role": "user", "content": "0123456789"}]))

    dropped = play(context(engine, codec, max_prompt_tokens=length - 1), Talk(says=("0123456789",)))
    assert (dropped.status, len(dropped.ids), dropped.steps) == (Status.ABORTED, 0, [])
    assert dropped.error == f"the prompt is longer than {length - 1} tokens"

    cut = play(context(engine, codec, max_prompt_tokens=8, overlong_prompts="left"), Talk(says=("0123456789",)))
    assert cut.status is Status.OK and cut.prompt_length == 8
    assert cut.ids.tolist() == whole[length - 8 :].tolist()

    env = Talk(says=("0123456789",))
    with pytest.raises(UserError, match="limit is 8"):
        play(context(engine, codec, max_prompt_tokens=8, overlong_prompts="error"), env)
    assert env.closed == 1


def test_the_agents_system_prompt_takes_the_place_of_the_tasks() -> None:
    agent = ModelAgent("be brief")
    agent.reset()
    agent.update_from_env([{"role": "system", "content": "be long"}, {"role": "user", "content": "hi"}])
    assert [message["content"] for message in agent.messages] == ["be brief", "hi"]


def test_a_step_after_the_end_is_refused() -> None:
    env = Talk()
    env.done = True
    with pytest.raises(RuntimeError, match="after its episode had ended"):
        env.check_step()


def test_a_step_that_returns_something_else_is_the_environments_error(codec: Codec) -> None:
    class Forgot(Talk):
        def _step_impl(self, action: Action) -> Any:
            return None

    env = Forgot()
    got = play(context(script(codec, "a"), codec), env)
    assert (got.status, env.closed) == (Status.ENV_ERROR, 1)
    assert got.error is not None and "Forgot._step_impl must return an EnvStepResult, got NoneType" in got.error


# ---------------------------------------------------------------------------------------------------------------------------- limits


def test_the_response_budget_cuts_the_last_turn_to_what_is_left(codec: Codec) -> None:
    """Budget 150, turns of 100 and 100: the second is cut to 50, the environment hears it, and the episode is truncated."""
    env = Talk(says=("one", "two", "three"))
    turns = ("a" * 99, "b" * 99, "c")
    got = play(context(script(codec, *turns), codec, limits={"max_tokens": 150}), env, max_tokens=100)
    assert [len(step.completion.ids) for step in got.steps] == [100, 50] and got.num_sampled == 150
    assert (got.status, got.steps[1].completion.stop) == (Status.TRUNCATED, StopReason.LENGTH)
    assert env.heard == ["a" * 99, "b" * 50] and env.closed == 1


def test_turns_are_limited_by_the_run_unless_the_environment_has_a_limit(codec: Codec) -> None:
    for own, run, turns in ((None, 2, 2), (3, 2, 3), (1, 2, 1)):
        env = Talk(says=("a", "b", "c", "d"))
        env.max_steps = own
        got = play(context(script(codec, *"wxyz"), codec, limits={"max_turns": run}), env)
        assert (got.status, len(got.steps)) == (Status.TRUNCATED, turns)


@pytest.mark.parametrize("name", ["step_timeout_s", "episode_timeout_s", "lost_after_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True])
def test_b087_time_limits_are_finite_and_positive_or_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EpisodeLimits.model_validate({name: value})
    assert getattr(EpisodeLimits.model_validate({name: None}), name) is None


def test_what_was_said_after_the_last_turn_is_no_part_of_the_row(codec: Codec) -> None:
    """It may be longer than any row, and nothing was sampled after it."""
    got = play(context(script(codec, "uno", "dos"), codec, context=70), Talk(says=("one", "x" * 1000)))
    assert got.status is Status.TRUNCATED and got.sampled[-1] and len(got.ids) < 70


@pytest.mark.parametrize("said", [None, 5, ["text"], [{"content": "no role"}]])
@pytest.mark.parametrize("method", ["_initial_observation", "_step_impl"])
def test_an_observation_that_is_neither_text_nor_messages_is_the_environments_error(codec: Codec, method: str, said: Any) -> None:
    env = Talk(says=("one", "two"))
    answer = said if method == "_initial_observation" else EnvStepResult(said, None, False)
    setattr(env, method, lambda *action: answer)
    got = play(context(script(codec, "a"), codec), env)
    assert (got.status, env.closed) == (Status.ENV_ERROR, 1)
    assert got.error is not None and got.error.startswith("Talk must say a string or a list of messages, got ")


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_episode_has_a_time_limit_of_its_own(codec: Codec, method: str) -> None:
    release = threading.Event()
    env = Talk(faults={method: lambda: release.wait(30)})
    try:
        got = play(context(script(codec, "ab"), codec, limits={"episode_timeout_s": 0.2}), env)
    finally:
        release.set()
    assert (got.status, got.error, env.closed) == (Status.ENV_TIMEOUT, "the episode took longer than 0.2 s", 1)
