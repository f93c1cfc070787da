"""The formats that come with the server: those that models of several families write. One that only a family's own models
write comes with the family's plugin, like its template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.calls import JsonCall, call_markers
from surogate_core.plugins import OutputFormat

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
    markers=call_markers("<tool_call>", "</tool_call>"),
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
    markers=call_markers("<tool_call>", "</tool_call>"),
    call_begin="<tool_call>",
    call_end="</tool_call>",
    call_separator="\n",
    turn_ends=("<|im_end|>", "<|endoftext|>"),
    thinking_variables=_thinking_variables,
    detect=lambda template: 12 if "<tool_call>" in template and "<function=" in template else 0,
)

FORMATS = {each.name: each for each in (PLAIN, THINK, HERMES, QWEN3_CODER)}
