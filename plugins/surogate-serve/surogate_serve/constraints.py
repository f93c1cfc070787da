"""What an answer can be held to, and each as a grammar of llguidance in its dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parsers import Parser
from .types import Refused

MAX_SCHEMA = 256 << 10  # characters of JSON
MAX_REGEX = 16 << 10
MAX_CHOICES = 4096
MAX_TOOLS = 256
MAX_DEPTH = 64

# Between two parts of JSON: enough for an indented object, not for a model that writes nothing else any more: small
# ones fall into rows of newlines, or of blanks.
_SPACES = r"[\x20\x09]{1,4}|(\x0D?\x0A){1,2}[\x20\x09]{0,40}"
# Formats that are checked; any other is an annotation and means nothing, as JSON Schema says.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas


@dataclass(frozen=True)
class JsonSchema:
    """JSON that a schema allows."""

    schema: Any


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True)
class Regex:
    """Text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """One of these texts."""

    values: Sequence[str]


@dataclass(frozen=True)
class Tools:
    """Calls of tools in the parser's format. tools: as in a chat request. required: the answer is calls and nothing
    else, with arguments that fit the tools' schemas; otherwise text and calls, and only the schemas of tools that say
    ``strict`` are held to. What of a schema cannot be held to is an error for strict tools. parallel: more than one
    call."""

    tools: Sequence[Mapping[str, Any]]
    required: bool = True
    parallel: bool = True
    otherwise: JsonSchema | JsonObject | Regex | Choice | None = None
    """With ``required``: what an answer without calls is held to."""


Constraint = JsonSchema | JsonObject | Regex | Choice | Tools


def lark(constraint: Constraint, param: str, parser: Parser | None = None) -> str:
    """The constraint's grammar. Raises Refused (400, ``param``) for one that is malformed or too large; whether its
    schemas and patterns make sense is told when the grammar is compiled."""
    if isinstance(constraint, JsonSchema):
        return f"start: %json {json_schema(constraint.schema, param)}"
    if isinstance(constraint, JsonObject):
        return f"start: %json {json_schema({'type': 'object'}, param)}"
    if isinstance(constraint, Regex):
        return f"start: /{_regex(constraint.pattern, param)}/"
    if isinstance(constraint, Choice):
        return f"start: {_choices(constraint.values, param)}"
    return _tools(constraint, param, parser)


