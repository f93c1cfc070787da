"""Grammars: random answers that they allow are what was asked for, bad ones are the request's error, reasoning stays
free."""

from __future__ import annotations

import asyncio
import json
import random
import re

import numpy as np
import pytest
import tokenizers
from surogate_core.plugins import get_manager
from surogate_core.weights.tokenizer import Tokenizer
from surogate_serve import grammars as module
from surogate_serve.constraints import Choice, JsonObject, JsonSchema, Regex, Tools
from surogate_serve.grammars import Grammars
from surogate_serve.parsers import Parser
from surogate_serve.types import Refused, ToolCallArguments, ToolCallBegin

FORMATS = dict(get_manager().parsers.items())  # the server's, and those of families' plugins
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|python_tag|>",
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(['{"name": "weather", "arguments": {"city": "Rome"}}\n\n', "a text of words"] * 3, trainer)
    made.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    made.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in MARKERS])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return Tokenizer.from_hf_folder(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size + 7)


def allowed(grammars, handle, vocab):
    row = np.zeros((1, (vocab + 31) // 32), np.uint32)
    grammars.fill([handle], row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab])


def answer(grammars, tokenizer, grammar, seed=0, most=400):
    """Random tokens that the grammar allows, up to its end; None where it did not end. Short ones are likelier: a
    random walk through strings would go on for long."""
    draw = random.Random(seed)
    (handle,) = grammars.open(grammar)
    tokens = []
    vocab = tokenizer.vocab_size + 7
    close = tokenizer.encode("\n</parameter>", parse_special=False)
    planned = []  # a random walk through text would hardly come to this
    try:
        while len(tokens) < most:
            choices = allowed(grammars, handle, vocab)
            assert len(choices)
            stops = [token for token in choices if token in tokenizer.stop_token_ids]
            ends = [
                token for token in choices if tokenizer.token_bytes(int(token))[:1] in (b'"', b"}", b"]", b",", b"<")
            ]
            pool = stops if stops and draw.random() < 0.3 else ends if ends and draw.random() < 0.4 else list(choices)
            if not planned and draw.random() < 0.2:
                planned = list(close)
            planned = planned if planned and planned[0] in choices else []
            token = planned.pop(0) if planned else int(draw.choice(pool))
            said = grammars.accept([handle], [token])[0]
            assert said >= 0
            if token in tokenizer.stop_token_ids:
                return tokens
            tokens.append(token)
            if said == 1:
                return tokens
        return None
    finally:
        grammars.release([handle])


def answers_of(grammars, tokenizer, grammar, count=12):
    found = [answer(grammars, tokenizer, grammar, seed) for seed in range(count)]
    ended = [tokens for tokens in found if tokens is not None]
    assert len(ended) >= count // 3
    return ended


def compiled(grammars, constraint, param="response_format", **options):
    return asyncio.run(grammars.compile(constraint, param, **options))


def test_answers_follow_a_schema(grammars, tokenizer):
    grammar = compiled(grammars, JsonSchema(SCHEMA))
    for tokens in answers_of(grammars, tokenizer, grammar):
        value = json.loads(tokenizer.decode(tokens))
        assert (
            isinstance(value["city"], str) and isinstance(value["days"], int) and set(value) <= {"city", "days", "unit"}
        )


def test_answers_are_objects_patterns_or_choices(grammars, tokenizer):
    for tokens in answers_of(grammars, tokenizer, compiled(grammars, JsonObject())):
        assert isinstance(json.loads(tokenizer.decode(tokens)), dict)
    for tokens in answers_of(grammars, tokenizer, compiled(grammars, Regex(r"^(a|b){2}/[0-9]{3}\$$"))):
        assert re.fullmatch(r"(a|b){2}/[0-9]{3}\$", tokenizer.decode(tokens))
    values = ['say "yes"', "no\n", "日本", "/x/"]
    found = {
        tokenizer.decode(tokens) for tokens in answers_of(grammars, tokenizer, compiled(grammars, Choice(values)), 40)
    }
    assert found <= set(values) and len(found) > 1


BAD = [
    (JsonSchema({"type": "nonsense"}), "nonsense"),
    (JsonSchema({"type": "object", "not": {"required": ["a"]}}), "not"),
    (JsonSchema({"$ref": "http://example.com/schema"}), "example.com"),
    (JsonSchema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
    (JsonSchema([1]), "object"),
    (JsonSchema({"enum": [float("nan")]}), "JSON"),
    (JsonSchema({"description": "x" * (1 << 19)}), "characters"),
    (JsonSchema(json.loads('{"items":' * 80 + "{}" + "}" * 80)), "nested"),
    (Regex("(a|b"), "unclosed"),
    (Regex(""), "empty"),
    (Regex("a" * 100_000), "characters"),
    (Choice([]), "list"),
    (Choice(["a", ""]), "empty"),
    (Choice(["x"] * 10_000), "at most"),
]


@pytest.mark.parametrize(("constraint", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_grammar_is_the_requests_error(grammars, constraint, words):
    with pytest.raises(Refused, match=words) as refused:
        compiled(grammars, constraint, "response_format.json_schema")
    assert refused.value.status == 400 and refused.value.param == "response_format.json_schema"
    assert len(refused.value.message) < 500
    assert compiled(grammars, JsonObject())  # others go on


BROKEN = [
    [],
    {"properties": [1]},
    {"properties": {"a": True}},
    {"properties": {"a": None}},
    {"properties": "x"},
    {"required": 5},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"type": 7}}},
    {"properties": {"\ud83d": {}}},
]


@pytest.mark.parametrize("parameters", BROKEN, ids=range(len(BROKEN)))
def test_schemas_that_are_none_are_the_requests_error_or_mean_nothing(tokenizer, grammars, parameters):
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    for name in FORMATS:
        if FORMATS[name].call is None:
            continue
        for strict in (False, True):
            tool["function"]["strict"] = strict
            try:
                compiled(grammars, Tools([tool]), "tools", parser=Parser(FORMATS[name], tokenizer))
            except Refused as refused:
                assert refused.status == 400 and refused.param == "tools"


@pytest.mark.parametrize("space, most", [("\n", 2), (" ", 4), ("\t", 4), ("\r\n", 2), ("\n" + " " * 40, 1)])
@pytest.mark.parametrize(
    "parts", [("", "{"), ("{", '"a"'), ('{"a"', ":"), ('{"a":', "[1]"), ('{"a":[', "1]"), ('{"a":[1', "]}")]
)
def test_spaces_in_json_come_to_an_end(grammars, tokenizer, parts, space, most):
    before, after = parts
    for constraint in (JsonObject(), JsonSchema({"type": "object", "properties": {"a": {"type": "array"}}})):
        grammar = compiled(grammars, constraint)
        if not before:
            assert walk(grammars, tokenizer, grammar, space) == [-1]
            continue
        assert -1 not in walk(grammars, tokenizer, grammar, before, *[space] * most, after)
        assert walk(grammars, tokenizer, grammar, before, *[space] * (most + 1))[-1] == -1


def test_indented_json_is_json(grammars, tokenizer):
    value: dict = {"a": [1, {"b": None}]}
    for _ in range(7):
        value = {"deeper": [value], "more": "x"}
    for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))):
        assert walk(grammars, tokenizer, compiled(grammars, JsonObject()), text) == [1]


