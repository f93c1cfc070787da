"""The format of answers that only Llama writes: a call is JSON, several are parted by semicolons."""

from __future__ import annotations

from surogate_core.calls import JsonCall
from surogate_core.plugins import Marker, OutputFormat

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
