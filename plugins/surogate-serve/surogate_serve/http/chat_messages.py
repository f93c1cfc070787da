"""Messages of a chat request: what they may hold, and what a chat template is given of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from ..types import Refused
from .requests import Strict


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Part(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Strict):
    """One turn. Reasoning comes under either of two names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates read them: contents as text, arguments as objects, `developer` as `system`. Raises
    `Refused` that names the field for what a model of text cannot be given."""
    return [_one(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _one(message: Message, path: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = _text(message.content, f"{path}.content")
    if content is None and role != "assistant":
        raise Refused(f"a message of the {message.role} needs content", param=f"{path}.content")
    if role == "tool" and not message.tool_call_id:
        raise Refused("a message of a tool needs tool_call_id", param=f"{path}.tool_call_id")
    if message.tool_calls and role != "assistant":
        raise Refused("only messages of the assistant have tool_calls", param=f"{path}.tool_calls")
    result: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    if role == "tool":
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None and role == "assistant":
        result["reasoning_content"] = reasoning
    return result


def _text(content: str | list[Part] | None, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise Refused(
                f"content of type {part.type[:64]!r} is not supported: this model reads text", 400, "unsupported",
                f"{path}[{index}].type",
            )  # fmt: skip
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise Refused(f"a part of type {part.type} needs `{part.type}`", param=f"{path}[{index}].{part.type}")
        texts.append(text)
    return "\n".join(texts)


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused("the arguments of a call must be a JSON object", param=f"{path}.function.arguments")
    called = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return called if call.id is None else {"id": call.id} | called
