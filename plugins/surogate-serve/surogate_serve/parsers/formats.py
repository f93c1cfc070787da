"""The formats that come with the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.plugins import Marker, OutputFormat

from .json_call import JsonCall
from .literal_call import LiteralCall
from .python_call import PythonCall
from .tag_call import TagCall

_THINK = ("<think>", "</think>")


def _thinking_variables(enabled: bool, effort: str | None) -> Mapping[str, Any]:
    """The names that templates with think tags read; `thinking` is DeepSeek's, `reasoning_effort` some others'."""
    variables: dict[str, Any] = {"enable_thinking": enabled, "thinking": enabled}
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def _has_think(template: str) -> bool:
    return "<think>" in template or "</think>" in template


def _between(begin: str, end: str) -> tuple[Marker, ...]:
    """Calls between two markers; an end without a beginning is dropped."""
    return (
        Marker(("start", "content", "called"), begin, "call"),
        Marker(("call", "called"), end, "called"),
        Marker(("start", "content"), end, "content"),
    )


PLAIN = OutputFormat("plain")

THINK = OutputFormat(
    "think",
    reasoning=_THINK,
    thinking_variables=_thinking_variables,
    detect=lambda template: 1 if _has_think(template) else 0,
)

HERMES = OutputFormat(
    "hermes",
    reasoning=_THINK,
    call=JsonCall(),
    markers=_between("<tool_call>", "</tool_call>"),
    call_begin="<tool_call>",
    call_end="</tool_call>",
    call_separator="\n",
    turn_ends=("<|im_end|>", "<|endoftext|>"),
    thinking_variables=_thinking_variables,
    detect=lambda template: 10 if "<tool_call>" in template and "<function=" not in template else 0,
)

QWEN3_CODER = OutputFormat(
    "qwen3_coder",
    reasoning=_THINK,
    call=TagCall(),
    markers=_between("<tool_call>", "</tool_call>"),
    call_begin="<tool_call>",
    call_end="</tool_call>",
    call_separator="\n",
    turn_ends=("<|im_end|>", "<|endoftext|>"),
    thinking_variables=_thinking_variables,
    detect=lambda template: 12 if "<tool_call>" in template and "<function=" in template else 0,
)

LLAMA3_JSON = OutputFormat(
    "llama3_json",
    call=JsonCall("parameters", known_only=True),
    markers=(
        Marker(("start", "content", "called"), "<|python_tag|>", "start"),
        Marker(("start", "called"), "{", "call", begins_body=True),
        Marker(("called",), ";", "called"),
    ),
    call_separator="; ",
    turn_ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    detect=lambda template: 10 if "<|start_header_id|>" in template and "parameters" in template else 0,
)

FUNCTIONGEMMA = OutputFormat(
    "functiongemma",
    call=LiteralCall("<escape>"),
    markers=_between("<start_function_call>", "<end_function_call>"),
    call_begin="<start_function_call>",
    call_end="<end_function_call>",
    turn_ends=("<end_of_turn>", "<start_function_response>", "<eos>"),
    detect=lambda template: 10 if "<start_function_call>" in template else 0,
)

GEMMA4 = OutputFormat(
    "gemma4",
    reasoning=("<|channel>", "<channel|>"),
    reasoning_header="thought\n",
    call=LiteralCall('<|"|>'),
    markers=_between("<|tool_call>", "<tool_call|>"),
    call_begin="<|tool_call>",
    call_end="<tool_call|>",
    turn_ends=("<turn|>", "<|tool_response>", "<eos>"),
    thinking_variables=lambda enabled, effort: {"enable_thinking": enabled},
    detect=lambda template: (
        10 if "<|tool_call>" in template else 5 if "<|channel>" in template and "<|turn>" in template else 0
    ),
)

# Gemma 3 has no notation of its own: the prompt asks for JSON or for Python, with or without a fence around it.
_FENCES = tuple(
    Marker(("start", "content"), f"```{language}\n", "call") for language in ("tool_code", "tool_call", "json")
)

GEMMA3 = OutputFormat(
    "gemma3",
    call=PythonCall(),
    markers=(
        *_FENCES,
        Marker(("start",), "{", "call", begins_body=True),
        Marker(("start",), "[", "call", begins_body=True),
        Marker(("called",), ",", "call"),
        Marker(("called",), "]", "called"),
        Marker(("called",), "```", "start"),
    ),
    turn_ends=("<end_of_turn>", "<eos>"),
    detect=lambda template: 3 if "<start_of_turn>" in template else 0,
)

FORMATS = {each.name: each for each in (PLAIN, THINK, HERMES, QWEN3_CODER, LLAMA3_JSON, FUNCTIONGEMMA, GEMMA4, GEMMA3)}
