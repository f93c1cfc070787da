"""What an answer is held to: tools that must be called, JSON, a pattern. Each becomes a grammar of the model's
tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..constraints import Choice, JsonObject, JsonSchema, Regex, Tools
from ..types import Prompt, Refused


Form = JsonSchema | JsonObject | Regex | Choice
Definitions = list[dict[str, Any]]


def offered_tools(
    tools: Definitions, tool_choice: str | Mapping[str, Any] | None
) -> tuple[Definitions, str | dict[str, Any]]:
    """The tools that may be called, and the choice as one of "none", "auto", "required" and {"type": "function",
    "function": {"name"}}. Raises `Refused` for a choice that the tools do not allow."""
    names = {tool["function"]["name"]: tool for tool in tools}
    if tool_choice is None or isinstance(tool_choice, str):
        choice = tool_choice or "auto"
        if choice not in ("none", "auto", "required"):
            raise Refused(f"tool_choice is none, auto, required or an object, not {choice[:64]!r}", param="tool_choice")
        if choice == "required" and not tools:
            raise Refused("tool_choice required needs tools", param="tool_choice")
        return ([] if choice == "none" else tools), choice
    if tool_choice.get("type") == "allowed_tools":
        allowed = tool_choice.get("allowed_tools", tool_choice)
        chosen = [_named(names, each) for each in _list(allowed, "tools")]
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise Refused("the mode of allowed_tools is auto or required", param="tool_choice.mode")
        return chosen, mode
    if tool_choice.get("type") != "function":
        raise Refused("tool_choice names a function or allowed_tools", param="tool_choice.type")
    tool = _named(names, tool_choice)
    return [tool], {"type": "function", "function": {"name": tool["function"]["name"]}}


def _list(value: Any, key: str) -> list[Any]:
    items = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(items, list) or not items:
        raise Refused(f"allowed_tools needs a list of {key}", param="tool_choice")
    return items


def _named(tools: Mapping[str, dict[str, Any]], reference: Any) -> dict[str, Any]:
    function = reference.get("function") if isinstance(reference, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in tools:
        raise Refused(f"tool_choice names a tool that is not among tools: {str(name)[:64]!r}", param="tool_choice")
    return tools[name]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to be: response_format and structured_outputs as requests have them; tools and tool_choice as
    `offered_tools` gives them; parallel: whether a turn may have several calls."""

    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "none"
    parallel: bool = True


async def grammar_of(model: Any, parser: Any, prompt: Prompt, wanted: Wanted) -> Any:
    """What the engine is given, or None for free text. parser: None for texts that are continued as they are. Raises
    `Refused` that names the field whose grammar is bad, before anything is queued."""
    form, param = _format_of(wanted.response_format), "response_format"
    if wanted.structured_outputs is not None:
        if form is not None:
            raise Refused("response_format and structured_outputs exclude each other", param="structured_outputs")
        form, param = _structured(wanted.structured_outputs), "structured_outputs"
    called = _calls(parser, wanted)
    if called is not None and called.required:
        form, param = called, "tool_choice"
    elif form is not None and _may_call(parser, wanted):
        form = Tools(wanted.tools, True, wanted.parallel, otherwise=form)
    elif called is not None:
        form, param = called, "tools"
    return None if form is None else await model.grammars.compile(form, param, parser, prompt.tail)


def _calls(parser: Any, wanted: Wanted) -> Tools | None:
    """Tools that must be called, or whose arguments must fit when they are."""
    if not wanted.tools or wanted.tool_choice == "none":
        return None
    if wanted.tool_choice == "required":
        return Tools(wanted.tools, True, wanted.parallel)
    if isinstance(wanted.tool_choice, Mapping):
        return Tools(wanted.tools, True, False)
    strict = any(tool["function"].get("strict") for tool in wanted.tools)
    if strict and _may_call(parser, wanted):
        return Tools(wanted.tools, False, wanted.parallel)
    return None


def _may_call(parser: Any, wanted: Wanted) -> bool:
    return bool(wanted.tools) and wanted.tool_choice != "none" and parser is not None and parser.format.call is not None


def _format_of(given: Mapping[str, Any] | None) -> Form | None:
    """Of `response_format`."""
    kind = "text" if given is None else given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema") if given is not None else None  # as some servers have it
        return JsonObject() if schema is None else JsonSchema(schema)
    if kind != "json_schema":
        raise Refused("response_format.type is text, json_object or json_schema", param="response_format")
    assert given is not None
    described = given.get("json_schema")
    if not isinstance(described, Mapping):
        raise Refused("response_format.json_schema needs a name and a schema", param="response_format")
    schema = described.get("schema")
    return JsonObject() if schema is None else JsonSchema(schema)


def _structured(given: Mapping[str, Any]) -> Form:
    """Of `structured_outputs`, which other servers of open models have: one of json, json_object, regex and choice."""
    kinds = [kind for kind in ("json", "json_object", "regex", "choice") if given.get(kind) is not None]
    if len(kinds) != 1:
        raise Refused("structured_outputs holds one of json, json_object, regex and choice", param="structured_outputs")
    (kind,) = kinds
    value = given[kind]
    if kind == "json_object":
        return JsonObject()
    if kind == "regex":
        return Regex(value)
    if kind == "choice":
        return Choice(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Refused("structured_outputs.json is not valid JSON", param="structured_outputs") from None
    return JsonSchema(value)
