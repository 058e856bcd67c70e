"""Tools of MCP servers that the test starts with the official SDK: over standard input and output, and over HTTP."""

import asyncio
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.agentic.agents import ToolAgent
from burnish.agentic.calls import Calls
from burnish.agentic.environments import ToolEnvironment
from burnish.agentic.mcp import McpServer, mcp_tools
from burnish.agentic.processes import descendants
from burnish.agentic.tools import ToolSet
from burnish.config.errors import UserError
from burnish.text.codec import Codec
from burnish.types import Status, ToolCall
from tests.agentic.episodes import context, play, script

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow  # a server takes a second or two to start

SERVER = """
    import os, sys, time
    from mcp.server import MCPServer

    server = MCPServer("test")

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        "Add two numbers."
        return f"{a + b} by {os.getpid()}"

    @server.tool()
    def slow(seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    @server.tool()
    def long() -> str:
        return "x" * 10**6 + "<|im_end|>"

    @server.tool()
    def fails() -> str:
        raise ValueError("no such thing")

    @server.tool()
    def dies() -> str:
        os._exit(3)

    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(textwrap.dedent(SERVER))
    return str(path)


@pytest.fixture(scope="module")
def server(program: str) -> Iterator[McpServer]:
    made = McpServer([sys.executable, program])
    yield made
    made.close()


def call(tools: dict[str, Any], name: str, *, timeout_s: float = 20.0, **arguments: Any) -> str:
    run = ToolSet(tools).run(ToolCall(name, arguments), calls=Calls(None), timeout_s=timeout_s, max_characters=200)
    return asyncio.run(run)


def test_a_servers_tools_are_tools_with_its_schemas(server: McpServer) -> None:
    tools = mcp_tools(server)
    assert sorted(tools) == ["add", "dies", "fails", "long", "slow"]
    schema = ToolSet(tools).schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["properties"]["a"]["type"] == "integer" and schema["parameters"]["required"] == ["a"]
    first, second = call(tools, "add", a=2, b=3), call(tools, "add", a=2)
    assert first.split(" by ")[0] == "5" and second.split(" by ")[0] == "3"
    assert first.split(" by ")[1] == second.split(" by ")[1], "one server for all calls, from whatever event loop"
    assert call(tools, "add", a="2").startswith("error: add: the argument 'a' must be integer")
    assert call(tools, "add").startswith("error: add needs the argument 'a'")


def test_limits_and_errors_are_answers(server: McpServer) -> None:
    tools = server.tools(prefix="t_")
    begun = time.monotonic()
    assert call(tools, "t_slow", seconds=3.0, timeout_s=0.3) == "error: t_slow took longer than 0.3 s" and time.monotonic() - begun < 2.5
    assert call(tools, "t_long").endswith("[cut: only the first 200 characters are shown]")
    assert call(tools, "t_fails").startswith("error: Error executing tool fails")
    assert call(tools, "t_add", a=1).startswith("2 by ")


def test_a_server_that_dies_is_started_again_for_the_next_call(program: str) -> None:
    server = McpServer([sys.executable, program])
    try:
        tools = server.tools()
        first = call(tools, "add", a=1)
        assert call(tools, "dies", timeout_s=10).startswith("error: ")
        second = call(tools, "add", a=1)
        if second.startswith("error: "):  # the break is noticed by the first call after it at the latest
            second = call(tools, "add", a=1)
        assert second.split(" by ")[0] == "2" and second != first
    finally:
        server.close()


def test_closing_ends_the_server(program: str) -> None:
    import os

    before = set(descendants(os.getpid()))
    server = McpServer([sys.executable, program])
    server.tools()
    assert set(descendants(os.getpid())) > before
    server.close()
    deadline = time.monotonic() + 10
    while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(descendants(os.getpid())) - before


def test_a_server_that_isnt_there_is_found_out_before_the_run() -> None:
    with pytest.raises(UserError, match="the MCP server /nowhere/server doesn't answer"):
        McpServer(["/nowhere/server"]).tools()
    with pytest.raises(UserError, match="a `command` .* or found at a `url`"):
        McpServer()


def test_an_episode_calls_it_as_any_tool(codec: Codec, server: McpServer) -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
    agent = ToolAgent("Use the tools.", tool_map=mcp_tools(server))
    episode = context(script(codec, said, "42"), codec, context=8000, max_prompt_tokens=6000)
    env = ToolEnvironment({"prompt": [{"role": "user", "content": "20 + 22?"}]})
    got = play(episode, env, agent=agent, max_tokens=200)
    assert got.status is Status.OK and got.messages[3]["role"] == "tool" and got.messages[3]["content"].startswith("42 by ")


def test_over_http(program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
            assert call(server.tools(), "add", a=40, b=2).startswith(f"42 by {process.pid}")
            server.close()
        finally:
            process.kill()


def test_in_a_configuration(program: str, tmp_path: Path) -> None:
    from burnish.cli.build import agent_options
    from burnish.config.loader import load
    from burnish.config.schema import Config

    (tmp_path / "run.yaml").write_text(
        f"agent: {{agent: ToolAgent, options: {{tool_map: {{calc: {{command: [{sys.executable}, {program}]}}, python: Calculator}}}}}}\n"
    )
    resolved = load(Config, tmp_path / "run.yaml", (), {})
    options = agent_options(resolved.config, tmp_path)
    assert {"calc_add", "calc_slow", "python"} <= options["tool_map"].keys()
    assert call(options["tool_map"], "calc_add", a=1, b=1).startswith("2 by ")