def test_texts_that_are_not_unicode(grammars):
    for constraint in (Choice(["\ud83d"]), Regex("\ud83d")):
        with pytest.raises(Refused, match="Unicode"):
            compiled(grammars, constraint)


def test_a_grammar_that_takes_long_is_given_up(grammars, monkeypatch):
    monkeypatch.setattr(module, "COMPILE_LIMIT", 0.0)
    with pytest.raises(Refused, match="to compile"):
        compiled(grammars, Choice(["slow"]))
    monkeypatch.setattr(module, "WAITING_LIMIT", 0)
    with pytest.raises(Refused, match="too many") as refused:
        compiled(grammars, Choice(["a"]))
    assert refused.value.status == 429 and refused.value.retry_after


def test_formats_that_mean_nothing_are_no_error(grammars):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "int32"}, "format": {"type": "string"}},
    }
    assert compiled(grammars, JsonSchema(schema))


# -- tools ------------------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


CLOSED = "<think></think><|channel><channel|>"  # a prompt that leaves no reasoning to the answer


def read(parser, tokenizer, tokens, tools=TOOLS):
    stream = parser.stream(0, "", tools)
    pieces = [(token, "" if token in parser.token_ids.values() else tokenizer.token_bytes(token)) for token in tokens]
    # Whole characters only, as the engine's texts are.
    held, events = b"", []
    for token, piece in pieces:
        held += piece or b""
        try:
            text, held = held.decode(), b""
        except UnicodeDecodeError:
            text = ""
        events += stream.feed(token, text)
    return events + stream.finish(), stream


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "functiongemma", "gemma4", "gemma3"])
def test_forced_calls_are_read_by_the_same_format(tokenizer, name, as_tokens):
    parser = Parser(FORMATS[name], tokenizer if as_tokens else None)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, parser=parser)
    grammar = compiled(grammars, Tools(TOOLS), "tool_choice", parser=parser, tail=CLOSED)
    for tokens in answers_of(grammars, tokenizer, grammar):
        events, stream = read(parser, tokenizer, tokens)
        begun = [event.name for event in events if isinstance(event, ToolCallBegin)]
        assert begun and set(begun) <= {"weather", "now"} and stream.complete_calls == len(begun) and not stream.broken
        arguments = dict.fromkeys(range(len(begun)), "")
        for event in events:
            if isinstance(event, ToolCallArguments):
                arguments[event.index] += event.text
        for index, called in enumerate(begun):
            value = json.loads(arguments[index])
            assert called == "now" or {"city", "days"} <= set(value) <= {"city", "days", "unit"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "functiongemma", "gemma4"])
