"""The formats of answers that only Gemma writes."""

from __future__ import annotations

from surogate_core.calls import call_markers
from surogate_core.plugins import Marker, OutputFormat

from .literal_call import LiteralCall
from .python_call import PythonCall

FUNCTIONGEMMA = OutputFormat(
    "functiongemma",
    call=LiteralCall("<escape>"),
    markers=call_markers("<start_function_call>", "<end_function_call>"),
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
    markers=call_markers("<|tool_call>", "<tool_call|>"),
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

FORMATS = (FUNCTIONGEMMA, GEMMA4, GEMMA3)
