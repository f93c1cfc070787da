"""Calls in Gemma's own notation: call:NAME{key:"text", other:[1,{inner:true}]}, where a token of its own delimits
strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.calls import JsonValue, Steps, is_json_number, overlap, properties_of
from surogate_core.plugins import CallProgress, CallReader

from .literal_grammar import LiteralGrammar

_NAME = re.compile(r"[\w.\-]+")
_BARE_END = re.compile(r"[,:{}\[\]]")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class LiteralCall:
    """quote: what delimits strings. Keys are bare (quoted ones are read too); a bare value is a number, a constant,
    or, where the tool's schema says so or nothing else fits, a string."""

    quote: str
    rules: str = ""

    @property
    def quotes(self) -> tuple[str, ...]:
        return (self.quote,)

    def reader(self, tools: Mapping[str, Mapping[str, Any]], quote_marks: Mapping[str, str]) -> CallReader:
        return _LiteralReader(tools, quote_marks.get(self.quote, self.quote))

    def grammar(self, name: str, parameters: Mapping[str, Any], terminal: Callable[[str], str]) -> str:
        return f"{json.dumps('call:' + name)} {LiteralGrammar(parameters, terminal(self.quote)).object(parameters)}"


class _LiteralReader(Steps):
    """Turns the notation into JSON as it comes. Text that may still become a quote waits in the buffer."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], quote: str) -> None:
        super().__init__(self._read_name)
        self._tools, self._quote = tools, quote
        self._open: list[str] = []
        self._types: Mapping[str, Any] = {}  # schemas of the call's own arguments
        self._key = ""
        self._is_key = False  # of the string that is being read
        self._text = ""  # of a key that is quoted
        self._json: JsonValue | None = None
        self._last = ""  # the last character that was told

    def finish(self, closed: bool) -> CallProgress:
        return CallProgress()

    # Each step takes what it can from the buffer; False where it needs more, or where the call is over.

    def _read_name(self) -> bool:
        text = self._buffer.lstrip()
        if not text or len(text) < 5 and "call:".startswith(text):
            return False
        name = _NAME.match(text, 5)
        if not text.startswith("call:") or (name is None and len(text) > 5):
            return self._fail()
        if name is None or name.end() == len(text):
            return False
        if text[name.end()] != "{":
            return self._fail()
        self._progress.name = name.group()
        self._types = properties_of(self._tools.get(name.group()))
        self._buffer = text[name.end() + 1 :]
        self._enter("{")
        return True

    def _enter(self, bracket: str) -> None:
        self._open.append(bracket)
        self._put(bracket)
        self._step = self._read_key if bracket == "{" else self._read_value
        if len(self._open) > 64:
            self._fail()

    def _read_key(self) -> bool:
        """A key and its colon, or the end of an empty object."""
        if not self._skip_space():
            return False
        if self._buffer[0] == "}" and self._last == "{":
            return self._close()
        quoted = self._starts_quote()
        if quoted is None:
            return False
        if quoted:
            self._begin_string(is_key=True)
            return True
        if self._buffer[0] == '"':
            return self._read_json(is_key=True)
        found = _BARE_END.search(self._buffer)
        if found is None:
            return False
        key = self._buffer[: found.start()].strip()
        if found.group() != ":" or not key:
            return self._fail()
        self._buffer = self._buffer[found.start() :]
        self._end_key(key, put=True)
        return True

    def _end_key(self, key: str, put: bool) -> None:
        if len(self._open) == 1:
            self._key = key
        if put:
            self._put(json.dumps(key, ensure_ascii=False))
        self._step = self._read_colon

    def _read_colon(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] != ":":
            return self._fail()
        self._take(1, ":")
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        if not self._skip_space():
            return False
        first = self._buffer[0]
        if first in "{[":
            self._buffer = self._buffer[1:]
            self._enter(first)
            return not self._progress.failed
        if first == "]" and self._last == "[":
            return self._close()
        quoted = self._starts_quote()
        if quoted is None:
            return False
        if quoted:
            self._begin_string(is_key=False)
            return True
        if first == '"':
            return self._read_json(is_key=False)
        return self._read_bare()

    def _read_bare(self) -> bool:
        found = _BARE_END.search(self._buffer)
        if found is None:
            return False
        text = self._buffer[: found.start()].strip()
        if not text or found.group() not in ",}]":
            return self._fail()
        wants_text = len(self._open) == 1 and self._types.get(self._key, {}).get("type") == "string"
        value = _CONSTANTS.get(text) or (text if is_json_number(text) else None)
        self._put(json.dumps(text, ensure_ascii=False) if value is None or wants_text else value)
        self._buffer = self._buffer[found.start() :]
        self._step = self._read_next
        return True

    def _begin_string(self, is_key: bool) -> None:
        self._buffer = self._buffer[len(self._quote) :]
        self._is_key, self._text = is_key, ""
        self._put('"')
        self._step = self._read_string

    def _read_string(self) -> bool:
        end = self._buffer.find(self._quote)
        size = end if end >= 0 else len(self._buffer) - overlap(self._buffer, self._quote)
        self._text += self._buffer[:size] if self._is_key else ""
        self._take(size, json.dumps(self._buffer[:size], ensure_ascii=False)[1:-1])
        if end < 0:
            return False
        self._take(len(self._quote), '"')
        if self._is_key:
            self._end_key(self._text, put=False)
        else:
            self._step = self._read_next
        return True

    def _read_json(self, is_key: bool) -> bool:
        """A string as JSON has it."""
        self._is_key, self._text = is_key, ""
        self._json, self._step = JsonValue(), self._read_json_more
        return True

    def _read_json_more(self) -> bool:
        assert self._json is not None
        told, taken = self._json.feed(self._buffer)
        self._text += told if self._is_key else ""
        self._take(taken, told)
        if self._json.bad:
            return self._fail()
        if not self._json.done:
            return False
        if self._is_key:
            self._end_key(json.loads(self._text), put=False)
        else:
            self._step = self._read_next
        return True

    def _read_next(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == ",":
            self._take(1, ",")
            self._step = self._read_key if self._open[-1] == "{" else self._read_value
            return True
        if self._buffer[0] == ("}" if self._open[-1] == "{" else "]"):
            return self._close()
        return self._fail()

    def _close(self) -> bool:
        self._take(1, self._buffer[0])
        self._open.pop()
        self._step = self._read_next
        self._progress.complete = not self._open
        return not self._progress.complete

    def _fail(self) -> bool:
        self._progress.failed = True
        return False

    def _skip_space(self) -> bool:
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _starts_quote(self) -> bool | None:
        """None where the buffer may still become a quote."""
        if self._buffer.startswith(self._quote):
            return True
        return None if self._quote.startswith(self._buffer) else False

    def _put(self, text: str) -> None:
        self._progress.arguments += text
        self._last = text[-1:] or self._last

    def _take(self, size: int, told: str) -> None:
        self._buffer = self._buffer[size:]
        self._put(told)
