"""Finds the characters of each assistant turn in a rendered conversation, for any chat template.

A turn is what the model would write: the answer and the terminator after it, never the header before it. Templates are
programs, so nothing about their markers is assumed. Two methods, the second where the first does not apply:

1. By prefix. The prompt of turn i (messages before i, generation prompt on) and the conversation that ends with turn i
   are rendered; where both fit the whole rendering, the turn lies between them. Reasoning that a template shows only in
   the last turn is allowed for.
2. By probe. The whole conversation is rendered again with turn i's answer replaced by a marker; what stands before and
   after the marker must be what stands before and after the answer.

What is found is verified against the messages, and refused with a reason where it does not hold all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from .template import ChatTemplate, Message

_PROBE = "qzxProbe7731xzq"
_THINK_BLOCK = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True)
class Turn:
    """Characters [start, end) of the rendering are what messages[message], an assistant's, puts there.

    terminated: whether the template ends this turn with something the model can learn to write.
    """

    message: int
    start: int
    end: int
    terminated: bool


class TurnFinder:
    """Finds turns in one template's renderings. `tools` and `variables` reach the template with every rendering."""

    def __init__(self, template: ChatTemplate, empty_think: bool = False) -> None:
        """empty_think: whether a thought-less `<think></think>` that the template itself writes belongs to the turn."""
        self._template = template
        self._empty_think = empty_think
        self._header, self._tail = self._learn()

    @property
    def turn_end(self) -> str:
        """What the template writes behind an answer, without white space at its end; empty where that is nothing, or
        cannot be told."""
        return self._tail or ""

    def find(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None,
             **variables: Any) -> tuple[str, list[Turn]]:
        """The whole rendering and its assistant turns, in order.

        Raises DataError where a turn cannot be told from the text around it, or where the template leaves out content.
        """
        rendering = _Rendering(self._template, list(messages), tools, variables)
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                _check_present(message, index, rendering.text)
                continue
            found = self._by_prefix(rendering, index) or self._by_probe(rendering, index)
            if found is None or found[0] < (turns[-1].end if turns else 0):
                raise DataError(f"messages[{index}]: its place in the rendered conversation cannot be told: the chat "
                                "template renders a conversation and its beginning differently",
                                "Give another `chat_template`, or train with `train_on: all`.")
            start, end = self._without_supplied_thought(rendering.text, message, *found)
            _check_turn(message, index, rendering.text[start:end])
            turns.append(Turn(index, start, end, self._is_terminated(message, rendering.text[start:end])))
        return rendering.text, turns

    def _learn(self) -> tuple[str, str | None]:
        """What this template writes before an answer (where it can be told) and after it, from the shortest chat."""
        question = {"role": "user", "content": "hello"}
        asked = self._try([question])
        answered = self._try([question, {"role": "assistant", "content": _PROBE}])
        if answered is None or answered.count(_PROBE) != 1:
            return "", None
        before, after = answered.split(_PROBE)
        return (before[len(asked):] if asked and before.startswith(asked) else ""), after.rstrip()

    def _try(self, messages: list[Message]) -> str | None:
        try:
            return self._template.render(messages)
        except DataError:
            return None

    def _by_prefix(self, rendering: _Rendering, index: int) -> tuple[int, int] | None:
        alone = rendering.of(rendering.messages[:index + 1])
        if alone is None:
            return None
        for header in self._headers(rendering, index):
            if not rendering.text.startswith(header) or not alone.startswith(header):
                continue
            body = alone[len(header):]
            for candidate in (body, _THINK_BLOCK.sub("", body, count=1) if _THINK_BLOCK.match(body) else body):
                if candidate.strip() and rendering.text.startswith(candidate.rstrip(), len(header)):
                    return len(header), len(header) + len(candidate.rstrip())
        return None

    def _headers(self, rendering: _Rendering, index: int) -> Iterator[str]:
        """Everything before the answer. A template without a generation prompt gets the header learned from it."""
        before = rendering.of(rendering.messages[:index])
        prompted = rendering.of(rendering.messages[:index], add_generation_prompt=True)
        if prompted is not None and prompted != before:
            yield prompted
        if before is not None:
            yield before + self._header

    def _by_probe(self, rendering: _Rendering, index: int) -> tuple[int, int] | None:
        probe = {"role": "assistant", "content": _PROBE}
        messages, text = rendering.messages, rendering.text
        probed = rendering.of([*messages[:index], probe, *messages[index + 1:]])
        ended = rendering.of([*messages[:index], probe])
        if probed is None or probed.count(_PROBE) != 1:
            return None
        before, after = probed.split(_PROBE)
        if not text.endswith(after):
            return None
        start = len(os.path.commonprefix([text, before]))
        if start < len(before):
            if not (messages[index].get("tool_calls") or messages[index].get("reasoning_content")):
                return None
            opened = text.rfind("<think>", 0, start)
            start = opened if opened >= 0 and not text[opened + len("<think>"):start].strip() else start
        end = len(text) - len(after)
        tail = ended.split(_PROBE)[-1].rstrip() if ended and _PROBE in ended else self._tail or ""
        return (start, end + len(tail)) if text.startswith(tail, end) and start <= end else (start, end)

    def _without_supplied_thought(self, text: str, message: Message, start: int, end: int) -> tuple[int, int]:
        content = message.get("content") or ""
        if self._empty_think or content.lstrip().startswith("<think>") or message.get("reasoning_content"):
            return start, end
        supplied = _EMPTY_THINK.match(text, start, end)
        return (supplied.end() if supplied else start), end

    def _is_terminated(self, message: Message, body: str) -> bool:
        if message.get("tool_calls"):
            return True  # what closes a call is part of the call's own form
        if self._tail is not None:
            return bool(self._tail)
        content = (message.get("content") or "").strip()
        return not content or not body.rstrip().endswith(content)


class _Rendering:
    """One conversation rendered whole, with its parts rendered the same way; None where the template refuses a part."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None,
                 variables: dict[str, Any]) -> None:
        self._template, self._tools, self._variables = template, tools, variables
        self.messages = messages
        self.text = template.render(messages, tools, **variables)

    def of(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._template.render(messages, self._tools, add_generation_prompt, **self._variables)
        except DataError:
            return None


def _appears(value: str, text: str) -> bool:
    """As it is, or as JSON writes it inside quotes (with or without escapes for letters outside ASCII)."""
    forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(form in text for form in forms)


def _check_present(message: Message, index: int, text: str) -> None:
    content = (message.get("content") or "").strip()
    if content and not _appears(content, text):
        raise DataError(f"messages[{index}] ({message['role']}): the chat template leaves out or changes its content")


def _check_turn(message: Message, index: int, body: str) -> None:
    content = (message.get("content") or "").strip()
    thought = _THINK_BLOCK.match(content)
    if content and content not in body and not (thought and content[thought.end():].strip() in body):
        raise DataError(f"messages[{index}] (assistant): the chat template leaves out or changes part of its content",
                        "A `</think>` without its `<think>` is the usual cause." if "</think>" in content else None)
    for call in message.get("tool_calls") or []:
        function = call["function"]
        missing = next((leaf for leaf in _leaves(function["arguments"]) if not _appears(leaf, body)), None)
        if not _appears(function["name"], body) or missing is not None:
            lost = f"argument {missing!r} of " if missing is not None else ""
            raise DataError(f"messages[{index}] (assistant): the chat template leaves out the {lost}tool call "
                            f"{function['name']}", "Use a chat template that knows tool calls.")


def _leaves(value: Any) -> Iterator[str]:
    """The names and texts inside a tool call's arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value
