"""Data-set formats: what a row of a file means. Each format turns a row into an Example (a conversation or a text).

A format says by the columns whether it reads a row; `type: auto` takes the first that does. Plugins register more
through the hook `surogate_dataset_formats`; the built-in ones are in `BUILTIN` and use the same door.
"""

from __future__ import annotations

import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "assistant",
}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Example:
    """One row, understood. Either `messages` (a conversation) or `text` is set.

    messages: dicts with `role`, `content` and what else the template reads; `train` (bool) and `weight` (float) say how
    much a message's tokens count. tools: JSON schemas. completion_start: index of the first message (or character of
    `text`) that answers the prompt, where the row says so. template_variables: reach the template by name.
    """

    messages: list[Message] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    completion_start: int | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)


class DatasetFormat(ABC):
    """How one layout of rows is read. `columns`: the layout in words, shown where no format matches."""

    name: str
    columns: str

    @abstractmethod
    def matches(self, columns: Set[str]) -> bool:
        """Whether rows with these columns are of this layout."""

    @abstractmethod
    def to_example(self, row: Mapping[str, Any]) -> Example:
        """The row as an Example. Raises DataError with the reason where the row cannot be used."""


class Chat(DatasetFormat):
    """`messages` or `conversations`: role/content or from/value; tools, tool calls, per-message train and weight."""

    name = "chat"
    columns = "messages (role, content) or conversations (from, value); optional tools, system"

    def matches(self, columns: Set[str]) -> bool:
        return bool(columns & {"messages", "conversations", "conversation"})

    def to_example(self, row: Mapping[str, Any]) -> Example:
        column = next((name for name in ("messages", "conversations", "conversation") if row.get(name)), None)
        if column is None:
            raise DataError("the conversation is empty")
        messages = conversation(row[column], column)
        if row.get("system") and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": _text_of(row["system"], "system")})
        variables = row.get("chat_template_kwargs") or {}
        return Example(messages=messages, tools=tools_of(row), template_variables=dict(variables))


class PromptCompletion(DatasetFormat):
    """`prompt` and `completion`, both strings (no template) or both lists of messages."""

    name = "prompt_completion"
    columns = "prompt, completion"

    def matches(self, columns: Set[str]) -> bool:
        return {"prompt", "completion"} <= columns

    def to_example(self, row: Mapping[str, Any]) -> Example:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise DataError("completion is empty")
            return Example(text=prompt + completion, completion_start=len(prompt))
        if isinstance(prompt, list) and isinstance(completion, list):
            head, tail = conversation(prompt, "prompt"), conversation(completion, "completion")
            return Example(messages=head + tail, tools=tools_of(row), completion_start=len(head))
        raise DataError(f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}; "
                        "both strings or both lists of messages are wanted")


class Instruction(DatasetFormat):
    """`instruction`, optional `input`, and `output`; optional `system` and `history` of [question, answer] pairs."""

    name = "instruction"
    columns = "instruction, output; optional input, system, history"

    def matches(self, columns: Set[str]) -> bool:
        return {"instruction", "output"} <= columns or {"query", "response"} <= columns

    def to_example(self, row: Mapping[str, Any]) -> Example:
        question = "\n\n".join(_text_of(row[name], name) for name in ("instruction", "query", "input") if row.get(name))
        answer = row.get("output") if row.get("output") is not None else row.get("response")
        if not question or not answer:
            raise DataError("the instruction is empty" if not question else "the output is empty")
        messages: list[Message] = []
        if row.get("system"):
            messages.append({"role": "system", "content": _text_of(row["system"], "system")})
        for pair in row.get("history") or []:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise DataError("history is not a list of [question, answer] pairs")
            messages += [{"role": "user", "content": _text_of(pair[0], "history")},
                         {"role": "assistant", "content": _text_of(pair[1], "history")}]
        messages += [{"role": "user", "content": question},
                     {"role": "assistant", "content": _text_of(answer, "output")}]
        return Example(messages=messages)


class Text(DatasetFormat):
    """`text`: plain text, every token trained on."""

    name = "text"
    columns = "text"

    def matches(self, columns: Set[str]) -> bool:
        return "text" in columns

    def to_example(self, row: Mapping[str, Any]) -> Example:
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f"text is a {type(text).__name__}, not a string")
        if not text.strip():
            raise DataError("text is empty")
        return Example(text=text)


