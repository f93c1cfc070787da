"""Reads an answer as its format says: (token, text) pieces in, events out, the same however the text is cut.

A whole answer is read by feeding it as one stream, so that streaming and not streaming cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from surogate_core.plugins import CallProgress, CallReader, Marker, OutputFormat, OutputState

from ..types import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin, ToolCallEnd

_VISIBLE: tuple[OutputState, ...] = ("start", "content", "called")
# Inside a call's body a quote that came as a token is written as this noncharacter and a number: no text spells it.
_QUOTE_MARK = "\ufdd0"


class AddedTokens(Protocol):
    """What is needed of a tokenizer."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that are matched in a text before it is cut, by their spelling."""


class Parser:
    """A format with one tokenizer: which of its markers are tokens, and which are text."""

    def __init__(self, output_format: OutputFormat, tokenizer: AddedTokens | None = None) -> None:
        """Without a tokenizer every marker is text."""
        self.format = output_format
        added = tokenizer.added_tokens if tokenizer is not None else {}
        reasoning = _reasoning_markers(output_format)
        markers = [*reasoning, *output_format.markers]
        self.token_markers = {added[each.text]: each.text for each in markers if each.text in added}
        self.turn_ends = {added[text] for text in output_format.turn_ends if text in added}
        quotes = output_format.call.quotes if output_format.call is not None else ()
        self.quote_marks = {text: f"{_QUOTE_MARK}{i}{_QUOTE_MARK}" for i, text in enumerate(quotes) if text in added}
        self.quote_tokens = {added[text]: mark for text, mark in self.quote_marks.items()}
        self.meaning = {*self.turn_ends, *self.token_markers, *self.quote_tokens}  # tokens that may mean more than their text
        known = {*(each.text for each in markers), *quotes, *output_format.turn_ends}
        self.token_ids = {text: number for text, number in added.items() if text in known}
        spelled = set(self.token_markers.values())
        self._without_calls, self._with_calls = _Table(reasoning, spelled), _Table(markers, spelled)

    def stream(
        self, choice: int = 0, tail: str = "", tools: Sequence[Mapping[str, Any]] = (), until_turn_end: bool = True
    ) -> OutputStream:
        """Begins one answer. tail: the prompt's end, which may have opened the reasoning. tools: as in a chat request;
        without any, no call is looked for. until_turn_end: tokens that end the turn end the answer."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        table = self._with_calls if schemas and self.format.call is not None else self._without_calls
        state: OutputState = "reasoning" if self.opens_reasoning(tail) else "start"
        return OutputStream(self, table, choice, state, schemas, until_turn_end)

    def opens_reasoning(self, tail: str) -> bool:
        """Whether an answer behind this end of a prompt begins inside reasoning."""
        if self.format.reasoning is None:
            return False
        opening, closing = self.format.reasoning
        return tail.rfind(opening) > tail.rfind(closing)

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning; None where there is no reasoning, or its end is text."""
        return None if self.format.reasoning is None else self.token_ids.get(self.format.reasoning[1])

    def reasoning_tokens(self, tail: str) -> tuple[int | None, int | None]:
        """The token that ends the reasoning of an answer behind this end of a prompt, and the one with which the model
        has to begin it; None where the prompt began it. Twice None: no reasoning, or none whose end is one token."""
        end = self.reasoning_end
        if end is None or self.format.reasoning is None:
            return None, None
        opening, closing = self.format.reasoning
        if self.opens_reasoning(tail):
            return end, None
        begin = self.token_ids.get(opening)
        return (None, None) if begin is None or closing in tail else (end, begin)

    def terminal(self, text: str) -> str:
        """What matches a marker in a grammar of llguidance: its token where it is one, else its text."""
        number = self.token_ids.get(text)
        return json.dumps(text, ensure_ascii=False) if number is None else f"<[{number}]>"


def _reasoning_markers(output_format: OutputFormat) -> list[Marker]:
    """An end without a beginning is dropped: it is no part of an answer."""
    if output_format.reasoning is None:
        return []
    opening, closing = output_format.reasoning
    return [
        Marker(_VISIBLE, opening, "reasoning"),
        Marker(("reasoning",), closing, "start"),
        Marker(("start",), closing, "start"),
        Marker(("content", "called"), closing, "content"),
    ]


