"""JSON that comes in pieces: what can be told of a value so far, always the beginning of valid JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 128
_SCALAR_END = frozenset(" \t\r\n,]}:")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\r\n"


class JsonValue:
    """Reads one JSON value. ``done``: it is whole; ``bad``: it is no JSON. What models often get wrong and what has
    only one meaning is put right: control characters in strings are escaped, and so is the backslash of an escape that
    JSON lacks."""

    def __init__(self) -> None:
        self.done = self.bad = False
        self._open: list[str] = []  # "{" and "["
        self._expected = "value"  # value, first key, key, colon, first element, next; or inside: string, escape, scalar
        self._is_key = False
        self._part = ""  # of an escape or a scalar

    def feed(self, text: str) -> tuple[str, int]:
        """What ``text`` adds to the value, and how many characters of it were taken: all, or those before the end or
        before what is wrong."""
        out: list[str] = []
        place = 0
        while place < len(text) and not (self.done or self.bad):
            if self._expected == "string":
                plain = _PLAIN.match(text, place)
                if plain is not None:
                    out.append(plain.group())
                    place = plain.end()
                    continue
            taken = self._character(text[place], out)
            place += taken
        return "".join(out), place

    def end(self) -> str:
        """The text is over: ends a number, true, false or null that only waited for what follows."""
        out: list[str] = []
        if self._expected == "scalar" and not self._open:
            self._end_scalar(out)
        return "".join(out)

    def _character(self, char: str, out: list[str]) -> bool:
        """Takes one character; False where it was not taken."""
        if self._expected == "string":
            self._in_string(char, out)
        elif self._expected == "escape":
            self._in_escape(char, out)
        elif self._expected == "scalar":
            if char in _SCALAR_END:
                self._end_scalar(out)
                return False
            self._part += char
            self.bad = len(self._part) > 400
        elif char in _SPACE:
            out.append(char)
        else:
            self._between(char, out)
        return not self.bad

    def _between(self, char: str, out: list[str]) -> None:
        expected = self._expected
        if char == '"' and expected in ("value", "first element", "key", "first key"):
            self._is_key = expected in ("key", "first key")
            self._expected = "string"
        elif char in "{[" and expected in ("value", "first element"):
            self._open.append(char)
            self._expected = "first key" if char == "{" else "first element"
            self.bad = len(self._open) > _MAX_DEPTH
        elif char == ":" and expected == "colon":
            self._expected = "value"
        elif char == "," and expected == "next":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif char in "}]" and self._may_close(char):
            self._open.pop()
            self._value_ended()
        elif expected in ("value", "first element") and (char.isalnum() or char == "-"):
            self._part, self._expected = char, "scalar"
            return
        else:
            self.bad = True
        if not self.bad:
            out.append(char)

    def _may_close(self, char: str) -> bool:
        if not self._open or self._open[-1] != ("{" if char == "}" else "["):
            return False
        return self._expected in ("next", "first key" if char == "}" else "first element")

    def _in_string(self, char: str, out: list[str]) -> None:
        if char == '"':
            out.append(char)
            if self._is_key:
                self._is_key, self._expected = False, "colon"
            else:
                self._value_ended()
        elif char == "\\":
            self._part, self._expected = char, "escape"
        else:
            out.append(json.dumps(char)[1:-1] if char < " " else char)

    def _in_escape(self, char: str, out: list[str]) -> None:
        self._part += char
        if self._part[1] == "u":
            if len(self._part) > 2 and char not in "0123456789abcdefABCDEF":
                self.bad = True
            elif len(self._part) == 6:
                out.append(self._part)
                self._expected = "string"
            return
        known = '"\\/bfnrt'
        out.append(
            self._part
            if char in known
            else char
            if char == "'"
            else "\\\\" + json.dumps(char, ensure_ascii=False)[1:-1]
        )
        self._expected = "string"

    def _end_scalar(self, out: list[str]) -> None:
        if self._part in ("true", "false", "null") or is_json_number(self._part):
            out.append(self._part)
            self._value_ended()
        else:
            self.bad = True

    def _value_ended(self) -> None:
        self.done = not self._open
        self._expected = "next"


def is_json_number(text: str) -> bool:
    """Whether JSON takes these characters as a number."""
    return re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", text, re.ASCII) is not None


def properties_of(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    """A schema's properties that say something; schemas come from outside."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): value for key, value in properties.items() if isinstance(value, Mapping)}