@pytest.mark.parametrize("as_tokens", [True, False])
def test_strict_tools_leave_text_free(tokenizer, name, as_tokens):
    parser = Parser(FORMATS[name], tokenizer if as_tokens else None)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, parser=parser)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    grammar = compiled(grammars, Tools(strict, required=False), "tools", parser=parser)
    (handle,) = grammars.open(grammar)
    words = tokenizer.encode("a text")
    said = grammars.accept([handle] * len(words), words)
    assert set(said) == {0} and tokenizer.stop_token_ids[0] in allowed(grammars, handle, tokenizer.vocab_size)
    begin = FORMATS[name].call_begin
    begin_ids = tokenizer.encode(begin) if as_tokens else tokenizer.plain_encoder(frozenset(MARKERS))(begin)
    assert set(grammars.accept([handle] * len(begin_ids), begin_ids)) == {0}
    assert tokenizer.stop_token_ids[0] not in allowed(grammars, handle, tokenizer.vocab_size)
    assert grammars.accept([handle], tokenizer.encode("x")) == [-1]


def test_strict_tools_of_a_format_that_announces_no_calls(tokenizer):
    parser = Parser(FORMATS["llama3_json"], tokenizer)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, parser=parser)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    grammar = compiled(grammars, Tools(strict, required=False), "tools", parser=parser)
    call = '{"name": "weather", "parameters": {"city": "Rome", "days": 1}}'
    assert walk(grammars, tokenizer, grammar, "Text with {braces}; ", call) == [0, 0]
    assert walk(grammars, tokenizer, grammar, call, "; ", call) == [0, 0, 0]
    assert walk(grammars, tokenizer, grammar, '{"name": "Bob"}') == [-1]
    assert walk(grammars, tokenizer, grammar, call, " and") == [0, -1]


REFERRING = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "note": {"type": "string", "not": {"const": "x"}}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_schemas_with_definitions_and_keywords_that_are_not_known(tokenizer, name):
    parser = Parser(FORMATS[name], tokenizer)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, parser=parser)
    tool = {"type": "function", "function": {"name": "go", "parameters": REFERRING}}
    grammar = compiled(grammars, Tools([tool], parallel=False), "tool_choice", parser=parser, tail=CLOSED)
    for tokens in answers_of(grammars, tokenizer, grammar):
        events, stream = read(parser, tokenizer, tokens, [tool])
        value = json.loads("".join(event.text for event in events if isinstance(event, ToolCallArguments)))
        assert stream.complete_calls == 1 and isinstance(value["place"]["n"], int) and set(value) <= {"place", "note"}
    if name == "hermes":
        strict = {"type": "function", "function": {**tool["function"], "strict": True}}
        with pytest.raises(Refused, match="not"):
            compiled(grammars, Tools([strict]), "tool_choice", parser=parser)


