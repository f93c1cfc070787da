"""Calls that are one JSON object with a name and arguments, which many models write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..plugins import CallProgress, CallReader

from .json_text import JsonValue

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")


@dataclass(frozen=True)
class JsonCall:
    """{"name": ..., "arguments": {...}}; both ways to call the arguments are read, ``arguments`` is what is written.

    known_only: only a name among the request's tools makes a call, for formats where any JSON may be an answer.
    """

    arguments: str = "arguments"
    known_only: bool = False
    quotes: tuple[str, ...] = ()
    rules: str = ""

    def reader(self, tools: Mapping[str, Mapping[str, Any]], quote_marks: Mapping[str, str]) -> CallReader:
        return _JsonCallReader(frozenset(tools) if self.known_only else None)

    def grammar(self, name: str, parameters: Mapping[str, Any], terminal: Callable[[str], str]) -> str:
        own = dict(parameters) or {"type": "object"}
        # What the parameters refer to by a path from the root, and the grammar's settings, belong to the root.
        root = {key: own.pop(key) for key in ("$defs", "definitions", "x-guidance") if key in own}
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: own},
            "required": ["name", self.arguments],
            "additionalProperties": False,
            **root,
        }
        return f"%json {json.dumps(schema)}"


class _JsonCallReader:
    """Walks the outer object; the arguments' text goes on as it comes once the name is known, and waits until then."""

    def __init__(self, known: frozenset[str] | None) -> None:
        self._known = known
        self._expected = "{"  # {, key or }, key, :, value, `, or }`
        self._value: JsonValue | None = None  # the key or value that is being read
        self._text = ""  # of it, unless it is arguments that can go on
        self._key = ""
        self._name: str | None = None
        self._told_name = False
        self._begun = False
        self._whole = False  # the arguments
        self._as_text = False  # arguments written as a string that holds JSON
        self._waiting = ""  # arguments before the name
        self._progress = CallProgress()

    def feed(self, text: str) -> CallProgress:
        self._progress = CallProgress()
        place = 0
        while place < len(text) and not (self._progress.complete or self._progress.failed):
            place = self._read_value(text, place) if self._value is not None else self._read_mark(text, place)
        self._pass_on()
        if self._progress.complete or self._progress.failed:
            self._progress.rest = text[place:]
        return self._progress

    def finish(self, closed: bool) -> CallProgress:
        self._progress = CallProgress()
        if closed and self._whole and self._name is not None:
            self._complete()
            self._pass_on()
        return self._progress

    def _read_mark(self, text: str, place: int) -> int:
        """One character between values; returns the place after it, or its own where it is wrong."""
        char = text[place]
        if char in " \t\r\n":
            return place + 1
        if char == '"' and self._expected in ("key or }", "key"):
            self._begin_value("key")
            return place
        if self._expected == "value":
            self._begin_value("value")
            self._begin_arguments(char)
            return place
        if char == "{" and self._expected == "{":
            self._expected = "key or }"
        elif char == ":" and self._expected == ":":
            self._expected = "value"
        elif char == "," and self._expected == ", or }":
            self._expected = "key"
        elif char == "}" and self._expected in (", or }", "key or }"):
            self._complete()
        else:
            self._progress.failed = True
            return place
        return place + 1

    def _begin_value(self, expected: str) -> None:
        self._value, self._text, self._expected = JsonValue(), "", expected

    def _begin_arguments(self, char: str) -> None:
        """Arguments are an object, JSON of an object in a string, or null; once, and in that order of likelihood."""
        if self._key in _ARGUMENTS:
            if self._begun or char not in '{"n':
                self._progress.failed = True
            self._begun, self._as_text = True, char != "{"

    def _read_value(self, text: str, place: int) -> int:
        assert self._value is not None
        told, taken = self._value.feed(text[place:])
        if self._expected == "value" and self._key in _ARGUMENTS and not self._as_text:
            self._waiting += told
        else:
            self._text += told
        if self._value.bad:
            self._progress.failed = True
        elif self._value.done:
            self._end_value()
        return place + taken

    def _end_value(self) -> None:
        self._value = None
        if self._expected == "key":
            self._key, self._expected = json.loads(self._text), ":"
            if self._known is not None and self._key not in (_NAME, *_ARGUMENTS, *_OTHERS):
                self._progress.failed = True
            return
        self._expected = ", or }"
        if self._key == _NAME and self._name is None:
            name = json.loads(self._text)
            if not isinstance(name, str) or not name or self._known is not None and name not in self._known:
                self._progress.failed = True
                return
            self._name = name
        elif self._key in _ARGUMENTS:
            self._whole = True
            if self._as_text:
                self._end_arguments_in_text()

    def _end_arguments_in_text(self) -> None:
        try:
            value = json.loads(self._text)
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            self._progress.failed = True
            return
        if value is None:
            self._waiting += "{}"
        elif isinstance(value, dict):
            self._waiting += json.dumps(value, ensure_ascii=False)
        else:
            self._progress.failed = True

    def _complete(self) -> None:
        """The object closed: a call if it has a name; without arguments it has none."""
        if self._name is None:
            self._progress.failed = True
            return
        if not self._begun:
            self._waiting, self._whole = "{}", True
        self._progress.complete = True

    def _pass_on(self) -> None:
        """The call begins with its arguments, or its end: a name alone does not make one. What was read before
        something turned out wrong is still told, so that the pieces do not depend on how the text was cut."""
        if self._name is None or not self._waiting:
            return
        if not self._told_name:
            self._progress.name, self._told_name = self._name, True
        self._progress.arguments, self._waiting = self._waiting, ""
