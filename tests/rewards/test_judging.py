"""A judge behind a loopback double of an OpenAI-compatible endpoint."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.rewards.judging import NoVerdict, judge


class Double(ThreadingHTTPServer):
    """Says what `replies` says next: a text, or a status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: list[str | int] = []
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Double

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            reply = self.server.replies.pop(0)
        self.send_response(reply if isinstance(reply, int) else 200)
        self.end_headers()
        if not isinstance(reply, int):
            self.wfile.write(json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def double() -> Iterator[Double]:
    with Double() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def judged(double: Double, prompts: list[str], completions: list[str], **options: Any) -> list[float]:
    url = f"http://127.0.0.1:{double.server_port}/v1"
    return asyncio.run(judge(prompts, completions, base_url=url, model="big", max_requests=1, **options))


def test_scores_are_read_off_the_last_line_and_scaled(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "abc")
    double.replies = ['{"score": 1} no, better:\n{"score": 10}', 'Poor. {"score":2.5}']
    got = judged(double, ["q1", "q2"], ["a1", "a2"], answer=["gold", "gold"], api_key_variable="JUDGE_KEY")
    assert got == [1.0, 0.25] and double.keys == ["Bearer abc"] * 2
    first = double.asked[0]
    assert (first["model"], first["temperature"]) == ("big", 0)
    shown = first["messages"][1]["content"]
    assert "q1" in shown and "RIGHT ANSWER" in shown and "gold" in shown and shown.index("ANSWER TO GRADE") < shown.index("a1")


def test_an_answer_cant_end_its_quotation(double: Double) -> None:
    double.replies = ['{"score": 0}', '{"score": 0}']
    judged(double, ["q", "q"], ["x", "x"])
    marks = {line for body in double.asked for line in body["messages"][1]["content"].splitlines() if line.startswith("</")}
    assert len(marks) == 2, "a new mark for each"


def test_what_fails_is_asked_again_and_then_no_reward(double: Double) -> None:
    double.replies = [500, "I'd say nine", '{"score": 9}']
    assert judged(double, ["q"], ["a"]) == [0.9]
    double.replies = ['{"score": 11}', '{"score": -1}', 503]
    with pytest.raises(NoVerdict, match=r"big gave no score from 0 to 10 in 3 tries; OSError: 503"):
        judged(double, ["q"], ["a"])


def test_an_address_that_is_none_is_a_mistake_of_the_run(double: Double) -> None:
    with pytest.raises(UserError, match="must begin with http"):
        asyncio.run(judge(["q"], ["a"], base_url="localhost:8000/v1", model="m"))
