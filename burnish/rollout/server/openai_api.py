"""`/v1/chat/completions` and `/v1/completions` as OpenAI's clients speak them.

Owns these fields, both ways. A turn is sampled whole and then sent, in events where the client asked for a stream. Called by `app`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from burnish.rollout.server.turns import CannotAnswer, Reply, Turn
from burnish.types import Completion, Message, SamplingParams, StopReason

UNSUPPORTED = {"n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "response_format": {"type": "text"}}
"""Options that change what is sampled and aren't done here, each with the value that asks for nothing."""
PIECE = 24
"""Characters of one event of a stream."""


def read_chat(body: Mapping[str, Any]) -> Turn:
    """The turn that a request asks for. Raises CannotAnswer."""
    _refuse(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CannotAnswer("`messages` must be a list of at least one message")
    return Turn(
        [_message(message) for message in messages],
        tools=tuple(body.get("tools") or ()) if body.get("tool_choice") != "none" else (),
        max_tokens=number(body, "max_completion_tokens", int) or number(body, "max_tokens", int),
        temperature=number(body, "temperature", float),
        top_p=number(body, "top_p", float),
        stop_strings=texts(body.get("stop")),
    )


def read_completion(body: Mapping[str, Any], *, default_tokens: int) -> tuple[str | list[int], SamplingParams, int | None]:
    """The prompt as a text or as ids, how to go on from it, and the seed."""
    _refuse(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(index) is int for index in prompt)):
        raise CannotAnswer("`prompt` must be one text or one list of ids")
    return prompt, sampling(body, default_tokens=default_tokens), number(body, "seed", int)


def sampling(body: Mapping[str, Any], *, default_tokens: int) -> SamplingParams:
    """The usual names of sampling options."""

    def given(name: str, kind: type, default: Any) -> Any:
        value = number(body, name, kind)
        return default if value is None else value

    try:
        return SamplingParams(
            given("max_tokens", int, default_tokens),
            temperature=given("temperature", float, 1.0),
            top_p=given("top_p", float, 1.0),
            top_k=max(0, given("top_k", int, 0)),
            min_p=given("min_p", float, 0.0),
            stop_ids=tuple(body.get("stop_token_ids") or ()),
            stop_strings=texts(body.get("stop")),
        )
    except ValueError as error:
        raise CannotAnswer(str(error)) from error


def chat_answer(reply: Reply, body: Mapping[str, Any], model: str, decode: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content if reply.content or not reply.calls else None}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply), **_chat_logprobs(reply.completion, body, decode)}
    return _envelope("chat.completion", "chatcmpl", model) | {"choices": [choice], "usage": _usage(reply)}


def chat_events(reply: Reply, body: Mapping[str, Any], model: str, decode: Any) -> Iterator[str]:
    """The same in pieces, as a stream sends it."""
    head = _envelope("chat.completion.chunk", "chatcmpl", model)

    def event(delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        return _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, **more}]})

    yield event({"role": "assistant", "content": ""}, **_chat_logprobs(reply.completion, body, decode))
    for start in range(0, len(reply.content), PIECE):
        yield event({"content": reply.content[start : start + PIECE]})
    for index, call in enumerate(_calls(reply)):
        yield event({"tool_calls": [{"index": index, **call, "function": call["function"] | {"arguments": ""}}]})
        arguments = call["function"]["arguments"]
        for start in range(0, len(arguments), PIECE):
            yield event({"tool_calls": [{"index": index, "function": {"arguments": arguments[start : start + PIECE]}}]})
    yield event({}, _reason(reply))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def completion_answer(out: Completion, prompt_ids: Sequence[int], body: Mapping[str, Any], model: str, decode: Any) -> dict[str, Any]:
    text = decode(out.ids.tolist())
    reason = "length" if out.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    if body.get("logprobs") is not None:
        choice["logprobs"] = {"tokens": [decode([i]) for i in out.ids.tolist()], "token_logprobs": out.logps.tolist()}
    if body.get("return_token_ids"):
        choice |= {"token_ids": out.ids.tolist(), "prompt_token_ids": list(prompt_ids)}
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(out.ids), "total_tokens": len(prompt_ids) + len(out.ids)}
    return _envelope("text_completion", "cmpl", model) | {"choices": [choice], "usage": usage}


def completion_events(answer: Mapping[str, Any]) -> Iterator[str]:
    (choice,) = answer["choices"]
    head = {key: value for key, value in answer.items() if key not in ("choices", "usage")}
    text = choice["text"]
    for start in range(0, len(text), PIECE):
        yield _event(head | {"choices": [{"index": 0, "text": text[start : start + PIECE], "finish_reason": None, "logprobs": None}]})
    yield _event(head | {"choices": [choice | {"text": ""}]})
    yield "data: [DONE]\n\n"


def number(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise CannotAnswer(f"`{name}` must be a {'whole number' if kind is int else 'number'}, got {value!r:.50}")
    return kind(value)


def texts(stop: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in found):
        raise CannotAnswer("`stop` must be a text or a list of texts")
    return found


def flat(content: Any) -> str:
    """A message's content as one text: a string, or a list of parts of which only texts can be read."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise CannotAnswer(f"a message's content must be a text or a list of parts, got {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise CannotAnswer(f"a message has a part of type {kind!r}; only texts can be read")
    return "".join(part["text"] for part in content)


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CannotAnswer("each message must be an object with a role")
    role = "system" if message["role"] == "developer" else message["role"]
    found: Message = {"role": role, "content": flat(message.get("content"))}
    if message.get("tool_calls"):
        found["tool_calls"] = [_given_call(call) for call in message["tool_calls"]]
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key]
    return found


def _given_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        return {
            "id": call["id"],
            "type": "function",
            "function": {"name": function["name"], "arguments": json.loads(function["arguments"])},
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CannotAnswer(f"a message has a tool call that can't be read: {error!r}") from error


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
        for name, call in reply.calls
    ]


def _reason(reply: Reply) -> str:
    if reply.calls:
        return "tool_calls"
    return "length" if reply.completion.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"


def _chat_logprobs(out: Completion, body: Mapping[str, Any], decode: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.get("logprobs"):
        entries = [
            {"token": (text := decode([index])), "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            for index, logp in zip(out.ids.tolist(), out.logps.tolist(), strict=True)
        ]
        found["logprobs"] = {"content": entries, "refusal": None}
    if body.get("return_token_ids"):
        found["token_ids"] = out.ids.tolist()
    return found


def _usage(reply: Reply) -> dict[str, int]:
    sampled = len(reply.completion.ids)
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": sampled, "total_tokens": reply.num_prompt_tokens + sampled}


def _envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _refuse(body: Mapping[str, Any]) -> None:
    for name, nothing in UNSUPPORTED.items():
        if body.get(name) not in (None, nothing):
            raise CannotAnswer(f"`{name}` {body[name]!r:.50} isn't supported here: leave it out")


__all__ = [
    "chat_answer",
    "chat_events",
    "completion_answer",
    "completion_events",
    "flat",
    "number",
    "read_chat",
    "read_completion",
    "sampling",
    "texts",
]