BUILTIN: dict[str, DatasetFormat] = {
    item.name: item for item in (Chat(), PromptCompletion(), Instruction(), Text())
}
_SYNONYMS = {"sharegpt": "chat", "messages": "chat", "openai": "chat", "alpaca": "instruction", "completion": "text",
             "pretrain": "text"}


def find_format(kind: str, columns: Set[str], where: str,
                formats: Mapping[str, DatasetFormat] = BUILTIN) -> DatasetFormat:
    """The format that `type: kind` names, or, for `auto`, the first that matches these columns.

    where: the first row's file and line. Raises DataError with the columns found and the nearest known layout.
    """
    kind = kind if kind in formats else _SYNONYMS.get(kind, kind)
    if kind != "auto":
        if kind not in formats:
            near = difflib.get_close_matches(kind, list(formats) + list(_SYNONYMS), n=1)
            raise DataError(f"dataset type {kind!r} is not known" + (f"; did you mean {near[0]}?" if near else ""),
                            f"Known types: auto, {', '.join(formats)}.")
        if not formats[kind].matches(columns):
            raise DataError(f"{where}: {_columns_found(columns)}; type {kind} reads {formats[kind].columns}",
                            "Set another `type`, or map the names with `columns`.")
        return formats[kind]
    found = next((item for item in formats.values() if item.matches(columns)), None)
    if found is None:
        nearest = max(formats.values(), key=lambda item: _likeness(columns, item))
        raise DataError(f"{where}: {_columns_found(columns)}, which is no known layout",
                        f"The nearest one is {nearest.name}: {nearest.columns}. Rename the columns, or map them with "
                        "`columns: {name that is known: name in the file}`.")
    return found


def _columns_found(columns: Set[str]) -> str:
    return f"columns found: {', '.join(sorted(columns))}"


def _likeness(columns: Set[str], item: DatasetFormat) -> float:
    wanted = item.columns.replace(";", ",").replace("(", ",").replace(")", ",").split(",")
    names = [name.strip().removeprefix("optional ") for name in wanted if name.strip()]
    return max((difflib.SequenceMatcher(None, a.lower(), b).ratio() for a in columns for b in names), default=0.0)


def conversation(messages: Any, column: str) -> list[Message]:
    """Messages in one spelling: role, content, parsed tool calls. Raises DataError naming the message."""
    if not isinstance(messages, list):
        raise DataError(f"{column} is a {type(messages).__name__}, not a list of messages")
    if not messages:
        raise DataError(f"{column} is empty")
    return [_message(message, f"{column}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is a {type(message).__name__}, not an object")
    spoken = message.get("role", message.get("from"))
    if spoken not in ROLES:
        raise DataError(f"{where} has the role {spoken!r}; known roles: {', '.join(ROLES)}")
    out = {key: value for key, value in message.items()
           if key not in ("role", "from", "content", "value", "tool_calls", "loss", *_REASONING_NAMES)}
    out["role"] = ROLES[spoken]
    content = message.get("content", message.get("value"))
    calls = message.get("tool_calls") or None
    if spoken == "function_call":
        calls, content = _loads(content, where), ""
        calls = calls if isinstance(calls, list) else [calls]
    if content is None and calls is None:
        raise DataError(f"{where} has no content")
    out["content"] = content if content is None else _text_of(content, where)
    if calls is not None:
        out["tool_calls"] = [_tool_call(call, where) for call in calls]
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:
        out["reasoning_content"] = out["thinking"] = reasoning
    if "loss" in message and message["loss"] is not None:
        out["train"] = bool(message["loss"])
    return _checked_supervision(out, where)


def _checked_supervision(message: Message, where: str) -> Message:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{where}: train is {train!r}, not true or false")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0):
        raise DataError(f"{where}: weight is {weight!r}, not a number of at least 0")
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"{where}: a tool call is a {type(call).__name__}, not an object")
    function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else dict(call)
    if not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _loads(arguments, f"{where}: arguments of {function['name']}")
    function["arguments"] = arguments
    rest = {key: value for key, value in call.items() if key in ("id", "type", "index") and value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _loads(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def _text_of(content: Any, where: str) -> str:
    """A string, or the joined text parts of a list of content parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    if isinstance(content, list):
        raise DataError(f"{where}: has parts that are not text; only text can be trained on")
    raise DataError(f"{where}: content is a {type(content).__name__}, not text")


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The row's tools as a list of schemas, from a list or its JSON text; None where there are none."""
    tools = row.get("tools") if row.get("tools") is not None else row.get("tool_defs")
    tools = _loads(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("tools is not a list of objects")
    return [dict(tool) for tool in tools]
