"""Items of OpenAI's Responses: what a request may hold, what is kept of them, and what a chat template is given."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from ..types import Refused
from .errors import from_validation
from .requests import Strict, needed

Item = dict[str, Any]
_SEALED = "surogate1:"


class Part(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Strict):
    """An item: its type decides which fields it needs. Without a type it is a message."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


def sealed(reasoning: str) -> str:
    """Reasoning as a client carries it that keeps nothing here. It holds no secret: the same text is told beside it."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def _unsealed(content: str | None) -> str | None:
    """None for what another server sealed."""
    if content is None or not content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(content[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def items_of(given: str | list[Any]) -> list[Item]:
    """The items of a request's `input`, each with an id and its content as a list. Raises `Refused` that names the one
    which does not fit."""
    if isinstance(given, str):
        return [_kept(InputItem(role="user", content=given), "input")]
    items = []
    for index, each in enumerate(given):
        path = f"input[{index}]"
        if not isinstance(each, dict):
            raise Refused(f"{path} must be an object", param=path)
        try:
            item = InputItem.model_validate(each)
        except pydantic.ValidationError as error:
            refused = from_validation(error, each)
            field = f".{refused.param}" if refused.param else ""
            raise Refused(f"{path}.{refused.message}", param=path + field) from None
        items.append(_kept(item, path))
    return items


def _kept(item: InputItem, path: str) -> Item:
    """An item as it is listed, without what nothing reads."""
    if item.type == "message":
        role = needed(item.role, path, "role")
        if role not in ("user", "assistant", "system", "developer"):
            raise Refused(
                f"{path}.role is user, assistant, system or developer, not {role[:64]!r}", param=f"{path}.role"
            )
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [
            {"type": kind, "text": text} | ({"annotations": []} if role == "assistant" else {})
            for text in _texts(needed(item.content, path, "content"), f"{path}.content")
        ]
        return {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed", "content": parts}
    if item.type == "function_call":
        called = {"call_id": needed(item.call_id, path, "call_id"), "name": needed(item.name, path, "name")}
        arguments = needed(item.arguments, path, "arguments")
        _object(arguments, path)
        fields = called | {"arguments": arguments, "status": "completed"}
        return {"id": _id(item, "fc"), "type": "function_call"} | fields
    if item.type == "function_call_output":
        text = "\n".join(_texts(needed(item.output, path, "output"), f"{path}.output"))
        fields = {"call_id": needed(item.call_id, path, "call_id"), "output": text, "status": "completed"}
        return {"id": _id(item, "fco"), "type": "function_call_output"} | fields
    if item.type == "reasoning":
        return {"id": _id(item, "rs"), "type": "reasoning", "summary": [], "content": _reasoning(item, path)}
    raise Refused(f"items of type {item.type[:64]!r} are not supported", 400, "unsupported", f"{path}.type")


def _id(item: InputItem, prefix: str) -> str:
    return item.id or f"{prefix}_{uuid.uuid4().hex}"


def _reasoning(item: InputItem, path: str) -> list[dict[str, Any]]:
    """The text itself, or what was sealed of it, or its summary."""
    texts = _texts(item.content or "", f"{path}.content")
    if not any(texts) and (unsealed := _unsealed(item.encrypted_content)) is not None:
        texts = [unsealed]
    if not any(texts):
        texts = _texts(item.summary or [], f"{path}.summary")
    return [{"type": "reasoning_text", "text": text} for text in texts if text]


def _texts(content: str | list[Part], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            raise Refused(
                f"content of type {part.type[:64]!r} is not supported: this model reads text", 400, "unsupported",
                f"{path}[{index}].type",
            )  # fmt: skip
        name = "refusal" if part.type == "refusal" else "text"
        texts.append(needed(getattr(part, name), f"{path}[{index}]", name))
    return texts


def _object(arguments: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the arguments of a call must be a JSON object", param=f"{path}.arguments")
    return value


# -- for the template --------------------------------------------------------------------------------------------------


def template_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items, as `items_of` and answers make them, as the messages that templates read. What leads the conversation for
    the system is one message; what one turn of the assistant is made of is one message too."""
    leading = [instructions] if instructions else []
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        if item["type"] == "message":
            text = "\n".join(part.get("text", "") for part in item["content"])
            if item["role"] in ("system", "developer"):
                if messages:
                    messages.append({"role": "system", "content": text})
                else:
                    leading.append(text)
            elif item["role"] == "user":
                messages.append({"role": "user", "content": text})
            else:
                _turn(messages, "content")["content"] = text
        elif item["type"] == "reasoning":
            text = "\n".join(part["text"] for part in item["content"])
            if text:
                _turn(messages, "reasoning_content")["reasoning_content"] = text
        elif item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
            _turn(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item))
        else:
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(message | ({"name": names[item["call_id"]]} if item["call_id"] in names else {}))
    return [{"role": "system", "content": "\n\n".join(leading)}, *messages] if leading else messages


_ORDER = ("reasoning_content", "content", "tool_calls")


def _turn(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The assistant's message that ``part`` belongs to: the last, where it has neither this part nor a later one."""
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        present = [name for name in _ORDER if last.get(name)]
        if part == "tool_calls" or all(_ORDER.index(name) < _ORDER.index(part) for name in present):
            return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    """A call that was cut short has no arguments that could be read."""
    try:
        arguments = json.loads(item["arguments"] or "{}")
    except ValueError:
        arguments = {}
    function = {"name": item["name"], "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": item["call_id"], "type": "function", "function": function}


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Definitions as chat templates read them. Raises `Refused` for tools that OpenAI's servers run."""
    result, names = [], set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        kind = tool.get("type")
        if kind != "function":
            raise Refused(
                f"tools of type {str(kind)[:64]!r} are not supported: only functions are, which the client runs", 400,
                "unsupported", f"{path}.type",
            )  # fmt: skip
        fields = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in fields if tool.get(key) is not None}
        _check_function(function, path)
        if function["name"] in names:
            raise Refused("two tools have the same name", param="tools")
        names.add(function["name"])
        result.append({"type": "function", "function": function})
    return result


def _check_function(function: Mapping[str, Any], path: str) -> None:
    name = function.get("name")
    plain = isinstance(name, str) and all(each.isalnum() or each in "_.-" for each in name)
    if not plain or not name.isascii() or not 1 <= len(name) <= 128:
        raise Refused(f"{path}.name is 1 to 128 letters, digits, _, . and -", param=f"{path}.name")
    kinds = {"description": str, "parameters": dict, "strict": bool}
    for key, kind in kinds.items():
        if key in function and not isinstance(function[key], kind):
            raise Refused(f"{path}.{key} has the wrong type", param=f"{path}.{key}")


def tool_choice_of(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A choice as `offered_tools` takes it: names lie deeper there."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [tool_choice_of(each) for each in choice["tools"] if isinstance(each, dict)]
        return {"type": "allowed_tools", "mode": choice.get("mode", "auto"), "tools": tools}
    return dict(choice)
