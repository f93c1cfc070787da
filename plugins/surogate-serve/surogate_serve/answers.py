"""From a model's tokens to what every API tells of an answer: each choice's text goes through one stream of the
model's parser, and each choice ends with one `Finished`, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from .parsers import OutputStream, Parser
from .types import (
    Content,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Prompt,
    Reasoning,
    Take,
    TokenLogprob,
    ToolCallEnd,
    Usage,
)

Finish = FinishReason | Literal["tool_calls"]
ToolChoice = str | Mapping[str, Any]
"""ToolChoice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}."""


class Answering(Protocol):
    """What of a served model is needed here."""

    parser: Parser

    async def read(self, generation: Generation, take: Take) -> None:
        """Gives the request's deltas to ``take``; cancelling it cancels the request."""


class Answer:
    """The events of all choices. ``usage``: its cached tokens are right from the first event on, the others at the end.

    tools: definitions as {"type": "function", "function": {"name", "description", "parameters"}}; without any, or with
    tool_choice "none", what looks like a call is content. parser: the model's own where None. parallel: without it, a
    choice ends with its first call.
    """

    def __init__(
        self,
        model: Answering,
        prompt: Prompt,
        generation: Generation,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        parser: Parser | None = None,
        parallel: bool = True,
    ) -> None:
        parser = parser or model.parser
        offered = () if tool_choice == "none" else tuple(tools)
        until_end = not generation.ignore_eos
        streams = [parser.stream(index, prompt.tail, offered, until_end) for index in range(generation.n)]
        self._model, self._generation = model, generation
        self._choices = [_Choice(stream, parallel) for stream in streams]
        self._unfinished = generation.n
        self.usage = Usage(prompt_tokens=len(prompt.tokens))

    async def read(self, take: Callable[[list[Event | Usage]], None]) -> None:
        """Starts the generation, and gives the events to ``take`` as they come, at last the `Usage`. Every choice gets
        exactly one `Finished`: "tool_calls" where the model ended its turn after calls that are all complete, else what the
        engine said. Cancelling this cancels the request. Raises what the model's `read` and ``take`` raise."""

        def follow(deltas: list[Delta]) -> bool:
            events: list[Event | Usage] = []
            for delta in deltas:
                events += self._events_of(delta)
            over = self._unfinished == 0
            if over:
                events.append(self._counted())
            if events:
                take(events)
            return over

        await self._model.read(self._generation, follow)
        if self._unfinished:
            left = [choice for choice in self._choices if not choice.finished]
            error = "the engine ended without finishing this answer"
            take([*(event for choice in left for event in choice.end("error", error=error)), self._counted()])

    def _events_of(self, delta: Delta) -> list[Event]:
        if delta.cached_tokens > self.usage.cached_tokens:
            self.usage.cached_tokens = delta.cached_tokens
        choice = self._choices[delta.choice]
        if choice.finished:
            return []  # what comes after the choice's end means nothing
        events = choice.take(delta)
        if choice.finished:
            self._unfinished -= 1
            if delta.finish is None:
                self._generation.end(delta.choice)
        return events

    def _counted(self) -> Usage:
        self.usage.completion_tokens = sum(choice.tokens for choice in self._choices)
        self.usage.reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return self.usage


class _Choice:
    """One choice on its way: its parser, the log-probabilities that wait for their text, and its counts."""

    def __init__(self, stream: OutputStream, parallel: bool) -> None:
        self.stream, self.parallel = stream, parallel
        self.tokens = self.reasoning_tokens = 0
        self.finished = False
        self._unread: list[int] = []  # tokens that no piece has named yet
        self._unread_logprobs: list[TokenLogprob] = []  # theirs, where they are told at all
        self._waiting: list[TokenLogprob] = []  # of text that the parser holds back

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        self.tokens += len(delta.tokens)
        self._unread += delta.tokens
        if delta.logprobs:
            self._unread_logprobs += delta.logprobs
        events: list[Event] = []
        for token, text in delta.pieces:
            events += self._piece(token, text)
            if self.stream.turn_ended or (not self.parallel and self.stream.complete_calls):
                stop = delta.stop if delta.finish == "stop" else None
                return [*_until_first_end(events, self.parallel), *self.end("stop", stop)]
        if delta.finish is not None:
            self._count_unread()
            events += self.end(delta.finish, delta.stop, delta.error)
        return events

    def end(self, finish: Finish, stop: str | int | None = None, error: str | None = None) -> list[Event]:
        """What was held back, and the one `Finished`."""
        self.finished = True
        rest = self.stream.finish()
        if not self.parallel and self.stream.complete_calls:
            rest = []  # after the one call that was wanted
        events = self._with_logprobs(rest)
        # A stop string cuts an answer short; only the model's own end says that no call was still to come.
        ended_turn = finish == "stop" and not isinstance(stop, str)
        if ended_turn and self.stream.complete_calls and not self.stream.broken:
            finish = "tool_calls"
        return [*events, Finished(self.stream.choice, finish, stop, error, self.tokens, self.reasoning_tokens)]

    def _piece(self, token: int, text: str) -> list[Event]:
        stream, unread = self.stream, self._unread
        was_reasoning = stream.reasoning
        read = unread.index(token) + 1 if len(unread) > 1 and token in unread else len(unread)
        del unread[:read]
        events = stream.feed(token, text)
        if was_reasoning or stream.reasoning:
            self.reasoning_tokens += read
        if self._unread_logprobs:
            self._waiting += self._unread_logprobs[:read]
            del self._unread_logprobs[:read]
        if self._waiting:
            events = self._with_logprobs(events)
            if was_reasoning or not stream.in_content:
                self._waiting.clear()
        return events

    def _count_unread(self) -> None:
        """Tokens that made no text, such as the one that ends the answer."""
        if self.stream.reasoning:
            self.reasoning_tokens += len(self._unread)
        self._unread.clear()
        self._unread_logprobs.clear()

    def _with_logprobs(self, events: list[Event]) -> list[Event]:
        """The log-probabilities that waited go to the first content; those of other text are not told."""
        if not self._waiting:
            return events
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                event = replace(event, logprobs=tuple(self._waiting))
                self._waiting.clear()
            elif isinstance(event, Reasoning):
                self._waiting.clear()
            result.append(event)
        return result


def _until_first_end(events: list[Event], parallel: bool) -> list[Event]:
    """Without parallel calls, nothing after the end of the first."""
    for place, event in enumerate(events):
        if not parallel and isinstance(event, ToolCallEnd):
            return events[: place + 1]
    return events