def json_schema(schema: Any, param: str, lenient: bool = False) -> str:
    """A schema as it goes into a grammar, with the limits on spaces that hold for all JSON here. lenient: keywords
    that the library does not know are left out of account, where they are an error otherwise."""
    if not isinstance(schema, Mapping):
        raise Refused(f"{param}: a JSON schema is an object", param=param)
    cleaned = _cleaned(schema, param, 0)
    cleaned["x-guidance"] = {"whitespace_pattern": _SPACES, "lenient": lenient}
    try:
        text = json.dumps(cleaned, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise Refused(f"{param}: {error}"[:200], param=param) from None
    if len(text) > MAX_SCHEMA:
        raise Refused(f"{param}: the schema has {len(text)} characters, at most {MAX_SCHEMA} are allowed", param=param)
    return text


def _cleaned(value: Any, param: str, depth: int) -> Any:
    """The schema without formats that mean nothing here, and without a client's own settings of the grammar library."""
    if depth > MAX_DEPTH:
        raise Refused(f"{param}: the schema is nested more than {MAX_DEPTH} deep", param=param)
    if isinstance(value, list | tuple):
        return [_cleaned(item, param, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    result = {}
    for key, item in value.items():
        if key == "x-guidance" or key == "format" and isinstance(item, str) and item not in _FORMATS:
            continue
        result[key] = item if key in _DATA else _cleaned(item, param, depth + 1)
    return result


def _regex(pattern: Any, param: str) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise Refused(f"{param}: a regular expression is a text that is not empty", param=param)
    if len(pattern) > MAX_REGEX:
        raise Refused(f"{param}: the pattern has {len(pattern)} characters, at most {MAX_REGEX}", param=param)
    # It matches the whole text anyway, and the library knows no anchors.
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    return _escaped_slashes(pattern).replace("\n", "\\n")


def _escaped_slashes(pattern: str) -> str:
    """A slash would end the pattern in a grammar."""
    result, escaped = [], False
    for char in pattern:
        result.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(result)


def _choices(values: Any, param: str) -> str:
    if not isinstance(values, list | tuple) or not values or not all(isinstance(each, str) and each for each in values):
        raise Refused(f"{param}: choices are a list of texts that are not empty", param=param)
    if len(values) > MAX_CHOICES or sum(map(len, values)) > MAX_SCHEMA:
        raise Refused(f"{param}: at most {MAX_CHOICES} choices of {MAX_SCHEMA} characters together", param=param)
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in values)


def _tools(constraint: Tools, param: str, parser: Parser | None) -> str:
    if parser is None or parser.format.call is None:
        name = parser.format.name if parser is not None else "none"
        words = f"this model's answers (format {name}) have no tool calls that could be forced"
        raise Refused(words, 501, "unsupported", param)
    if not constraint.tools or len(constraint.tools) > MAX_TOOLS:
        raise Refused(f"{param}: from 1 to {MAX_TOOLS} tools, not {len(constraint.tools)}", param=param)
    bodies = []
    for tool in constraint.tools:
        function = tool["function"]
        is_strict = bool(function.get("strict"))
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise Refused(f"{param}: parameters of {function['name']!r} are no JSON schema"[:200], param=param)
        parameters = parameters if constraint.required or is_strict else {}
        schema = json.loads(json_schema({"type": "object", **parameters}, param, lenient=not is_strict))
        bodies.append(parser.format.call.grammar(function["name"], schema, parser.terminal))
    rules = "\n".join(f"call_{i}: {body}" for i, body in enumerate(bodies))
    if constraint.otherwise is not None:
        answer = lark(constraint.otherwise, param).removeprefix("start: ")
        form = f"{_forced(parser, constraint.parallel, ' | answer')}\nanswer: {answer}"
    elif constraint.required:
        form = _forced(parser, constraint.parallel)
    else:
        form = _free(parser, constraint.parallel)
    rules += "\n" + parser.format.call.rules
    return f'{form}\nbody: {" | ".join(f"call_{i}" for i in range(len(bodies)))}\n{rules}\nNEWLINE: "\\n"\n'


def _forced(parser: Parser, parallel: bool, otherwise: str = "") -> str:
    """Calls and nothing else, or else what ``otherwise`` says."""
    begin, separator = parser.format.call_begin, parser.format.call_separator
    before = f"{parser.terminal(begin)} NEWLINE? " if begin else ""
    more = f" ({json.dumps(separator) if separator else ''} call)*" if parallel else ""
    return f"start: call{more}{otherwise}\ncall: {before}body{_end(parser)}"


def _free(parser: Parser, parallel: bool) -> str:
    """Text in which calls are held to their form."""
    begin, end = parser.format.call_begin, _end(parser)
    if not begin:  # only an answer that begins like a call is one
        return f"{_forced(parser, parallel, ' | OTHER')}\nOTHER: /[^{{](.|\\n)*/"
    if begin in parser.token_ids:
        answer = "(TEXT | call)*" if parallel else "TEXT? (call TEXT?)?"
        return f"start: {answer}\nTEXT: /(.|\\n)+/\ncall: {parser.terminal(begin)} NEWLINE? body{end}"
    # Text up to the first marker, as often as it comes, then text without one.
    spelled = "".join("\\" + char if not char.isalnum() and char not in "_<> " else char for char in begin)
    more = "*" if parallel else "?"
    return (
        f"start: (head NEWLINE? body{end}){more} REST?\nhead[lazy]: /(.|\\n)*{spelled}/\n"
        f"REST: /(.|\\n)+/ & ~/(.|\\n)*{spelled}(.|\\n)*/"
    )


def _end(parser: Parser) -> str:
    end = parser.format.call_end
    return f" NEWLINE? {parser.terminal(end)}" if end else ""