class _Table:
    """Transitions by state: of tokens by marker text, of texts as one pattern."""

    def __init__(self, markers: list[Marker], tokens: set[str]) -> None:
        self.moves: dict[tuple[OutputState, str], Marker] = {(s, m.text): m for m in markers for s in m.states}
        self.marked = {state for state, _ in self.moves}
        self.patterns: dict[OutputState, re.Pattern[str]] = {}
        self.texts: dict[OutputState, list[str]] = {}
        self.firsts: dict[OutputState, re.Pattern[str]] = {}  # characters that texts begin with
        self.unsure: dict[OutputState, re.Pattern[str]] = {}  # what of a text cannot be told before more of it is there
        for state in ("start", "content", "reasoning", "call", "called"):
            texts = [text for at, text in self.moves if at == state and text not in tokens]
            self.texts[state] = sorted(texts, key=len, reverse=True)
            firsts = {re.escape(text[0]) for text in texts}
            if texts:
                self.firsts[state] = re.compile("|".join(firsts))
                self.patterns[state] = re.compile("|".join(map(re.escape, self.texts[state])))
            if state in self.marked:
                self.unsure[state] = re.compile("|".join([*firsts, r"\s\Z"]))

    def may_begin(self, state: OutputState, text: str) -> bool:
        """Whether one of the state's text markers may begin somewhere in the text; most text has none of their
        characters."""
        firsts = self.firsts.get(state)
        return firsts is not None and firsts.search(text) is not None

    def longest_beginning(self, state: OutputState, text: str) -> int:
        """How many of the last characters may be the beginning of one of the state's text markers."""
        longest = max((len(each) for each in self.texts[state]), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(each.startswith(text[-size:]) for each in self.texts[state] if len(each) > size):
                return size
        return 0


class OutputStream:
    """One answer. ``turn_ended``: a token that ends the turn came, nothing after it is read. ``complete_calls``: how
    many calls are whole. ``broken``: a call began and will never be whole."""

    def __init__(
        self,
        parser: Parser,
        table: _Table,
        choice: int,
        state: OutputState,
        tools: Mapping[str, Mapping[str, Any]],
        until_turn_end: bool,
    ) -> None:
        self.choice = choice
        self.turn_ended = self.broken = False
        self.complete_calls = 0
        self._parser, self._table, self._tools = parser, table, tools
        self._turn_ends = parser.turn_ends if until_turn_end else frozenset()
        self._state: OutputState = state
        self._buffer = ""  # not decided yet
        self._drop_space = state == "reasoning"  # whitespace right after a marker
        self._header = parser.format.reasoning_header if state == "reasoning" else ""
        self._seen: set[str] = set()  # kinds of text that were told already
        self._reader: CallReader | None = None
        self._raw = ""  # a call's text until its name is told, in case it is none
        self._begun = False
        self._next_call = 0
        self._events: list[Event] = []
        self._plain: type[Content] | type[Reasoning] | None = None  # what text is told as, where nothing is waited for
        self._unsure: re.Pattern[str] | None = None  # then: text in which that is found is not told as it is

    @property
    def reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def in_content(self) -> bool:
        """Whether what is held back may still become content."""
        return self._state in _VISIBLE or (self._state == "call" and not self._begun)

    def feed(self, token: int, text: str) -> list[Event]:
        """The events that one token's text makes certain."""
        parser, plain = self._parser, self._plain
        if plain is not None and text and token not in parser.meaning:  # nearly every token
            if self._unsure is None or self._unsure.search(text) is None:
                return [plain(self.choice, text)]
        if self.turn_ended:
            return []
        self._plain = None
        if token in self._turn_ends:
            self.turn_ended = True
            return []
        marker = parser.token_markers.get(token)
        if self._state == "call" and token in parser.quote_tokens:
            self._read_call(parser.quote_tokens[token])
        elif marker is not None and (self._state, marker) in self._table.moves:
            self._read_marker(marker)
        else:
            self._buffer += marker if marker is not None else text
            self._work()
        self._note_plain()
        return self._take_events()

    def _note_plain(self) -> None:
        """Text that goes on with what was told, and with nothing held back, is told as it comes."""
        if self._state not in ("content", "reasoning") or self._state not in self._seen:
            return
        if self._buffer or self._drop_space or self._header:
            return
        self._plain = Reasoning if self._state == "reasoning" else Content
        self._unsure = self._table.unsure.get(self._state)

    def finish(self) -> list[Event]:
        """The answer is over: what was held back is told as what it is by now."""
        if self._state == "call":
            self._end_call()
        text, self._buffer = self._buffer, ""
        if text.strip() or not (self._drop_space or self._state == "called"):
            self._tell(text)
        return self._take_events()

    def _read_marker(self, marker: str) -> None:
        """A marker that came as a token: nothing completes the buffer any more. Whitespace before the marker goes with
        it."""
        text, self._buffer = self._buffer, ""
        told = text.rstrip()
        if told and self._state in ("start", "called"):
            self._state = "content"
        self._tell(told)
        space = "" if self._drop_space else text[len(told) :]
        move = self._table.moves.get((self._state, marker))
        if move is not None:
            self._move(move, space)
        else:
            self._buffer = space + marker
        self._work()

    # -- text outside calls -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Decides as much of the buffer as can be decided."""
        while self._buffer:
            if self._state == "call":
                text, self._buffer = self._buffer, ""
                self._read_call(text)
            elif self._header and not self._take_header():
                return
            elif not self._step():
                return

    def _take_header(self) -> bool:
        """Drops the header behind the marker that opened reasoning; False while it may still come."""
        text = self._buffer.lstrip() if self._drop_space else self._buffer
        if text.startswith(self._header):
            self._buffer, self._header, self._drop_space = text[len(self._header) :], "", True
        elif self._header.startswith(text):
            return False
        else:
            self._header = ""
        return True

    def _step(self) -> bool:
        """One marker or one stretch of text; False where more text is needed first."""
        if self._state in ("start", "called"):
            return self._step_before_content()
        may_begin = self._table.may_begin(self._state, self._buffer)
        found = self._table.patterns[self._state].search(self._buffer) if may_begin else None
        if found is not None:
            before = self._buffer[: found.start()]
            told = before.rstrip()
            self._tell(told)
            self._buffer = self._buffer[found.end() :]
            self._move(self._table.moves[self._state, found.group()], before[len(told) :])
            return True
        held = self._table.longest_beginning(self._state, self._buffer) if may_begin else 0
        sure = self._buffer[: len(self._buffer) - held].rstrip() if self._state in self._table.marked else self._buffer
        self._buffer = self._buffer[len(sure) :]
        self._tell(sure)
        return False

    def _step_before_content(self) -> bool:
        text = self._buffer.lstrip()
        pattern = self._table.patterns.get(self._state)
        found = pattern.match(text) if pattern else None
        if found is not None:
            space = self._buffer[: len(self._buffer) - len(text)]
            self._buffer = text[found.end() :]
            self._move(self._table.moves[self._state, found.group()], "" if self._drop_space else space)
            return True
        if not text or any(each.startswith(text) for each in self._table.texts[self._state]):
            return False
        self._state = "content"
        return True

    def _tell(self, text: str) -> None:
        if self._drop_space:
            text = text.lstrip()
        if not text:
            return
        self._drop_space = False
        if self._state == "reasoning":
            self._seen.add("reasoning")
            self._events.append(Reasoning(self.choice, text))
        else:
            self._seen.add("content")
            self._events.append(Content(self.choice, text))

    def _move(self, marker: Marker, space: str = "") -> None:
        if self._state == "call":
            self._end_call(marker.text)
        # Text that goes on after something else keeps the space that parts it from what was told before.
        kind = "reasoning" if marker.to == "reasoning" else "content"
        self._drop_space = kind not in self._seen
        self._state = marker.to
        self._header = self._parser.format.reasoning_header if marker.to == "reasoning" else ""
        if marker.to == "call":
            assert self._parser.format.call is not None
            self._reader = self._parser.format.call.reader(self._tools, self._parser.quote_marks)
            self._begun = False
            self._raw = space if marker.begins_body else space + marker.text
            if marker.begins_body:
                self._buffer = marker.text + self._buffer

    # -- calls --------------------------------------------------------------------------------------------------------

    def _read_call(self, text: str) -> None:
        assert self._reader is not None
        progress = self._reader.feed(text)
        self._raw += text
        self._raw = self._raw[: len(self._raw) - len(progress.rest)]
        self._tell_call(progress)

    def _end_call(self, closing: str = "") -> None:
        """The body is over, by its closing marker or by the end of the answer."""
        assert self._reader is not None
        self._raw += closing
        progress = self._reader.finish(bool(closing))
        progress.failed = not progress.complete
        self._tell_call(progress)

    def _tell_call(self, progress: CallProgress) -> None:
        if progress.name is not None and not self._begun:
            self._begun = True
            call_id = self._parser.format.new_call_id(progress.name, self._next_call)
            self._events.append(ToolCallBegin(self.choice, self._next_call, call_id, progress.name))
        if progress.arguments:
            self._events.append(ToolCallArguments(self.choice, self._next_call, progress.arguments))
        if not (progress.complete or progress.failed):
            return
        self._buffer = self._spelled(progress.rest) + self._buffer
        self._reader = None
        if progress.complete:
            self._events.append(ToolCallEnd(self.choice, self._next_call))
            self.complete_calls += 1
            self._state, self._drop_space = "called", "content" not in self._seen
        elif self._begun:
            self.broken = True
            self._state, self._drop_space = "called", "content" not in self._seen
        else:
            self._state, self._drop_space = "content", False
            self._tell(self._spelled(self._raw))
        self._next_call += self._begun
        self._raw = ""

    def _spelled(self, text: str) -> str:
        """Text with the quotes that came as tokens as they are spelled."""
        for spelled, mark in self._parser.quote_marks.items():
            text = text.replace(mark, spelled)
        return text

    def _take_events(self) -> list[Event]:
        """The events so far, neighbours of one kind as one."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        joined: list[Event] = []
        for event in events:
            last = joined[-1] if joined else None
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = Content(self.choice, last.text + event.text)
            elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
                joined[-1] = Reasoning(self.choice, last.text + event.text)
            elif (
                isinstance(event, ToolCallArguments)
                and isinstance(last, ToolCallArguments)
                and last.index == event.index
            ):
                joined[-1] = ToolCallArguments(self.choice, event.index, last.text + event.text)
            else:
                joined.append(event)
        return joined
