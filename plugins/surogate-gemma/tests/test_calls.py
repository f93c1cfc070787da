"""Gemma's notations of calls, read beside the core alone: the same JSON however a body is cut, and what is no call is none.
What the server makes of whole answers is in its own tests."""

from __future__ import annotations

import json

import pytest

from surogate_core.plugins import get_manager
from surogate_gemma.calls.formats import FORMATS, FUNCTIONGEMMA, GEMMA3, GEMMA4
from surogate_gemma.templates import TEMPLATES

SCHEMA = {"properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"add": SCHEMA, "weather": {"type": "object"}}
NESTED = 'call:add{{a:{q}x, "y"}}{q},n:4,l:[1,{{b:true}},[]],o:{{}},{q}k{q}:"j\\n"}}'

WAITS = "more of it"


def read(form, pieces):
    """(name, arguments, rest) of a call; None where it is none, WAITS where it may still become one."""
    reader = form.call.reader(TOOLS, {})
    name, arguments = None, ""
    for at, piece in enumerate(pieces):
        told = reader.feed(piece)
        name, arguments = told.name or name, arguments + told.arguments
        if told.failed:
            return None
        if told.complete:
            return name, json.loads(arguments), told.rest + "".join(pieces[at + 1 :])
    return WAITS


def read_cut_anywhere(form, text):
    """What every way to cut a text in two, and to cut it into characters, gives."""
    ways = [[text[:at], text[at:]] for at in range(len(text))] + [list(text)]
    first, *others = [read(form, way) for way in ways]
    assert all(other == first for other in others)
    return first


def test_they_are_what_a_server_can_name_and_what_templates_show():
    parsers = get_manager().parsers
    assert {name for name in parsers if parsers.source(name).startswith("surogate-gemma")} == {each.name for each in FORMATS}
    for name, output_format in {"gemma": GEMMA3, "functiongemma": FUNCTIONGEMMA, "gemma4": GEMMA4}.items():
        assert max(FORMATS, key=lambda each: each.detect(TEMPLATES[name])) is output_format
        assert output_format.detect(TEMPLATES[name]) > 0


@pytest.mark.parametrize(("form", "quote"), [(FUNCTIONGEMMA, "<escape>"), (GEMMA4, '<|"|>')], ids=["functiongemma", "gemma4"])
def test_the_notation_becomes_json(form, quote):
    arguments = {"a": 'x, "y"}', "n": 4, "l": [1, {"b": True}, []], "o": {}, "k": "j\n"}
    assert read_cut_anywhere(form, NESTED.format(q=quote) + " more") == ("add", arguments, " more")
    for bad in ("call:{}", "call:add x", "call add{}", "call:add{a}", "call:add{a:}", "call:add{a:1]", "call:add{,}"):
        assert read_cut_anywhere(form, bad) is None
    for end in range(1, len(NESTED.format(q=quote))):
        assert read(form, [NESTED.format(q=quote)[:end]]) is WAITS


@pytest.mark.parametrize(("body", "arguments"), [
    ("zip:12345,days:12345", {"zip": "12345", "days": 12345}),
    ("city:New York, more : None ", {"city": "New York", "more": None}),
    ("in:{zip:7},days:[True, 1.50,-0]", {"in": {"zip": 7}, "days": [True, 1.5, 0]}),
])  # fmt: skip
def test_a_bare_value_follows_the_schema(body, arguments):
    assert read_cut_anywhere(FUNCTIONGEMMA, f"call:add{{{body}}}") == ("add", arguments, "")


@pytest.mark.parametrize(("text", "call"), [
    ("weather(city='Rome)', days=[1, {'a': None}])]", ("weather", {"city": "Rome)", "days": [1, {"a": None}]}, "]")),
    ("[ add(zip=\"it\\'s\")]", ("add", {"zip": "it's"}, "]")),
    ('{"name": "add", "parameters": {"zip": "7"}}\n```', ("add", {"zip": "7"}, "\n```")),
    ("print(1)", None), ("add(1)", None), ("add(zip=zip)", None), ("add(**{})", None), ("add(zip=1", WAITS), ("ad", WAITS),
    ("added(zip=1)", None), ('{"name": "print", "parameters": {}}', None),
])  # fmt: skip
def test_python_or_json(text, call):
    assert read_cut_anywhere(GEMMA3, text) == call