def test_one_call_where_calls_are_not_parallel(tokenizer):
    parser = Parser(FORMATS["hermes"], tokenizer)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, parser=parser)
    grammar = compiled(grammars, Tools(TOOLS[1:], parallel=False), "tool_choice", parser=parser, tail=CLOSED)
    for tokens in answers_of(grammars, tokenizer, grammar):
        assert read(parser, tokenizer, tokens)[1].complete_calls == 1


def test_formats_without_calls_cannot_be_forced(grammars):
    with pytest.raises(Refused, match="plain") as refused:
        compiled(grammars, Tools(TOOLS), "tool_choice", parser=Parser(FORMATS["plain"]))
    assert refused.value.status == 501


# -- reasoning --------------------------------------------------------------------------------------------------------


def walk(grammars, tokenizer, grammar, *parts):
    """What is said of the last token of each part."""
    (handle,) = grammars.open(grammar)
    said = []
    for part in parts:
        tokens = tokenizer.encode(part) if isinstance(part, str) else part
        said.append(grammars.accept([handle] * len(tokens), tokens)[-1])
        if said[-1] == 0:
            allowed(grammars, handle, tokenizer.vocab_size)
    return said


def test_the_grammar_begins_behind_the_reasoning(grammars, tokenizer):
    parser = Parser(FORMATS["hermes"], tokenizer)
    opened = compiled(grammars, Choice(["yes"]), parser=parser, tail="<think>\n")
    assert walk(grammars, tokenizer, opened, "Free {text", "</think>", "\n\n", "yes") == [0, 0, 0, 1]
    assert walk(grammars, tokenizer, opened, "Free", "</think>", "no") == [0, 0, -1]
    own = compiled(grammars, Choice(["yes"]), parser=parser, tail="<|im_start|>assistant\n")
    assert walk(grammars, tokenizer, own, "<think>", "Free", "</think>", "yes") == [0, 0, 0, 1]
    assert walk(grammars, tokenizer, own, "yes") == [1] and walk(grammars, tokenizer, own, "no") == [-1]
    off = compiled(grammars, Choice(["yes"]), parser=parser, tail="<think>\n\n</think>\n\n")
    assert walk(grammars, tokenizer, off, "<think>") == [-1]


def test_an_end_of_reasoning_that_is_text(grammars, tokenizer):
    plain = tokenizer.plain_encoder(frozenset(MARKERS))
    opened = compiled(grammars, Choice(["yes"]), parser=Parser(FORMATS["hermes"]), tail="<think>\n")
    assert walk(grammars, tokenizer, opened, "Free </thi", plain("</think>"), "\n", "yes") == [0, 0, 0, 1]


def test_everything_but_the_end_is_allowed_while_reasoning(grammars, tokenizer):
    opened = compiled(grammars, Choice(["yes"]), parser=Parser(FORMATS["hermes"], tokenizer), tail="<think>\n")
    handles = grammars.open(opened, 2) + grammars.open(compiled(grammars, Choice(["yes"])), 5)
    rows = np.zeros((7, (tokenizer.vocab_size + 7 + 31) // 32), np.uint32)
    grammars.fill(handles, rows)
    known = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, : tokenizer.vocab_size]
    assert (np.flatnonzero(known[0] == 0) == tokenizer.stop_token_ids).all() and (known[0] == known[1]).all()
    assert (rows[2:] == rows[2]).all() and 0 < known[2].sum() < 5


def test_a_choice_that_is_released_in_the_middle_of_a_step_disturbs_no_other(grammars, tokenizer):
    handles = grammars.open(compiled(grammars, Choice(["yes"])), 2)
    before, after = np.zeros((2, 2, (tokenizer.vocab_size + 7 + 31) // 32), np.uint32)
    grammars.fill(handles, before)
    grammars.release(handles[:1])
    grammars.fill(handles, after)
    assert (after[0] == 0xFFFFFFFF).all() and (after[1] == before[1]).all() and (before[0] == before[1]).all()
    assert grammars.accept(handles, tokenizer.encode("x") * 2) == [0, -1]
