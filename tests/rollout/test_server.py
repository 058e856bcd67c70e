"""Agents written with the real `openai` and `anthropic` packages, unchanged but for their base address, against the endpoint.

What their sessions record is what the engine sampled, id by id. Then what the endpoint must bear (R48, R49).
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from burnish.agentic.sessions import Sessions, record
from burnish.agentic.trajectory import EpisodeContext
from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.schema import EpisodeLimits
from burnish.rollout.scripted import ScriptedEngine
from burnish.rollout.server.app import make_app
from burnish.rollout.server.listen import Guards, check_bind, listening
from burnish.testing.byte_tokenizer import make_byte_tokenizer
from burnish.testing.tiny import write_tiny_model
from burnish.text.codec import Codec
from burnish.text.tool_parsers import PARSERS
from burnish.types import Completion, Request, SamplingParams, Trajectory
from tests.api_agents import TURNS, anthropic_agent, openai_agent
from tests.listening import listeners

TOKEN = "open-sesame"
GUARDS = Guards(TOKEN)


class Keeping(ScriptedEngine):
    """Says the texts turn by turn, in any conversation, and keeps what it was asked and what it said."""

    def __init__(self, codec: Codec, texts: tuple[str, ...]) -> None:
        self.kept: list[tuple[Request, Completion]] = []

        def reply(request: Request) -> list[int]:
            return [*codec.tokenizer.encode(texts[len(self.kept) % len(texts)]), codec.template.stop_ids[0]]

        super().__init__(reply, decode_text=codec.tokenizer.decode, context=4000, version=4)

    async def generate(self, request: Request) -> Completion:
        out = await super().generate(request)
        self.kept.append((request, out))
        return out


class Endpoint:
    """A running endpoint: `url`, the engine behind it, and the episodes that were finished."""

    def __init__(self, codec: Codec, texts: tuple[str, ...], guards: Guards, **options: Any) -> None:
        self.engine, self.ended = Keeping(codec, texts), list[Trajectory]()
        limits = EpisodeLimits(step_timeout_s=None)
        context = EpisodeContext(self.engine, codec.template, codec.tokenizer.decode, 4000, max_prompt_tokens=3000, limits=limits)
        params = SamplingParams(300, stop_ids=codec.template.stop_ids)
        self.sessions = Sessions("tiny", context, codec.tokenizer, params, PARSERS["qwen"], on_end=self.ended.append, **options)
        self.guards, self.stop, self.url = guards, threading.Event(), ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        while not self.url:
            time.sleep(0.002)

    async def _serve(self) -> None:
        async with listening(make_app(self.sessions), self.guards) as (host, port):
            self.url = f"http://{host}:{port}"
            while not self.stop.is_set():
                await asyncio.sleep(0.005)
        await self.sessions.close()

    def close(self) -> None:
        self.stop.set()
        self._thread.join(15)

    def post(self, path: str, body: Any, token: str = TOKEN) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, headers={"authorization": f"Bearer {token}"})


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder)
    return Codec.load(folder)


@pytest.fixture
def serve(codec: Codec) -> Iterator[Callable[..., Endpoint]]:
    with contextlib.ExitStack() as stack:

        def start(*texts: str, guards: Guards = GUARDS, **options: Any) -> Endpoint:
            endpoint = Endpoint(codec, texts or TURNS, guards, **options)
            stack.callback(endpoint.close)
            return endpoint

        yield start


# --------------------------------------------------------------------------------------------------------------------------- agents


def assert_recorded(endpoint: Endpoint, codec: Codec, *, rows: int = 1) -> Trajectory:
    """The one episode that ended holds what the engine sampled, and nothing else is marked as sampled."""
    (episode,) = endpoint.ended
    sampled = [out for _, out in endpoint.engine.kept]
    assert episode.ids[episode.sampled].tolist() == [index for out in sampled for index in out.ids.tolist()]
    assert set(episode.versions[episode.sampled].tolist()) == {4} and set(episode.versions[~episode.sampled].tolist()) == {-1}
    assert np.all(episode.sampler_logps[episode.sampled] == -1.0) and len(episode.forks) == rows - 1
    return episode


@pytest.mark.parametrize("agent", [openai_agent, anthropic_agent], ids=["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_agent_is_recorded_as_it_was_sampled(
    serve: Callable[..., Endpoint], codec: Codec, agent: Callable[..., str], stream: bool
) -> None:
    endpoint = serve()
    assert agent(f"{endpoint.url}/sessions/one", TOKEN, stream=stream) == TURNS[-1]
    told = endpoint.post("/sessions/one/finish", {"rewards": {"right": 1.0, "short": 0.5}}).json()
    assert (told["turns"], told["rows"], told["reward"], told["status"]) == (3, 1, 1.5, "ok")
    episode = assert_recorded(endpoint, codec)
    for (request, out), step in zip(endpoint.engine.kept, episode.steps, strict=True):
        # Each turn was sampled after the very ids that stand before it in the record: nothing was encoded again.
        start = len(request.prompt_ids)
        assert episode.ids[:start].tolist() == list(request.prompt_ids) == step.prompt_ids.tolist()
        assert episode.ids[start : start + len(out.ids)].tolist() == out.ids.tolist()
    text = codec.tokenizer.decode(episode.ids.tolist())
    assert "5" in text and "6" in text and "Adds." in text
    assert record(episode)["rewards"] == {"right": 1.0, "short": 0.5}


def test_a_changed_history_forks_and_trains_each_id_once(serve: Callable[..., Endpoint], codec: Codec) -> None:
    endpoint = serve("one", "two", "three")
    client = openai.OpenAI(base_url=f"{endpoint.url}/sessions/s/v1", api_key=TOKEN, max_retries=0)

    def ask(*messages: tuple[str, str]) -> str:
        given: Any = [{"role": role, "content": text} for role, text in messages]
        return client.chat.completions.create(model="tiny", messages=given).choices[0].message.content or ""

    assert ask(("user", "a")) == "one"
    assert ask(("user", "a"), ("assistant", "one"), ("user", "b")) == "two"
    assert ask(("user", "summary of a and b"), ("user", "c")) == "three"
    endpoint.post("/sessions/s/finish", {"reward": 0.25})
    episode = assert_recorded(endpoint, codec, rows=2)
    assert episode.reward == 0.25


def test_two_sessions_at_once_do_not_meet(serve: Callable[..., Endpoint]) -> None:
    endpoint = serve("hello")

    async def talk(name: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/sessions/{name}/v1", api_key=TOKEN, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="tiny", messages=messages)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": name}]

    async def all_of_them() -> None:
        await asyncio.gather(*(talk(f"s{i}") for i in range(8)))

    asyncio.run(all_of_them())
    for i in range(8):
        told = endpoint.post(f"/sessions/s{i}/finish", {"reward": i}).json()
        assert (told["turns"], told["rows"], told["reward"]) == (3, 1, i)


# ------------------------------------------------------------------------------------------------------------------- other interfaces


def test_completions_and_ids(serve: Callable[..., Endpoint], codec: Codec) -> None:
    endpoint = serve("abc")
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=TOKEN, max_retries=0)
    out = client.completions.create(model="tiny", prompt="x", max_tokens=3, logprobs=1)
    assert out.choices[0].text == "abc" and out.choices[0].finish_reason == "length" and out.usage is not None
    assert out.choices[0].logprobs is not None and out.choices[0].logprobs.token_logprobs == [-1.0] * 3
    assert out.usage.prompt_tokens == len(codec.tokenizer.encode("x"))
    streamed = client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == "abc"
    ids = codec.tokenizer.encode("xyz")
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 3, "temperature": 0.5, "seed": 9, "stop_token_ids": [ids[0]]}}
    (choice,) = endpoint.post("/inference/v1/generate", body).json()["choices"]
    assert choice["token_ids"] == codec.tokenizer.encode("abc") and choice["weight_versions"] == [{"version": "4", "start": 0, "end": 3}]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0] * 3
    request, _ = endpoint.engine.kept[-1]
    assert (request.prompt_ids, request.seed_path, request.params.stop_ids) == (tuple(ids), (9,), (ids[0],))
    assert client.models.list().data[0].id == "tiny"


def test_a_request_says_how_it_is_sampled_unless_that_is_fixed(serve: Callable[..., Endpoint]) -> None:
    for fixed, expected in ((False, (0.25, 900)), (True, (1.0, 300))):
        endpoint = serve("abc", fixed=fixed)
        client = openai.OpenAI(base_url=f"{endpoint.url}/sessions/s/v1", api_key=TOKEN, max_retries=0)
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=0.25, max_tokens=900)
        params = endpoint.engine.kept[-1][0].params
        assert (params.temperature, params.max_tokens) == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "`messages` must be a list of at least one message"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "`n` 2 isn't supported here"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a part of type 'image_url'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "can't run in a context"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"},
            400,
            "`max_tokens` must be a whole number",
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400, "temperature must be finite and >= 0"),
        ("/inference/v1/generate", {"token_ids": ["a"], "sampling_params": {}}, 400, "`token_ids` must be a list of ids"),
        ("/sessions/a%2fb/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 404, None),
        ("/sessions/a;b/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400, "a session's name has up to 100"),
        ("/sessions/nobody/finish", {"reward": 1}, 404, "there is no open session nobody"),
        ("/sessions/nobody/finish", {"reward": "much"}, 400, "give `reward`, a number or null"),
        ("/sessions/nobody/v1/completions", {"prompt": "x"}, 404, "only conversations are recorded"),
    ],
)
def test_what_cannot_be_answered_is_told(serve: Callable[..., Endpoint], path: str, body: Any, status: int, message: str | None) -> None:
    endpoint = serve("abc")
    answer = endpoint.post(path, body)
    assert answer.status_code == status
    assert message is None or message in answer.json()["error"]["message"]


def test_half_a_character_is_refused(serve: Callable[..., Endpoint]) -> None:
    endpoint, headers = serve("abc"), {"authorization": f"Bearer {TOKEN}"}
    for said, status in (("\ud83d\ude00", 200), ("\ud83d", 400)):
        body = json.dumps({"messages": [{"role": "user", "content": said}]})
        assert httpx2.post(f"{endpoint.url}/v1/chat/completions", content=body, headers=headers).status_code == status


# ---------------------------------------------------------------------------------------------------------- what it must bear: R48, R49


def test_a_public_address_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        with pytest.raises(UserError, match="can be reached by others, so it needs a token"):
            check_bind(host, None)
        check_bind(host, "secret")
    for host in ("127.0.0.1", "::1", "localhost"):
        check_bind(host, None)
    assert main(["serve", "nowhere", "--host", "0.0.0.0", "--no-token"]) == 2
    assert "needs a token" in capsys.readouterr().err


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def raw(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_it_answers_a_good_request_after_everything(serve: Callable[..., Endpoint]) -> None:
    guards = Guards(TOKEN, body_bytes=1 << 20, request_s=1.0, connections=64)
    endpoint = serve("fine", guards=guards)
    good = {"messages": [{"role": "user", "content": "x"}]}
    assert endpoint.post("/v1/chat/completions", good).status_code == 200
    before = rss()
    for token in ("none", "wrong", TOKEN + "x", TOKEN[:-1]):
        assert endpoint.post("/v1/chat/completions", good, token=token).status_code == 401
    assert httpx2.post(f"{endpoint.url}/v1/chat/completions", json=good).status_code == 401
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
    told = []
    for sent in (
        head + f"content-length: {2 << 30}\r\n\r\n",  # 2 GiB announced
        head + "content-length: -5\r\n\r\n",
        head + "transfer-encoding: chunked\r\n\r\n" + "zz\r\n",
        "\x80\x04\x95 this is a pickle\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "x" * 200_000,
    ):
        with raw(endpoint.url) as connection, contextlib.suppress(OSError):
            connection.sendall(sent.encode("latin-1"))
            told.append(connection.recv(200).split(b" ")[1:2])
    assert told[0] == [b"413"] and all(status in ([b"400"], [b"401"], [b"413"], []) for status in told[1:])
    with raw(endpoint.url) as connection:  # more than it announced to take, in chunks
        connection.sendall((head + "transfer-encoding: chunked\r\n\r\n").encode())
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    slow = [raw(endpoint.url) for _ in range(20)]
    for index, connection in enumerate(slow):  # heads that never end, and bodies that never come
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" if index % 2 else (head + "content-length: 9\r\n\r\n{").encode())
    crowd = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            crowd.append(raw(endpoint.url))
    time.sleep(2.5)
    for connection in [*slow, *crowd]:
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            assert connection.recv(200)[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 400")
        connection.close()
    answer = endpoint.post("/v1/chat/completions", good)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "fine"
    assert rss() - before < 100 << 20


def test_the_command_serves_a_model_and_writes_down_its_sessions(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "burnish", "serve", str(tmp_path / "model"), "--port", "0", "--context", "256", "--slots", "2"]
    environment = os.environ | {"BURNISH_SERVE_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    server = subprocess.Popen(
        [*command, "--record", str(tmp_path / "sessions.jsonl")], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert server.stdout is not None
        told = server.stdout.readline()
        url = re.search(r"http://127.0.0.1:\d+", told)
        assert url is not None and told.endswith(f"/v1 with the token {TOKEN}\n"), told
        assert listeners(server.pid) == {("127.0.0.1", int(url[0].rpartition(":")[2]))}
        client = openai.OpenAI(base_url=f"{url[0]}/sessions/a/v1", api_key=TOKEN, max_retries=0)
        asked: Any = [{"role": "user", "content": "12"}]
        answer = client.chat.completions.create(model="m", messages=asked, max_tokens=5, extra_body={"return_token_ids": True})
        headers = {"authorization": f"Bearer {TOKEN}"}
        httpx2.post(f"{url[0]}/sessions/a/finish", json={"reward": 0.5}, headers=headers).raise_for_status()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.communicate()
    (line,) = (tmp_path / "sessions.jsonl").read_text().splitlines()
    episode = json.loads(line)
    sampled = [index for index, drawn in zip(episode["ids"], episode["sampled"], strict=True) if drawn]
    assert sampled == answer.choices[0].model_extra["token_ids"] and len(sampled) <= 5 and episode["reward"] == 0.5  # type: ignore[index]
