"""Agents written for an API, each a file beside its configuration, train inside a run: `burnish train` starts them, row by row."""

import json
from pathlib import Path

import pytest

from tests.cli.runs import LORA, Shell

pytestmark = pytest.mark.slow  # compiles programs of its own

OPENAI = """
import openai

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

def play(base_url, api_key, prompt, answer):
    client, messages, earned = openai.OpenAI(base_url=base_url, api_key=api_key), list(prompt), 0.0
    for _ in range(3):
        with client.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True) as chunks:
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        earned += said.count(answer) + 0.01 * len(said)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "0"}]
    return earned
"""

ANTHROPIC = """
import anthropic

TOOLS = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]

def play(session_url, api_key, prompt, answer):
    client, messages, earned = anthropic.Anthropic(base_url=session_url, api_key=api_key), list(prompt), 0.0
    for _ in range(3):
        with client.messages.stream(model="any", max_tokens=4, messages=messages, tools=TOOLS) as events:
            said = "".join(block.text for block in events.get_final_message().content)
        earned += said.count(answer) + 0.01 * len(said)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "0"}]
    return earned
"""

PROGRAM = [
    'environment={env: ProgramEnvironment, options: {program: "./agent.py:play"}, limits: {max_concurrency: 2}}',
    "rewards=[]",
    "data.eval=[]",
    "rollout.max_prompt_tokens=440",
    "rollout.max_episode_tokens=500",
]


@pytest.mark.parametrize("agent", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_an_agent_written_for_an_api_trains_inside_a_run(task: Path, shell: Shell, agent: str) -> None:
    (task.parent / "agent.py").write_text(agent)
    code, out, err = shell("train", task, *LORA, *PROGRAM)
    assert code == 0, out + err
    run = Path("runs/first")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["episode/turns"] for step in steps] == [3, 3] and all(step["reward/mean"] > 0 for step in steps)
    assert all(step.get("status/env_error", 0) == 0 and step["optim/grad_norm"] > 0 for step in steps)
    assert max(step["mismatch/max"] for step in steps) < 1e-4  # the trainer's log-probs of what was recorded are those of the sampler
    for number in range(2):
        episodes = [json.loads(line) for line in (run / "transcripts" / f"step_{number + 1}.jsonl").read_text().splitlines()]
        assert len(episodes) == 8 and {tuple(episode["versions"]) for episode in episodes} == {(number, number)}
        assert all([message["role"] for message in episode["messages"]].count("assistant") == 3 for episode in episodes)
