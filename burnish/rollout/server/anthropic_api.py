"""`/v1/messages` as Anthropic's clients speak it.

Owns these fields, both ways: a system prompt beside the messages, content in blocks, tool results inside a user's message. Called by `app`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from burnish.rollout.server.openai_api import PIECE, flat, number, texts
from burnish.rollout.server.turns import CannotAnswer, Reply, Turn
from burnish.types import Message, StopReason


def read_messages(body: Mapping[str, Any]) -> Turn:
    """The turn that a request asks for. Raises CannotAnswer."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise CannotAnswer("`messages` must be a list of at least one message")
    messages: list[Message] = [{"role": "system", "content": flat(body["system"])}] if body.get("system") else []
    for message in given:
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise CannotAnswer("each message must be an object with the role user or assistant")
        messages += _messages(message["role"], message.get("content"))
    return Turn(
        messages,
        tools=tuple(_tool(tool) for tool in body.get("tools") or ()),
        max_tokens=number(body, "max_tokens", int),
        temperature=number(body, "temperature", float),
        top_p=number(body, "top_p", float),
        stop_strings=texts(body.get("stop_sequences")),
    )


def answer(reply: Reply, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(_blocks(reply)),
        "stop_reason": _reason(reply),
        "stop_sequence": None,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": len(reply.completion.ids)},
    }


def events(reply: Reply, model: str) -> Iterator[str]:
    """The same in pieces, as a stream sends it."""
    whole = answer(reply, model)
    begun = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield _event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        yield _event("content_block_start", index=index, content_block=block | ({"text": ""} if is_text else {"input": {}}))
        said = block["text"] if is_text else json.dumps(block["input"])
        for start in range(0, len(said), PIECE):
            piece = said[start : start + PIECE]
            delta = {"type": "text_delta", "text": piece} if is_text else {"type": "input_json_delta", "partial_json": piece}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield _event("message_stop")


def _messages(role: str, content: Any) -> list[Message]:
    """One of theirs as ours: tool results are messages of their own here, and come first."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise CannotAnswer(f"a message's content must be a text or a list of blocks, got {type(content).__name__}")
    found: list[Message] = []
    calls, said = [], []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                said.append(text)
            case {"type": "tool_result", "tool_use_id": str(name)}:
                found.append({"role": "tool", "content": flat(block.get("content")), "tool_call_id": name})
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)}:
                calls.append({"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}})
            case _:
                kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
                raise CannotAnswer(f"a message has a block of type {kind!r}, which can't be read here")
    if said or calls or not found:
        message: Message = {"role": role, "content": "".join(said)}
        if calls:
            message["tool_calls"] = calls
        found.append(message)
    return found


def _tool(tool: Any) -> dict[str, Any]:
    try:
        function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise CannotAnswer(f"a tool can't be read: it needs name and input_schema ({error!r})") from error
    return {"type": "function", "function": function}


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.content or not reply.calls:
        yield {"type": "text", "text": reply.content}
    for name, call in reply.calls:
        yield {"type": "tool_use", "id": name, "name": call.name, "input": dict(call.arguments)}


def _reason(reply: Reply) -> str:
    if reply.calls:
        return "tool_use"
    stop = reply.completion.stop
    if stop in (StopReason.LENGTH, StopReason.CONTEXT):
        return "max_tokens"
    return "stop_sequence" if stop is StopReason.STOP_STRING else "end_turn"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


__all__ = ["answer", "error_body", "events", "read_messages"]
