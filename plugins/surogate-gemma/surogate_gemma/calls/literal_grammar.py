"""Gemma's notation of a call's arguments as a grammar, from the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_MAX_DEPTH = 8


class LiteralGrammar:
    """Writes expressions of Lark for the values of one schema.

    Types, properties, items, enum, const and references to definitions are held to; lengths, patterns and combinations
    are not, which take any scalar.
    """

    def __init__(self, root: Mapping[str, Any], quote: str) -> None:
        """root: the schema that references start from. quote: what matches the delimiter of strings."""
        self._root, self._quote = root, quote
        # Where the delimiter is a token, no text can be taken for it.
        self._text = r"/(.|\n)*/" if quote.startswith("<[") else r"/[^<]*/"

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """Properties in the schema's order; those that are not required may be left out. Without known properties any
        flat object."""
        properties = schema.get("properties") or {}
        if not properties or depth > _MAX_DEPTH:
            pair = f'{_KEY} ":" ({self._scalar()})'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        required = set(schema.get("required") or ())
        pairs = [
            (f"{json.dumps(key + ':')} {self.value(value, depth + 1)}", key in required)
            for key, value in properties.items()
        ]
        return f'"{{" {_joined(pairs)} "}}"'

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return "(" + " | ".join(map(self._constant, values)) + ")"
        kind = schema.get("type")
        if isinstance(kind, list):
            return "(" + " | ".join(self.value({**schema, "type": each}, depth) for each in kind) + ")"
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array" and depth <= _MAX_DEPTH:
            item = self.value(schema.get("items") or {}, depth + 1)
            return f'("[" ({item} ("," {item})*)? "]")'
        forms = {
            "string": f"({self._quote} {self._text} {self._quote})", "integer": _INTEGER, "number": _NUMBER,
            "boolean": '("true" | "false")', "null": '"null"',
        }  # fmt: skip
        return forms[kind] if kind in forms else f"({self._scalar()})"

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a reference to a definition stands for; nothing known for any other."""
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                break
            _, _, path = reference.partition("#/")
            schema = self._root
            for part in path.split("/"):
                schema = schema.get(part, {}) if isinstance(schema, Mapping) else {}
        return schema if isinstance(schema, Mapping) else {}

    def _scalar(self) -> str:
        return f'{self._quote} {self._text} {self._quote} | {_NUMBER} | "true" | "false" | "null"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {json.dumps(value)} {self._quote})" if value else f"({self._quote} {self._quote})"
        return json.dumps(json.dumps(value))


def _joined(pairs: list[tuple[str, bool]]) -> str:
    """The pairs in order with commas between those that are there. From the last on: what may follow a pair, with its
    comma."""
    follows, alone = "", '""'
    for pair, is_required in reversed(pairs):
        alone = f"{pair} {follows}" if is_required else f"({pair} {follows} | {alone})"
        follows = f'"," {pair} {follows}' if is_required else f'("," {pair})? {follows}'
    return alone
