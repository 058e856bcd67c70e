"""Agents written with the `openai` and `anthropic` packages, as anybody would write them; they add 2 and 3, then 2 and 4, with a tool."""

import json
from typing import Any

import anthropic
import openai

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TURNS = (f"Let me see. {CALL}", CALL.replace("3", "4"), "The sums are 5 and 6.")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def openai_agent(url: str, key: str, *, stream: bool) -> str:
    """Three turns, two of them with a call of a tool, as anybody would write it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "2+3, then 2+4?"}]
    while True:
        if stream:
            with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})


def anthropic_agent(url: str, key: str, *, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "2+3, then 2+4?"}]
    while True:
        asked: Any = {"model": "tiny", "max_tokens": 200, "system": "Use tools.", "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}  # type: ignore[index]
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
