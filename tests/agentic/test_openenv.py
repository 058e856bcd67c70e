"""An environment that a server of the test's speaks OpenEnv's protocol for."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from burnish.agentic.openenv import OpenEnv
from burnish.config.errors import UserError
from burnish.text.codec import Codec
from burnish.types import Status
from tests.agentic.episodes import context, play, script

pytest.importorskip("websockets")


class Counting:
    """Count to the number that the reset names: a session counts by itself."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.idle = threading.Condition()
        self.resets: list[dict[str, Any]] = []

    async def serve(self, socket: Any) -> None:
        self.opened += 1
        count, target = 0, 0
        async for line in socket:
            message = json.loads(line)
            data: dict[str, Any] = message.get("data", {})
            if message["type"] == "reset":
                self.resets.append(data)
                count, target = 0, data.get("target", 2)
                answer = {"observation": {"text": f"count to {target}"}, "reward": None, "done": False}
            elif message["type"] == "close":
                break
            elif not str(data.get("message", "")).isdecimal():
                await socket.send(json.dumps({"type": "error", "data": {"message": "not a number", "code": "VALIDATION_ERROR"}}))
                continue
            else:
                count += 1
                right = int(data["message"]) == count
                answer = {"observation": {"text": f"at {count}"}, "reward": float(right), "done": count == target or not right}
            await socket.send(json.dumps({"type": "observation", "data": answer}))
        with self.idle:
            self.closed += 1
            self.idle.notify_all()

    def all_closed(self, *, within_s: float = 10.0) -> bool:
        """Whether every opened session ends in time: a client is told of its close before the server has counted it."""
        with self.idle:
            return self.idle.wait_for(lambda: self.closed == self.opened, within_s)


@pytest.fixture
def served() -> Iterator[tuple[str, Counting]]:
    from websockets.asyncio.server import serve

    counting, ready, stop, port = Counting(), threading.Event(), asyncio.Event(), 0
    loop = asyncio.new_event_loop()

    async def main() -> None:
        nonlocal port
        async with serve(counting.serve, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(10)
    yield f"http://127.0.0.1:{port}", counting
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def test_an_episode_over_the_socket(codec: Codec, served: tuple[str, Counting]) -> None:
    url, counting = served
    env = OpenEnv({"seed": 7, "reset": {"target": 3}}, url=url, observation_key="text")
    got = play(context(script(codec, "1", "2", "3"), codec), env)
    assert got.status is Status.OK and [step.reward for step in got.steps] == [1.0] * 3
    assert [message["content"] for message in got.messages] == ["count to 3", "1", "at 1", "2", "at 2", "3"]
    assert counting.resets == [{"seed": 7, "target": 3}] and counting.opened == 1 and counting.all_closed()


def test_actions_as_json_and_observations_whole(codec: Codec, served: tuple[str, Counting]) -> None:
    env = OpenEnv({"seed": 7}, url=served[0], action_key=None)
    got = play(context(script(codec, "one", "[1]", '{"message": "1"}', '{"message": "2"}'), codec, context=900), env)
    said = [message["content"] for message in got.messages if message["role"] == "user"]
    assert json.loads(said[0]) == {"text": "count to 2"} and json.loads(said[3]) == {"text": "at 1"}
    assert said[1].startswith("error: an action must be JSON") and said[2] == "error: an action must be a JSON object"
    assert got.status is Status.OK and [step.reward for step in got.steps] == [None, None, 1.0, 1.0]


def test_what_the_server_refuses_is_the_episodes_error(codec: Codec, served: tuple[str, Counting]) -> None:
    got = play(context(script(codec, "one"), codec), OpenEnv({"seed": 7}, url=served[0], observation_key="text"))
    assert got.status is Status.ENV_ERROR and "the server refused step: not a number (VALIDATION_ERROR)" in (got.error or "")
    assert served[1].opened == 1 and served[1].all_closed()
    got = play(context(script(codec, "1"), codec), OpenEnv({"seed": 7}, url=served[0], observation_key="words"))
    assert got.status is Status.ENV_ERROR and "has no 'words'" in (got.error or "")


def test_a_server_that_isnt_there(codec: Codec) -> None:
    got = play(context(script(codec, "1"), codec), OpenEnv({"seed": 7}, url="ws://127.0.0.1:9"))
    assert got.status is Status.ENV_ERROR and "refused" in (got.error or "").lower()
    for url in (None, "127.0.0.1:8000", "ftp://x"):
        with pytest.raises(UserError, match="needs the server's `url`"):
            OpenEnv({"seed": 7}, url=url)
