"""Programs that are started for an episode and play it over HTTP: what they asked is what is trained, and their end is the episode's."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from burnish.agentic.agents import ConversationAgentBase, ModelAgent
from burnish.agentic.calls import Calls
from burnish.agentic.orchestrator import Draw, RolloutOrchestrator
from burnish.agentic.programs import ProgramEnvironment
from burnish.agentic.workers import WorkerPool
from burnish.config.errors import UserError
from burnish.rewards.manager import RewardManager
from burnish.rollout.scripted import ScriptedEngine
from burnish.text.codec import Codec
from burnish.types import Completion, Group, Prompt, Request, SamplingParams, Status, Trajectory
from tests.agentic.episodes import END, context
from tests.api_agents import TURNS, anthropic_agent, openai_agent
from tests.listening import listeners

ROW = {"role": "user", "content": "2+3?"}


class Keeping(ScriptedEngine):
    """Says the n-th text in the n-th turn of each episode, and keeps what it was asked and what it said, by episode."""

    def __init__(self, codec: Codec, texts: Sequence[str]) -> None:
        self.kept: dict[tuple[int, ...], list[tuple[Request, Completion]]] = {}

        def reply(request: Request) -> list[int]:
            return [*codec.tokenizer.encode(texts[request.seed_path[-1] % len(texts)]), END]

        super().__init__(reply, decode_text=codec.tokenizer.decode, version=4)

    async def generate(self, request: Request) -> Completion:
        out = await super().generate(request)
        self.kept.setdefault(request.seed_path[:-1], []).append((request, out))
        return out


def play(
    codec: Codec,
    program: Any,
    *,
    says: Sequence[str] = ("one", "two"),
    samples: int = 1,
    agent: Callable[[], ConversationAgentBase] = ModelAgent,
    limits: Mapping[str, Any] = {},
    pool: WorkerPool | None = None,
    engine: Keeping | None = None,
    **columns: Any,
) -> Group:
    """The group of one draw of the row."""
    engine = engine or Keeping(codec, says)
    told = context(engine, codec, context=6000, max_prompt_tokens=3000, limits={"step_timeout_s": 60.0} | dict(limits), calls=Calls(pool))
    orchestrator = RolloutOrchestrator(
        told,
        RewardManager([]),
        make_agent=agent,
        make_env=lambda prompt: ProgramEnvironment({**prompt.meta, "prompt": list(prompt.messages)}, program=program),
        max_concurrency=100,
    )
    params = SamplingParams(300, stop_ids=(END,))
    draw = Draw((5, 0), Prompt("p", (ROW,), columns), (params,) * samples, (11, 5, 0))

    async def everything() -> Group:
        (group,) = [group async for group in orchestrator.groups([draw])]
        return group

    with ThreadPoolExecutor(1) as producer:  # in a run, too, episodes aren't played on the main thread
        return producer.submit(asyncio.run, everything()).result()


def alone(*args: Any, **options: Any) -> Trajectory:
    (trajectory,) = play(*args, **options).trajectories
    return trajectory


def ask(base_url: str, api_key: str, *said: str, **options: Any) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": text} for text in said]
        return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message.content or ""


# ---------------------------------------------------------------------------------------------------------------- what is trained


def by_openai(session_url: str, api_key: str, wanted: str) -> float:
    return float(openai_agent(session_url, api_key, stream=True) == wanted)


def by_anthropic(session_url: str, api_key: str, wanted: str) -> float:
    return float(anthropic_agent(session_url, api_key, stream=True) == wanted)


@pytest.mark.parametrize("program", [by_openai, by_anthropic])
def test_what_an_agent_for_an_api_did_is_an_episode_of_the_run(codec: Codec, program: Any) -> None:
    engine = Keeping(codec, TURNS)
    group = play(codec, program, engine=engine, samples=4, wanted=TURNS[-1])
    assert len(engine.kept) == 4
    for episode in group.trajectories:
        assert (episode.status, episode.reward, len(episode.steps), list(episode.forks)) == (Status.OK, 1.0, 3, []), episode.error
        kept = engine.kept[11, 5, 0, episode.sample]  # its noise is that of any other episode
        assert episode.ids[episode.sampled].tolist() == [index for _, out in kept for index in out.ids.tolist()]
        assert set(episode.versions[episode.sampled].tolist()) == {4} and np.all(episode.sampler_logps[episode.sampled] == -1.0)
        for request, out in kept:  # each turn was sampled after the very ids that stand before it: nothing was encoded again
            start = len(request.prompt_ids)
            assert episode.ids[:start].tolist() == list(request.prompt_ids)
            assert episode.ids[start : start + len(out.ids)].tolist() == out.ids.tolist()


def test_a_program_may_only_shorten_what_is_sampled(codec: Codec) -> None:
    engine = Keeping(codec, ["a long answer"])

    async def short(base_url: str, api_key: str) -> None:
        await asyncio.to_thread(ask, base_url, api_key, "x", max_tokens=4, temperature=0.2, stop=["q"])

    episode = alone(codec, short, engine=engine)
    ((request, _),) = engine.kept[11, 5, 0, 0]
    assert (request.params.max_tokens, request.params.temperature, request.params.stop_strings) == (4, 1.0, ("q",))
    assert (episode.status, episode.num_sampled, episode.reward) == (Status.TRUNCATED, 4, None)


# -------------------------------------------------------------------------------------------------------------- functions, commands


def columns_by_name(base_url: str, api_key: str, prompt: list[Any], answer: str) -> dict[str, float | None]:
    assert prompt == [ROW]
    return {"right": float(ask(base_url, api_key, prompt[0]["content"]) == answer), "late": None, "form": 0.25}


def test_a_function_gets_the_columns_that_it_names_and_earns_what_it_returns(codec: Codec) -> None:
    assert alone(codec, columns_by_name, answer="one", other=1).reward == 1.25
    assert alone(codec, columns_by_name, answer="two").reward == 0.25


COMMAND = """
import json, os, sys, urllib.request
def post(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))
row, key = json.load(sys.stdin), os.environ["OPENAI_API_KEY"]
assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1" and key == os.environ["ANTHROPIC_API_KEY"]
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", key, {"messages": row["prompt"]})["choices"][0]["message"]["content"]
post(os.environ["BURNISH_SESSION_URL"] + "/finish", key, {"reward": float(said == row["answer"])})
if row["answer"] == "bad":
    sys.exit("the last words")
