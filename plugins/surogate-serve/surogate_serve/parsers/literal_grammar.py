"""Gemma's notation of a call's arguments as a grammar, from the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NUMBER = r'/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/'
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_TEXT = r"/[^<]*/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_MAX_DEPTH = 8


def literal_object(schema: Mapping[str, Any], quote: str, depth: int = 0) -> str:
    """An object's grammar as one expression of Lark: its properties in the schema's order, those that are not required may
    be left out. quote: what matches the delimiter of strings. An object without known properties takes any flat one."""
    properties = schema.get("properties") or {}
    if not properties or depth > _MAX_DEPTH:
        pair = f'{_KEY} ":" ({_any_scalar(quote)})'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'
    required = set(schema.get("required") or ())
    pairs = [(f'{json.dumps(key + ":")} {literal_value(value, quote, depth + 1)}', key in required)
             for key, value in properties.items()]
    return f'"{{" {_joined(pairs)} "}}"'


def literal_value(schema: Mapping[str, Any], quote: str, depth: int = 0) -> str:
    """A value's grammar. What has no form of its own here (references, combinations) takes any scalar."""
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return "(" + " | ".join(_constant(value, quote) for value in values) + ")"
    kind = schema.get("type")
    if isinstance(kind, list):
        return "(" + " | ".join(literal_value({**schema, "type": each}, quote, depth) for each in kind) + ")"
    if kind == "object":
        return literal_object(schema, quote, depth)
    if kind == "array" and depth <= _MAX_DEPTH:
        item = literal_value(schema.get("items") or {}, quote, depth + 1)
        return f'("[" ({item} ("," {item})*)? "]")'
    forms = {"string": f"({quote} {_TEXT} {quote})", "integer": _INTEGER, "number": _NUMBER,
             "boolean": '("true" | "false")', "null": '"null"'}
    return forms[kind] if kind in forms else f"({_any_scalar(quote)})"


def _any_scalar(quote: str) -> str:
    return f'{quote} {_TEXT} {quote} | {_NUMBER} | "true" | "false" | "null"'


def _constant(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"({quote} {json.dumps(value)} {quote})" if value else f"({quote} {quote})"
    return json.dumps(json.dumps(value))


def _joined(pairs: list[tuple[str, bool]]) -> str:
    """The pairs in order with commas between those that are there. From the last on: what may follow a pair, with its comma."""
    follows, alone = "", '""'
    for pair, is_required in reversed(pairs):
        alone = f"{pair} {follows}" if is_required else f"({pair} {follows} | {alone})"
        follows = f'"," {pair} {follows}' if is_required else f'("," {pair})? {follows}'
    return alone
