"""Calls as Python writes them, name(key="value"), or as JSON, whichever the prompt asked for: Gemma 3."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.calls import JsonCall
from surogate_core.plugins import CallProgress, CallReader

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_NAME_ONLY = re.compile(r"[A-Za-z_][\w.]*\s*")


@dataclass(frozen=True)
class PythonCall:
    """Reads name(key=literal, ...), bare or in a list, and the JSON object of `JsonCall`. Only a tool of the request's
    is a call: any of these may be an answer. JSON is what is written."""

    quotes: tuple[str, ...] = ()
    rules: str = ""

    def reader(self, tools: Mapping[str, Mapping[str, Any]], quote_marks: Mapping[str, str]) -> CallReader:
        return _EitherReader(tools)

    def grammar(self, name: str, parameters: Mapping[str, Any], terminal: Callable[[str], str]) -> str:
        return JsonCall("parameters").grammar(name, parameters, terminal)


class _EitherReader:
    """Decides by the first character that is no space or list's beginning."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._chosen: CallReader | None = None

    def feed(self, text: str) -> CallProgress:
        if self._chosen is None:
            body = text.lstrip(" \t\r\n[")
            if not body:
                return CallProgress()
            self._chosen = (
                JsonCall(known_only=True).reader(self._tools, {}) if body[0] == "{" else _PythonReader(self._tools)
            )
            text = body
        return self._chosen.feed(text)

    def finish(self, closed: bool) -> CallProgress:
        return CallProgress() if self._chosen is None else self._chosen.finish(closed)


class _PythonReader:
    """Waits for the closing parenthesis: Python's literals become JSON only as a whole."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._text = ""
        self._place = 0
        self._depth = 0
        self._string = ""  # the quote of the string that is open
        self._escaped = False

    def feed(self, text: str) -> CallProgress:
        self._text += text
        if self._place == 0 and not self._read_name():
            wrong = not self._name_may_follow()
            return CallProgress(failed=wrong, rest=self._text if wrong else "")
        while self._place < len(self._text):
            self._walk(self._text[self._place])
            self._place += 1
            if self._depth == 0:
                return self._close()
        return CallProgress()

    def finish(self, closed: bool) -> CallProgress:
        return CallProgress()

    def _name_may_follow(self) -> bool:
        found = _NAME_ONLY.match(self._text)
        name = found.group().rstrip() if found else ""
        return (
            found is not None and found.end() == len(self._text) and any(each.startswith(name) for each in self._tools)
        )

    def _read_name(self) -> bool:
        """Whether the name and its parenthesis are there."""
        found = _NAME.match(self._text)
        after = self._text[found.end() :].lstrip() if found else ""
        if found is None or not after.startswith("(") or found.group() not in self._tools:
            return False
        self._place, self._depth = self._text.index("(") + 1, 1
        return True

    def _walk(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._string:
            self._escaped = char == "\\"
            self._string = "" if char == self._string else self._string
        elif char in "\"'":
            self._string = char
        else:
            self._depth += (char in "([{") - (char in ")]}")

    def _close(self) -> CallProgress:
        source, rest = self._text[: self._place], self._text[self._place :]
        try:
            call = ast.parse(source.strip(), mode="eval").body
            assert isinstance(call, ast.Call)
            names = [keyword.arg for keyword in call.keywords]
            if call.args or None in names:
                return CallProgress(failed=True, rest=rest)
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
            return CallProgress(failed=True, rest=rest)
        return CallProgress(_NAME.match(source).group(), arguments, True, rest=rest)  # type: ignore[union-attr]
