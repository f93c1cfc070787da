"""Reading answers: what is told does not depend on how the text is cut, and nothing is lost or claimed that is not
there."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surogate_core.plugins import get_manager
from surogate_serve.parsers import FORMATS as SERVERS
from surogate_serve.parsers import Parser, choose_format
from surogate_serve.types import Content, Reasoning, ToolCallArguments, ToolCallBegin, ToolCallEnd

FORMATS = dict(get_manager().parsers.items())  # the server's, and those of families' plugins
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "add")
]


class Tokens:
    """Markers that are tokens of their own, numbered from 1000 on."""

    def __init__(self, *texts: str) -> None:
        self.added_tokens = {text: 1000 + i for i, text in enumerate(texts)}


def read(parser, pieces, tools=TOOLS, tail=""):
    """Events of (token, text) pieces, neighbours joined; call ids left out."""
    stream = parser.stream(0, tail, tools)
    events = [event for token, text in pieces for event in stream.feed(token, text)] + stream.finish()
    return joined(events), stream


def joined(events):
    result = []
    for event in events:
        match event:
            case Content():
                new = ["content", event.text]
            case Reasoning():
                new = ["reasoning", event.text]
            case ToolCallBegin():
                new = ["begin", event.index, event.name]
            case ToolCallArguments():
                new = ["arguments", event.text]
            case ToolCallEnd():
                new = ["end", event.index]
        if result and new[0] == result[-1][0] and new[0] in ("content", "reasoning", "arguments"):
            result[-1][1] += new[1]
        else:
            result.append(new)
    return result


def text_of(name, text, tools=TOOLS, tail=""):
    return read(Parser(FORMATS[name]), [(0, text)], tools, tail)[0]


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'


def test_hermes_tells_reasoning_content_and_calls():
    events = text_of("hermes", f"<think>\nHm.\n</think>\n\nLet me see.\n{WEATHER}\n{WEATHER}")
    call = ["arguments", '{"city": "Rome", "days": 3}']
    assert events == [
        ["reasoning", "Hm."],
        ["content", "Let me see."],
        ["begin", 0, "weather"],
        call,
        ["end", 0],
        ["begin", 1, "weather"],
        call,
        ["end", 1],
    ]


def test_without_tools_a_call_is_text():
    assert text_of("hermes", WEATHER, tools=[]) == [["content", WEATHER]]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": null}', "{}"),
        ('{"name": "add", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "add", "arguments": {"a": "it\\\'s \\d"}}', '{"a": "it\'s \\\\d"}'),
        ('{"type": "function", "id": 7, "name": "add", "arguments": {}}', "{}"),
    ],
)
def test_ways_to_write_a_json_call(text, arguments):
    assert text_of("hermes", f"<tool_call>{text}</tool_call>") == [
        ["begin", 0, "add"],
        ["arguments", arguments],
        ["end", 0],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        '{"name": 5}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        "{",
        '{"name": "add", "argu',
        "[]",
    ],
)
def test_a_body_that_is_no_call_comes_out_as_it_is(text):
    events, stream = read(Parser(FORMATS["hermes"]), [(0, f"So: <tool_call>{text}</tool_call> done")])
    assert "".join(text for kind, text in events if kind == "content").startswith(f"So: <tool_call>{text}")
    assert stream.complete_calls == 0


def test_a_call_cut_short_is_begun_and_never_ended():
    events, stream = read(Parser(FORMATS["hermes"]), [(0, '<tool_call>{"name": "add", "arguments": {"a": 1')])
    assert events == [["begin", 0, "add"], ["arguments", '{"a": ']]
    assert stream.broken and not stream.complete_calls


def test_a_missing_closing_marker_does_not_undo_a_call():
    events, stream = read(Parser(FORMATS["hermes"]), [(0, '<tool_call>{"name": "add", "arguments": {}}')])
    assert events[-1] == ["end", 0] and stream.complete_calls == 1 and not stream.broken


def test_a_missing_brace_before_the_closing_token_is_forgiven():
    pieces = [(1000, ""), (0, '{"name": "add", "arguments": {}'), (1001, "")]
    events, stream = read(Parser(FORMATS["hermes"], Tokens("<tool_call>", "</tool_call>")), pieces)
    assert events[-1] == ["end", 0] and not stream.broken


def test_markers_that_are_tokens_are_not_matched_by_text():
    parser = Parser(FORMATS["hermes"], Tokens("<think>", "</think>", "<tool_call>", "</tool_call>"))
    text = f"<think>no</think>{WEATHER}"
    assert read(parser, [(0, text)])[0] == [["content", text]]
    pieces = [(1000, ""), (5, "a </think> b"), (1001, ""), (6, "\n\nyes")]
    assert read(parser, pieces)[0] == [["reasoning", "a </think> b"], ["content", "yes"]]


def test_a_prompt_that_opened_the_reasoning():
    assert text_of("think", "Hm.</think>Yes", tail="<|im_start|>assistant\n<think>\n") == [
        ["reasoning", "Hm."],
        ["content", "Yes"],
    ]
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text_of("think", "Yes", tail=closed) == [["content", "Yes"]]


def test_which_tokens_bound_the_reasoning():
    parser = Parser(FORMATS["hermes"], Tokens("<think>", "</think>"))
    assert parser.reasoning_tokens("assistant\n<think>\n") == (1001, None)
    assert parser.reasoning_tokens("assistant\n") == (1001, 1000)
    assert parser.reasoning_tokens("assistant\n<think>\n\n</think>\n") == (None, None)
    assert Parser(FORMATS["hermes"]).reasoning_tokens("<think>") == (None, None)
    assert Parser(FORMATS["plain"], Tokens("<think>")).reasoning_tokens("<think>") == (None, None)


def test_reasoning_that_is_cut_short_or_inside_the_answer():
    assert text_of("think", "<think>\nHm, <thi") == [["reasoning", "Hm, <thi"]]
    assert text_of("think", "A <think>b</think> C") == [["content", "A"], ["reasoning", "b"], ["content", " C"]]
    assert text_of("think", "A </think>B") == [["content", "AB"]]


def test_a_token_that_ends_the_turn():
    parser = Parser(FORMATS["hermes"], Tokens("<|im_end|>"))
    events, stream = read(parser, [(0, "Hi "), (1000, "<|im_end|>"), (0, "user")])
    assert events == [["content", "Hi "]] and stream.turn_ended


# -- properties -------------------------------------------------------------------------------------------------------

JSON_PARTS = [
    '{"name": "add", "arguments": {',
    '{"name": "add", "parameters": {"a": 1}}',
    '{"name": "Bob", "age": 3}',
    '"a": [1, {"b": null}]',
    "}}",
    "}",
    "{",
    "text",
    " ",
    "\n\n",
    "<",
    '"',
    "\\",
    "é",
    "🙂",
    "3.5",
    ",",
    ";",
]
LITERAL = "call:add{{a:{q}x, y}}{q},n:4,l:[1,{{b:true}},[]],o:{{}}}}"
LITERAL_PARTS = [
    "call:add{",
    "call:",
    "a:",
    "n:4",
    ",",
    "[",
    "]",
    "{",
    "}",
    "true",
    '"x\\n"',
    "bare text",
    " ",
    "\n",
    "thought\n",
    "thou",
    "word",
]


def literal(quote, begin, end):
    return begin + LITERAL.format(q=quote) + end


TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome <b>\n\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
TAG_PARTS = [
    "<function=weather>",
    "<function=",
    "<parameter=city>",
    "<parameter=days>",
    "<parameter=",
    "</parameter>",
    "</function>",
    "\n",
    "3",
    "[1]",
    "text",
    "<",
    ">",
    "</",
    '"',
    " ",
    "é",
]

PARTS = {
    "qwen3_coder": ["<think>", "</think>", "<tool_call>", "</tool_call>", TAGGED, *TAG_PARTS],
    "plain": JSON_PARTS,
    "hermes": ["<think>", "</think>", "<tool_call>", "</tool_call>", WEATHER, "<tool", *JSON_PARTS],
    "llama3_json": ["<|python_tag|>", "<|python", *JSON_PARTS],
    "functiongemma": [
        "<start_function_call>",
        "<end_function_call>",
        "<escape>",
        "<esc",
        literal("<escape>", "<start_function_call>", "<end_function_call>"),
        *LITERAL_PARTS,
    ],
    "gemma4": [
        "<|tool_call>",
        "<tool_call|>",
        "<|channel>",
        "<channel|>",
        '<|"|>',
        '<|"',
        literal('<|"|>', "<|tool_call>", "<tool_call|>"),
        *LITERAL_PARTS,
    ],
    "gemma3": [
        "```tool_code\n",
        "```json\n",
        "```",
        "`",
        "add(",
        "[add(",
        "a=1",
        "b=['x)']",
        "weather(city='Rome')",
        ")",
        "]",
        *JSON_PARTS,
    ],
}
ANSWERS = {
    "qwen3_coder": [f"<think>\nHm.\n</think>\n\nNow:\n{TAGGED}\n{TAGGED}"],
    "plain": ["<think>Just text.</think>"],
    "hermes": [
        f"<think>\nHm.\n</think>\n\nLet me see.\n{WEATHER}\n{WEATHER}",
        f"{WEATHER} and {WEATHER}.",
        "Just text <b>.",
    ],
    "llama3_json": [
        '<|python_tag|>{"name": "add", "parameters": {"a": [1, "}"]}}; {"name": "weather", "parameters": {}}'
    ],
    "functiongemma": [literal("<escape>", "Now: <start_function_call>", "<end_function_call>") * 2],
    "gemma4": ["<|channel>thought\nHm.<channel|>Now: " + literal('<|"|>', "<|tool_call>", "<tool_call|>") * 2],
    "gemma3": [
        "```tool_code\n[add(a=1, b='x)'), weather(city=\"Rome\")]\n```",
        '```json\n{"name": "add", "parameters": {"a": 1}}\n```',
    ],
}
CASES = sorted(PARTS)


def pieces_of(text, cuts):
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [(0, text[a:b]) for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_same(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS[name]), max_size=14)))
    tail = data.draw(st.sampled_from(["", "<think>"]))
    parser = Parser(FORMATS[name])
    whole = read(parser, [(0, text)], tail=tail)[0]
    assert read(parser, pieces_of(text, data.draw(st.lists(st.integers(0, 500), max_size=12))), tail=tail)[0] == whole
    assert read(parser, [(0, char) for char in text], tail=tail)[0] == whole
    check_calls(whole)


def check_calls(events):
    """Every call that ended has one JSON object; only the last of unfinished ones is open; indices count up."""
    arguments, begun = "", 0
    for event in events:
        if event[0] == "begin":
            assert event[1] == begun
            begun, arguments = begun + 1, ""
        elif event[0] == "arguments":
            arguments += event[1]
        elif event[0] == "end":
            assert isinstance(json.loads(arguments), dict) and event[1] == begun - 1


@pytest.mark.parametrize("name", CASES)
def test_an_answer_cut_anywhere_is_well_formed(name):
    for answer in ANSWERS[name]:
        whole, _ = read(Parser(FORMATS[name]), [(0, answer)])
        for end in range(len(answer)):
            events, stream = read(Parser(FORMATS[name]), [(0, answer[:end])])
            check_calls(events)
            ends = sum(event[0] == "end" for event in events)
            assert ends == stream.complete_calls <= sum(event[0] == "end" for event in whole)
            assert stream.broken == (sum(event[0] == "begin" for event in events) > ends)


@given(st.text(alphabet="ab <>/thinktool_c\n{}[]`;,", max_size=60))
@settings(max_examples=150, deadline=None)
def test_text_without_markers_is_told_to_the_byte(text):
    if any(marker in text for marker in ("<think>", "</think>", "<tool_call>", "</tool_call>")):
        return
    for name in CASES:
        assert "".join(event[1] for event in text_of(name, text)) == text


# -- the formats' own forms -------------------------------------------------------------------------------------------


CITY = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
CITY_TOOL = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def test_values_between_tags_are_typed_by_the_schema():
    events = text_of("qwen3_coder", f"See:\n{TAGGED}", CITY_TOOL)
    assert [event[0] for event in events] == ["content", "begin", "arguments", "end"]
    assert json.loads(events[2][1]) == {"city": "Rome <b>\n", "days": 3}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            '<parameter=city>\n7\n</parameter>\n<parameter=tags>\n[1, "a"]\n</parameter>',
            {"city": "7", "tags": [1, "a"]},
        ),
        ("<parameter=other>\n7\n</parameter>", {"other": "7"}),
        ("<parameter=days>three</parameter>", {"days": "three"}),
        ("<parameter=days>\nNone\n</parameter>", {"days": None}),
        ("<parameter=city>\nRome\n<parameter=days>\n3", {"city": "Rome", "days": 3}),
        ("", {}),
    ],
)
def test_tags_that_are_missing_and_odd_values(body, arguments):
    for end in ("\n</function>\n</tool_call>", "\n</function>"):
        events = text_of("qwen3_coder", f"<tool_call>\n<function=weather>\n{body}{end}", CITY_TOOL)
        assert json.loads(events[1][1]) == arguments and events[2] == ["end", 0]
    parser = Parser(FORMATS["qwen3_coder"], Tokens("<tool_call>", "</tool_call>"))
    events, stream = read(parser, [(1000, ""), (0, f"<function=weather>\n{body}\n"), (1001, "")], CITY_TOOL)
    assert json.loads(events[1][1]) == arguments and stream.complete_calls == 1


def test_llama_calls_are_bare_objects_of_known_tools():
    call = '{"name": "add", "parameters": {"a": 1}}'
    told = [["begin", 0, "add"], ["arguments", '{"a": 1}'], ["end", 0]]
    assert text_of("llama3_json", call) == told
    assert text_of("llama3_json", "<|python_tag|>" + call) == told
    assert text_of("llama3_json", f"{call}; {call}") == [*told, ["begin", 1, "add"], *told[1:2], ["end", 1]]
    for answer in ('{"name": "Bob", "age": 3}', '{"city": "Rome"}', "{ not JSON }", f"See: {call}"):
        assert text_of("llama3_json", answer) == [["content", answer]]
    assert text_of("llama3_json", call, tools=[]) == [["content", call]]


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "quote", "begin", "end"),
    [
        ("functiongemma", "<escape>", "<start_function_call>", "<end_function_call>"),
        ("gemma4", '<|"|>', "<|tool_call>", "<tool_call|>"),
    ],
)
def test_gemma_calls_become_json(name, quote, begin, end, as_tokens):
    text = literal(quote, f"Now:\n{begin}", end)
    pieces = [(0, text)]
    tokens = Tokens(quote, begin, end)
    if as_tokens:
        cut = re.split("(" + "|".join(map(re.escape, tokens.added_tokens)) + ")", text)
        pieces = [(tokens.added_tokens.get(part, 0), "" if part in tokens.added_tokens else part) for part in cut]
    events, stream = read(Parser(FORMATS[name], tokens if as_tokens else None), pieces)
    assert [event[0] for event in events] == ["content", "begin", "arguments", "end"] and events[0][1] == "Now:"
    assert json.loads(events[2][1]) == {"a": "x, y}", "n": 4, "l": [1, {"b": True}, []], "o": {}}
    assert stream.complete_calls == 1 and not stream.broken


def test_a_string_of_a_gemma_call_ends_at_the_token_only():
    parser = Parser(FORMATS["gemma4"], Tokens('<|"|>', "<|tool_call>", "<tool_call|>"))
    pieces = [(1001, ""), (0, "call:add{a:"), (1000, ""), (0, '<|"|>}"\n'), (1000, ""), (0, "}"), (1002, "")]
    assert read(parser, pieces)[0][1] == ["arguments", '{"a":"<|\\"|>}\\"\\n"}']
    broken = [(1001, ""), (0, "call:"), (1000, ""), (0, "x"), (1002, "")]
    assert read(parser, broken)[0] == [["content", '<|tool_call>call:<|"|>x']]


@pytest.mark.parametrize(
    "parameters", [None, [], {"properties": [1]}, {"properties": {"a": True, "b": None}}, {"properties": "x"}]
)
def test_schemas_that_are_none_break_no_answer(parameters):
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    for name in CASES:
        for answer in ANSWERS[name]:
            read(Parser(FORMATS[name]), [(0, answer)], tools)


def test_gemma_4_reasoning_has_a_header():
    assert text_of("gemma4", "<|channel>thought\nHm.\n<channel|>Yes") == [["reasoning", "Hm."], ["content", "Yes"]]
    assert text_of("gemma4", "<|channel>thought\n<channel|>Yes") == [["content", "Yes"]]


def test_gemma_3_calls_are_python_or_json():
    told = [["begin", 0, "weather"], ["arguments", '{"city": "Rome"}'], ["end", 0]]
    for answer in (
        '```tool_code\nweather(city="Rome")\n```',
        "[weather(city='Rome')]",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        '```json\n{"name": "weather", "parameters": {"city": "Rome"}}\n```',
    ):
        assert text_of("gemma3", answer) == told
    for answer in ("```tool_code\nprint(1)\n```", "[1, 2]", "```json\n[1]\n```", '{"a": 1}', "[weather('Rome')] "):
        assert text_of("gemma3", answer) == [["content", answer]]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call><function={{ name }}><parameter=", "qwen3_coder"),
        ("{{ '<|im_start|>' }}<tool_call>{{ x | tojson }}</tool_call><think>", "hermes"),
        ("<|start_header_id|>{{ tool.parameters }}<|python_tag|>", "llama3_json"),
        ("<start_of_turn>{{ m }}", "gemma3"),
        ("<start_of_turn><start_function_call>", "functiongemma"),
        ("<|turn><|tool_call>call:<tool_call|>", "gemma4"),
        ("<think>\n", "think"),
        ("{{ messages }}", "plain"),
        (None, "plain"),
    ],
)
def test_the_format_is_chosen_by_the_template(template, name):
    assert choose_format(template, FORMATS).name == name


def test_formats_of_families_are_not_the_servers():
    """What only a family's models write comes with the family's plugin: without it their templates show nothing."""
    assert set(SERVERS) < set(FORMATS)
    for name, output_format in FORMATS.items():
        is_the_servers = get_manager().parsers.source(name).startswith("surogate-serve")
        assert is_the_servers == (SERVERS.get(name) is output_format)
    for template in ("<start_of_turn>{{ m }}", "<|turn><|tool_call>call:<tool_call|>"):
        assert choose_format(template, SERVERS).name == "plain" != choose_format(template, FORMATS).name
