"""Finds the characters of each assistant turn in a rendered conversation, for any chat template.

A turn is what the model would write: the answer and the terminator after it, never the header before it. Templates are
programs, so nothing about their markers is assumed. Two methods, the second where the first does not apply:

1. By prefix. The prompt of turn i (messages before i, generation prompt on) and the conversation that ends with turn i
   are rendered; where both fit the whole rendering, the turn lies between them. Reasoning that a template shows only in
   the last turn is allowed for, and so is a turn that goes on behind the results of its calls.
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
        self._learned, self._tail, self._prompts = self._learn()

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
        last_query = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
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
            if index > last_query and not _holds_thought(message, rendering.text[start:end]):
                raise DataError(f"messages[{index}] (assistant): the chat template leaves out its reasoning_content",
                                "Use a chat template that knows thoughts, or leave them out of the data.")
            turns.append(Turn(index, start, end, self._is_terminated(message, rendering.text[start:end])))
        return rendering.text, turns

    def _learn(self) -> tuple[list[str], str | None, bool]:
        """What this template writes before an answer, the last one and an earlier one (where it can be told), and after
        it, from the shortest chats; whether it has a generation prompt."""
        question, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}
        asked = self._try([question])
        prompts = asked != self._try([question], add_generation_prompt=True)
        headers, tail = [], None
        for rest in ([], [question, {"role": "assistant", "content": "fine"}]):
            answered = self._try([question, answer, *rest])
            if answered is None or answered.count(_PROBE) != 1:
                continue
            before, after = answered.split(_PROBE)
            tail = after.rstrip() if not rest else tail
            headers.append(before[len(asked):] if asked and before.startswith(asked) else "")
        return list(dict.fromkeys(headers)) or [""], tail, prompts

    def _try(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None

    def _by_prefix(self, rendering: _Rendering, index: int) -> tuple[int, int] | None:
        *before, message = rendering.messages[:index + 1]
        forms = [message]
        if message.get("reasoning_content"):
            forms.append({key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")})
        endings = [alone for form in forms if (alone := rendering.of([*before, form])) is not None]
        for header in self._headers(rendering, index) if endings else ():
            if not rendering.text.startswith(header):
                continue
            for body in (alone[len(header):] for alone in endings if alone.startswith(header)):
                for candidate in (body, _THINK_BLOCK.sub("", body, count=1) if _THINK_BLOCK.match(body) else body):
                    if candidate.strip() and rendering.text.startswith(candidate.rstrip(), len(header)):
                        return len(header), len(header) + len(candidate.rstrip())
        return None

    def _headers(self, rendering: _Rendering, index: int) -> Iterator[str]:
        """Everything before the answer. A template without a generation prompt gets the header learned from it; one
        that has none just here lets the turn before go on."""
        before = rendering.of(rendering.messages[:index])
        prompted = rendering.of(rendering.messages[:index], add_generation_prompt=True)
        if prompted is not None and (prompted != before or self._prompts):
            yield prompted
        if before is not None:
            yield from (before + header for header in self._learned)

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
        if self._empty_think or content.lstrip().startswith("<think>"):
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


def _holds_thought(message: Message, body: str) -> bool:
    thought = message.get("reasoning_content")
    return not isinstance(thought, str) or _appears(thought.strip(), body)


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
