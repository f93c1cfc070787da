"""From deltas to events: one end a choice, the right reason, counts, log-probabilities, and cancelling."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from surogate_serve.answers import Answer
from surogate_serve.parsers import FORMATS, Parser
from surogate_serve.types import (
    Content,
    Delta,
    Finished,
    Generation,
    Prompt,
    Reasoning,
    TokenLogprob,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Model:
    """Gives the deltas it was made with, and says whether it was closed early."""

    def __init__(self, *deltas, name="hermes"):
        self.parser = Parser(FORMATS[name])
        self.deltas, self.left = deltas, len(deltas)

    async def read(self, generation, take):
        for delta in self.deltas:
            self.left -= 1
            if take([delta]):
                return


class Spelled:
    """A tokenizer of added tokens of one character each."""

    def __init__(self, *characters):
        self.added_tokens = {char: ord(char) for char in characters}


def delta(text, choice=0, **fields):
    """One token a character."""
    tokens = [ord(char) for char in text]
    return Delta(choice, tokens, text, list(zip(tokens, text, strict=True)), **fields)


def run(model, tools=TOOLS, n=1, ignore_eos=False, **options):
    prompt, events = Prompt([1, 2, 3]), []
    generation = Generation(prompt.tokens, n=n, ignore_eos=ignore_eos)
    asyncio.run(Answer(model, prompt, generation, tools, **options).read(events.extend))
    return events


def reasons(events):
    return [(event.choice, event.reason) for event in events if isinstance(event, Finished)]


def test_content_then_the_end_then_usage():
    *content, finished, usage = run(Model(delta("Hel", cached_tokens=2), delta("lo ", finish="stop")))
    assert "".join(event.text for event in content) == "Hello "
    assert finished == Finished(0, "stop", completion_tokens=6)
    assert usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=6)


def test_complete_calls_end_in_tool_calls_once():
    events = run(Model(delta(CALL), delta(CALL, finish="stop")))
    assert reasons(events) == [(0, "tool_calls")]
    assert [event.index for event in events if isinstance(event, ToolCallEnd)] == [0, 1]
    assert len({event.id for event in events if isinstance(event, ToolCallBegin)}) == 2


def test_a_call_that_was_cut_short_claims_nothing():
    assert reasons(run(Model(delta(CALL[:-20], finish="length")))) == [(0, "length")]
    assert reasons(run(Model(delta(CALL + CALL[:-20], finish="stop")))) == [(0, "stop")]
    assert reasons(run(Model(delta(CALL, finish="length")))) == [(0, "length")]
    assert reasons(run(Model(delta(CALL, finish="stop", stop="x")))) == [(0, "stop")]
    assert reasons(run(Model(delta(CALL, finish="error", error="no")))) == [(0, "error")]


def test_tool_choice_none_makes_calls_text():
    events = run(Model(delta(CALL, finish="stop")), tool_choice="none")
    assert "".join(event.text for event in events if isinstance(event, Content)) == CALL
    assert reasons(events) == [(0, "stop")]


def test_without_parallel_calls_the_first_ends_the_answer():
    model = Model(delta(CALL + CALL[:15]), delta(CALL[15:]), delta("", finish="stop"))
    events = run(model, parallel=False)
    assert reasons(events) == [(0, "tool_calls")] and isinstance(events[-3], ToolCallEnd) and model.left == 2
    assert "".join(event.text for event in events if isinstance(event, ToolCallArguments)) == '{"a": 1}'


def test_every_choice_ends_for_itself():
    model = Model(delta("a", 1), delta("b", 0, finish="stop"), delta("c", 1, finish="length"))
    events = run(model, n=2)
    assert reasons(events) == [(0, "stop"), (1, "length")]
    assert events[-1].completion_tokens == 3 and sum(isinstance(event, Usage) for event in events) == 1


def test_text_held_back_comes_before_the_end():
    events = run(Model(delta("a <tool_ca", finish="length")))
    assert "".join(event.text for event in events if isinstance(event, Content)) == "a <tool_ca"
    assert isinstance(events[-2], Finished)


def test_an_engine_that_stops_in_the_middle_is_an_error():
    finished = run(Model(delta("a")))[-2]
    assert finished.reason == "error" and finished.error


def test_reasoning_tokens_are_counted():
    events = run(Model(delta("<think>ab</think>cd", finish="stop")))
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "ab"
    # The markers are text here: all of the closing one, and of the opening one what made it certain.
    assert events[-1].reasoning_tokens == 1 + 2 + len("</think>") and events[-1].completion_tokens == 19


def test_logprobs_ride_on_the_content_they_are_of():
    text = "<think>x</think>a <b"
    logprobs = [TokenLogprob(ord(char), -0.5 * i) for i, char in enumerate(text)]
    events = run(Model(delta(text, logprobs=logprobs, finish="stop")))
    told = [logprob for event in events if isinstance(event, Content) for logprob in event.logprobs]
    assert [chr(logprob.token) for logprob in told] == list("a <b")


def test_logprobs_of_tokens_without_text_of_their_own():
    """An emoji of two tokens, of which only the second has text."""
    one = Delta(0, [7], "", [], logprobs=[TokenLogprob(7, -1.0)])
    two = Delta(0, [8], "🙂", [(8, "🙂")], logprobs=[TokenLogprob(8, -2.0)])
    end = Delta(0, [2], "", [], logprobs=[TokenLogprob(2, -3.0)], finish="stop")
    events = run(Model(one, two, end))
    assert [each.token for event in events if isinstance(event, Content) for each in event.logprobs] == [7, 8]
    assert events[-1].completion_tokens == 3


def test_what_takes_the_events_can_end_the_request():
    class Full(Exception):
        pass

    def take(events):
        raise Full

    model = Model(delta("a"), delta("b"))
    with pytest.raises(Full):
        asyncio.run(Answer(model, Prompt([1]), Generation([1])).read(take))
    assert model.left == 1


def test_a_token_that_ends_the_turn_ends_the_choice():
    model = Model(delta("ab"), delta("c"))
    model.parser = Parser(replace(FORMATS["hermes"], turn_ends=("b",)), Spelled("b"))
    events = run(model)
    assert [event.text for event in events if isinstance(event, Content)] == ["a"] and reasons(events) == [(0, "stop")]


def test_a_token_that_would_end_the_turn_does_not_where_ends_are_ignored():
    model = Model(delta("ab"), delta("c", finish="length"))
    model.parser = Parser(replace(FORMATS["hermes"], turn_ends=("b",)), Spelled("b"))
    assert reasons(run(model, ignore_eos=True)) == [(0, "length")]
