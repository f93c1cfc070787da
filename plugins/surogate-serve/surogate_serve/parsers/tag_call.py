"""Calls as tags around raw values: Qwen3-Coder, Qwen3.5, Nemotron 3.

<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>

A value is text as it is, without one newline on each side; what it is in JSON is up to the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.calls import Steps, overlap, properties_of
from surogate_core.plugins import CallProgress, CallReader

_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
# What ends a value. Models leave closing tags out, but begin the next one on a line of its own.
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
_VALUE_END = re.compile("|".join(map(re.escape, _VALUE_ENDS)))
_NAME = re.compile(r"[^\s<>]+")
_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class TagCall:
    """Values of parameters whose schema says "string", or nothing, are texts; others are JSON where they can be read
    so."""

    quotes: tuple[str, ...] = ()
    # A text up to its closing tag, without what would end it for the reader.
    rules: str = (
        "tag_text[lazy]: TAG_TEXT\n"
        "TAG_TEXT: /(.|\\n)*<\\/parameter>/ & ~/(.|\\n)*\\n<(parameter=|\\/function>)(.|\\n)*/"
    )

    def reader(self, tools: Mapping[str, Mapping[str, Any]], quote_marks: Mapping[str, str]) -> CallReader:
        return _TagReader(tools)

    def grammar(self, name: str, parameters: Mapping[str, Any], terminal: Callable[[str], str]) -> str:
        root = {key: parameters[key] for key in ("$defs", "definitions", "x-guidance") if key in parameters}
        required = set(parameters.get("required") or ())
        pairs = []
        for key, schema in (parameters.get("properties") or {}).items():
            pair = f'{json.dumps(f"{_PARAMETER}{key}>" + chr(10))} {_value_grammar(schema, root)} "\\n"'
            pairs.append(pair if key in required else f"({pair})?")
        return f"{json.dumps(f'{_FUNCTION}{name}>' + chr(10))} {' '.join(pairs)} {json.dumps(_END)}"


def _value_grammar(schema: Any, root: Mapping[str, Any]) -> str:
    """A value with its closing tag."""
    if not _is_text(schema):
        return f'%json {json.dumps({**schema, **root})} "\\n</parameter>"'
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) and value for value in values):
        return f'({" | ".join(json.dumps(value, ensure_ascii=False) for value in values)}) "\\n</parameter>"'
    return "tag_text"


def _is_text(schema: Any) -> bool:
    """Whether a value is taken as it is written."""
    known = isinstance(schema, Mapping) and any(key in schema for key in ("type", "anyOf", "oneOf", "allOf", "$ref"))
    return not known or schema.get("type") == "string"


class _TagReader(Steps):
    """Steps through the tags; texts go on as they come, other values once they are whole."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(self._read_function)
        self._tools = tools
        self._schemas: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        self._key = ""

    def finish(self, closed: bool) -> CallProgress:
        """The closing marker stands for the tags that are missing before it."""
        self._progress = CallProgress()
        if closed and self._step in (self._read_tag, self._read_text, self._read_value):
            if self._step != self._read_tag:
                self._end_value(self._buffer.removesuffix("\n"))
            self._progress.arguments += "}"
            self._progress.complete = True
        return self._progress

    # Each step takes what it can from the buffer; False where it needs more, or where the call is over.

    def _tag(self, beginning: str) -> str | None:
        """The name in a tag that begins like this; "" where it may still come, None where it does not."""
        if not self._buffer.startswith(beginning):
            return "" if beginning.startswith(self._buffer) else None
        name = _NAME.match(self._buffer, len(beginning))
        if name is None:
            return "" if len(self._buffer) == len(beginning) else None
        if name.end() == len(self._buffer):
            return ""
        if self._buffer[name.end()] != ">":
            return None
        self._buffer = self._buffer[name.end() + 1 :]
        return name.group()

    def _read_function(self) -> bool:
        self._buffer = self._buffer.lstrip()
        name = self._tag(_FUNCTION)
        self._progress.failed = name is None
        if not name:
            return False
        self._schemas = properties_of(self._tools.get(name))
        self._progress.name, self._progress.arguments = name, "{"
        self._step = self._read_tag
        return True

    def _read_tag(self) -> bool:
        """The next parameter, or the end."""
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_END):
            self._buffer = self._buffer[len(_END) :]
            self._progress.arguments += "}"
            self._progress.complete = True
            return False
        key = self._tag(_PARAMETER)
        if key is None and _END.startswith(self._buffer):
            return False
        if key is None or key in self._keys:
            self._progress.failed = True
        if not key or self._progress.failed:
            return False
        self._progress.arguments += (", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": "
        self._keys.add(key)
        self._key, self._step = key, self._read_newline
        return True

    def _read_newline(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        is_text = _is_text(self._schemas.get(self._key))
        self._progress.arguments += '"' if is_text else ""
        self._step = self._read_text if is_text else self._read_value
        return True

    def _read_text(self) -> bool:
        found = _VALUE_END.search(self._buffer)
        if found is None:
            sure = len(self._buffer) - overlap(self._buffer, *_VALUE_ENDS)
            self._progress.arguments += json.dumps(self._buffer[:sure], ensure_ascii=False)[1:-1]
            self._buffer = self._buffer[sure:]
            return False
        return self._take_value(found)

    def _read_value(self) -> bool:
        found = _VALUE_END.search(self._buffer)
        return self._take_value(found) if found is not None else False

    def _take_value(self, found: re.Match[str]) -> bool:
        self._end_value(self._buffer[: found.start()])
        is_closed = found.group().endswith("</parameter>")
        self._buffer = self._buffer[found.end() if is_closed else found.start() :]
        self._step = self._read_tag
        return True

    def _end_value(self, text: str) -> None:
        if self._step == self._read_text:
            self._progress.arguments += json.dumps(text, ensure_ascii=False)[1:-1] + '"'
            return
        try:
            value = _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
            self._progress.arguments += json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self._progress.arguments += json.dumps(text, ensure_ascii=False)