"""


def test_a_command_finds_address_key_and_row_and_posts_its_reward(codec: Codec) -> None:
    group = play(codec, [sys.executable, "-c", COMMAND], samples=2, answer="one")
    assert [(t.status, t.reward, t.final_text) for t in group.trajectories] == [(Status.OK, 1.0, "one")] * 2
    failed = alone(codec, [sys.executable, "-c", COMMAND], answer="bad")
    assert failed.status is Status.ENV_ERROR and failed.error is not None and "ended with 1" in failed.error
    assert "the last words" in failed.traceback
    missing = alone(codec, ["no-such-command-here"])
    assert missing.status is Status.ENV_ERROR and "no-such-command-here" in (missing.error or "")


# ------------------------------------------------------------------------------------------------------------------ ends, and limits


def raises(base_url: str, api_key: str) -> None:
    raise ValueError(ask(base_url, api_key, "x"))


def silent() -> float:
    return 1.0


def words(base_url: str, api_key: str) -> str:
    return ask(base_url, api_key, "x")


def asks_for_nothing(base_url: str, api_key: str) -> None:
    try:
        ask(base_url, api_key, "x", max_tokens=-1)
    except openai.APIStatusError as error:
        assert error.status_code == 409 and "max_tokens must be" in str(error)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (raises, "ValueError: one"),
        (silent, "the session ended before anything was asked"),
        (asks_for_nothing, "max_tokens must be"),
        (words, "a program returns a finite number, numbers by name, or None; got 'one'"),
    ],
)
def test_what_a_program_does_wrong_is_an_error_of_its_episode(codec: Codec, program: Any, error: str) -> None:
    episode = alone(codec, program)
    assert episode.status is Status.ENV_ERROR and error in (episode.error or "") and episode.reward is None


def endless(base_url: str, api_key: str) -> None:
    while True:
        ask(base_url, api_key, "x")


def hangs(base_url: str, api_key: str) -> None:
    ask(base_url, api_key, "x")
    threading.Event().wait()


@pytest.mark.slow
def test_a_program_is_killed_at_the_episodes_limits(codec: Codec) -> None:
    pool = WorkerPool(2)
    try:
        cut = alone(codec, endless, limits={"max_turns": 3}, pool=pool)
        assert (cut.status, len(cut.steps), cut.reward) == (Status.TRUNCATED, 3, None)
        late = alone(codec, hangs, limits={"step_timeout_s": 3.0}, pool=pool)
        assert late.status is Status.ENV_TIMEOUT and len(late.steps) <= 1
    finally:
        pool.close()


def dies_once(base_url: str, api_key: str, mark: str) -> float:
    ask(base_url, api_key, "x")
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_a_program_whose_process_dies_is_started_again(codec: Codec, tmp_path: Path) -> None:
    pool = WorkerPool(1)
    try:
        episode = alone(codec, dies_once, pool=pool, mark=str(tmp_path / "mark"))
        assert (episode.status, episode.reward, episode.num_lost) == (Status.OK, 1.0, 1), episode.error
    finally:
        pool.close()


def test_only_an_episodes_own_program_is_answered_and_the_endpoint_closes_with_the_last(codec: Codec) -> None:
    told: dict[str, Any] = {}

    def look(session_url: str, api_key: str) -> float:
        def post(url: str, key: str = api_key) -> int:
            body = {"messages": [ROW]}
            return httpx2.post(url, json=body, headers={"authorization": f"Bearer {key}"}).status_code

        root = session_url.rpartition("/sessions/")[0]
        told["addresses"] = {host for host, _ in listeners(pid)}
        told["others"] = [post(f"{session_url}/v1/chat/completions", "wrong"), post(f"{root}/v1/chat/completions")]
        told["others"] += [post(f"{root}/sessions/{name}/v1/chat/completions") for name in ("5-0-0-0", "x")]
        told["others"].append(
            httpx2.post(f"{root}/v1/completions", json={"prompt": "x"}, headers={"authorization": f"Bearer {api_key}"}).status_code
        )
        told["own"] = post(f"{session_url}/v1/chat/completions")
        httpx2.post(f"{session_url}/finish", json={"reward": 0.5}, headers={"authorization": f"Bearer {api_key}"}).raise_for_status()
        told["finished"] = post(f"{session_url}/v1/chat/completions")
        told["url"] = root
        return 0.75

    pid = os.getpid()
    episode = alone(codec, look)
    assert told["others"] == [401, 404, 404, 404, 404] and (told["own"], told["finished"]) == (200, 409)
    assert told["addresses"] == {"127.0.0.1"}
    assert (episode.reward, len(episode.steps)) == (0.75, 1), episode.error
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{told['url']}/health")


def test_what_cannot_be_a_program_is_told(codec: Codec) -> None:
    for program in ("python agent.py", [], [1]):
        with pytest.raises(UserError, match="a program is a function or a command"):
            ProgramEnvironment({}, program=program)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean `qwen`"):
        ProgramEnvironment({}, program=silent, tool_parser="qwem")
    for agent in (lambda: ModelAgent("Be brief."), lambda: ModelAgent(remembers=1)):
        with pytest.raises(UserError, match="a program keeps its conversation itself"):
            play(codec, silent, agent=agent)
