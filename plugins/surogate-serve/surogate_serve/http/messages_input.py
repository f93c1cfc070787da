"""What a request of Anthropic's Messages may hold, and what a chat template is given of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..types import Refused
from .requests import Strict, needed

Role = Literal["system", "user", "assistant"]


class Block(Strict):
    """A part of a content: its type decides which fields it needs."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: str | None = None


class InputMessage(Strict):
    role: Role
    content: str | list[Block]


class InputTool(Strict):
    type: str | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class InputToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def template_messages(system: str | list[Block] | None, messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """The messages as templates read them: results of tools as messages of their own, neighbours of one role as one.
    Raises `Refused` that names the field for what a model of text cannot be given."""
    result: list[dict[str, Any]] = []
    if system is not None and (text := "\n".join(_texts(system, "system"))):
        result.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for role, blocks in _merged(messages):
        if role == "assistant":
            result.append(_assistant(blocks, names))
        elif role == "user":
            result.extend(_user(blocks, names))
        else:
            result.append({"role": "system", "content": "\n".join(_text(block, path) for path, block in blocks)})
    return result


Placed = list[tuple[str, Block]]
"""Blocks with their paths in the request."""


def _merged(messages: Sequence[InputMessage]) -> list[tuple[Role, Placed]]:
    turns: list[tuple[Role, Placed]] = []
    for index, message in enumerate(messages):
        blocks = list(_placed(message.content, f"messages[{index}].content"))
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _placed(content: str | list[Block], path: str) -> Iterator[tuple[str, Block]]:
    if isinstance(content, str):
        yield path, Block(type="text", text=content)
    else:
        for index, block in enumerate(content):
            yield f"{path}[{index}]", block


def _assistant(blocks: Placed, names: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for path, block in blocks:
        if block.type == "thinking":
            thoughts.append(needed(block.thinking, path, "thinking"))
        elif block.type == "tool_use":
            number, name = needed(block.id, path, "id"), needed(block.name, path, "name")
            names[number] = name
            function = {"name": name, "arguments": needed(block.input, path, "input")}
            calls.append({"id": number, "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            texts.append(_text(block, path))
    result: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        result["reasoning_content"] = "\n".join(thoughts)
    if calls:
        result["tool_calls"] = calls
    return result


def _user(blocks: Placed, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Results come before what the user says beside them, as they answer the message before."""
    texts: list[str] = []
    for path, block in blocks:
        if block.type != "tool_result":
            texts.append(_text(block, path))
            continue
        number = needed(block.tool_use_id, path, "tool_use_id")
        content = "\n".join(_texts(block.content or "", f"{path}.content"))
        if block.is_error:
            content = f"Error: {content}"
        message = {"role": "tool", "tool_call_id": number, "content": content}
        yield message | ({"name": names[number]} if number in names else {})
    if texts or all(block.type != "tool_result" for _, block in blocks):
        yield {"role": "user", "content": "\n".join(texts)}


def _texts(content: str | list[Block], path: str) -> list[str]:
    return [_text(block, place) for place, block in _placed(content, path)]


def _text(block: Block, path: str) -> str:
    if block.type == "text":
        return needed(block.text, path, "text")
    if block.type == "document":
        return _document(block, path)
    if block.type == "search_result":
        content = needed(block.content, path, "content")
        return "\n".join(filter(None, [block.title, *_texts(content, f"{path}.content")]))
    raise Refused(
        f"content of type {block.type[:64]!r} is not supported here: this model reads text", 400, "unsupported",
        f"{path}.type",
    )  # fmt: skip


def _document(block: Block, path: str) -> str:
    source = needed(block.source, path, "source")
    data = source.get("data")
    if source.get("type") != "text" or not isinstance(data, str):
        raise Refused(
            "of documents only those with a source of type text are supported", 400, "unsupported", f"{path}.source"
        )
    return f"{block.title}\n{data}" if block.title else data


def tools_of(tools: Sequence[InputTool]) -> list[dict[str, Any]]:
    """Definitions as chat templates read them. Raises `Refused` for tools that the server would have to run itself."""
    result = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise Refused(
                f"tools of type {tool.type[:64]!r} are run by Anthropic's servers or known to their models only", 400,
                "unsupported", f"tools[{index}].type",
            )  # fmt: skip
        parameters = needed(tool.input_schema, f"tools[{index}]", "input_schema")
        function: dict[str, Any] = {"name": tool.name, "parameters": parameters}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        result.append({"type": "function", "function": function})
    if len({tool.name for tool in tools}) != len(tools):
        raise Refused("two tools have the same name", param="tools")
    return result


def tool_choice_of(choice: InputToolChoice | None) -> str | dict[str, Any]:
    """A choice as `offered_tools` takes it."""
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "tool":
        return {"type": "function", "function": {"name": needed(choice.name, "tool_choice", "name")}}
    return {"any": "required", "none": "none"}[choice.type]
