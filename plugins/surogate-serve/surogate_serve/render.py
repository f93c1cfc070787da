"""Conversations as prompts, through a model's own chat template, such that no text of a request becomes a control
token.

The template is rendered once, with every spelling of a control token in the request's texts broken by digits that
nobody can guess. So every spelling in the rendering is the template's own, whatever it did to the texts. The rendering
is then cut at those: stretches with broken spellings are encoded as plain text, without the digits; all others as
`transformers` encodes them.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from surogate_core.data.template import ChatTemplate
from surogate_core.errors import DataError

from .spellings import Spellings, new_breaker
from .time_limit import OutOfTime, time_limit
from .types import Prompt, Refused

TIME_LIMIT = 10.0
"""Seconds that a template may take for one conversation."""
SIZE_LIMIT = 64 << 20
"""Characters that it may write."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class PromptTokenizer(Protocol):
    """What is needed of a tokenizer; the core's has it."""

    added_tokens: Mapping[str, int]
    special_tokens: frozenset[str]

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]: ...

    def plain_encoder(self, also: frozenset[str]) -> Callable[[str], list[int]]: ...


def render(
    template: ChatTemplate,
    tokenizer: PromptTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> Prompt:
    """The conversation as token ids, as `transformers` would give them for a request that spells no control token.

    continue_final_message: the answer goes on where the last message's text ends; a name says which of its fields.
    variables: reach the template by name, e.g. enable_thinking=False. Raises Refused (400) where the template refuses
    the conversation, takes too long or writes too much, or where a text is not Unicode.
    """
    renderer = _renderer(template, tokenizer)
    return renderer.render(messages, tools, add_generation_prompt, continue_final_message, variables)


class Renderer:
    """A template with a tokenizer, and what both say about control tokens."""

    def __init__(self, template: ChatTemplate, tokenizer: PromptTokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        # Tokens that are not special but that the template writes as markers (<tool_call>): as good as special.
        marks = {
            each
            for each in tokenizer.added_tokens
            if each[:1] in "<[" and each[-1:] in ">]" and each in template.source
        }
        self._control = Spellings(tokenizer.special_tokens | marks, cut_out="replace" in template.source)
        # An assistant's earlier text may hold what the model wrote itself, such as <think>, but nothing special.
        self._special = Spellings(tokenizer.special_tokens)
        self._plain = tokenizer.plain_encoder(frozenset(marks))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """See `render`."""
        if continue_final_message and add_generation_prompt:
            raise Refused("continue_final_message goes without add_generation_prompt", param="continue_final_message")
        breaker = new_breaker()
        safe = [self._broken_message(message, breaker) for message in messages]
        given = (self._control.broken_in(tools, breaker) or None, self._control.broken_in(variables or {}, breaker))
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            text = self._continued(safe, field, *given)
            before = safe[:-1]
        else:
            text = self._written(safe, *given, add_generation_prompt)
            before = safe
        tail = self._tail(text, before, *given) if add_generation_prompt or continue_final_message else ""
        return Prompt(self._encode(text, breaker), tail.replace(breaker, ""))

    def _broken_message(self, message: Mapping[str, Any], breaker: str) -> dict[str, Any]:
        """As the template gets it: without fields that are None, reasoning under every name that templates know, and
        arguments of calls as objects, which APIs send as JSON in a string."""
        is_answer = message.get("role") == "assistant"
        result = {}
        for key, value in message.items():
            own = is_answer and key in ("content", *_REASONING_NAMES)
            if key == "tool_calls" and value:
                value = [_with_arguments(call) for call in value]
            if value is not None:
                result |= (self._special if own else self._control).broken_in({key: value}, breaker)
        reasoning = next((result[name] for name in _REASONING_NAMES if name in result), None)
        return result if reasoning is None else {"thinking": reasoning, **result, "reasoning_content": reasoning}

    def _written(self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any], generation: bool) -> str:
        """The template's text. Raises Refused where it refuses, or exceeds its limits."""
        pieces, size = [], 0
        try:
            with time_limit(TIME_LIMIT):
                for piece in self.template.pieces(messages, tools, generation, **variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > SIZE_LIMIT:
                        raise Refused(f"the chat template writes more than {SIZE_LIMIT} characters", param="messages")
        except Refused:
            raise
        except OutOfTime:
            words = f"the chat template took more than {TIME_LIMIT:g} s for this conversation"
            raise Refused(words, param="messages") from None
        except DataError as error:
            raise Refused(str(error)[:400], param="messages") from error
        except Exception as error:  # a template is a program, and fails like one
            raise Refused(f"the chat template fails on this conversation: {error}"[:400], param="messages") from error
        return "".join(pieces)

    def _continued(self, messages: list[dict[str, Any]], field: str, tools: Any, variables: dict[str, Any]) -> str:
        """The rendering up to the end of the last message's text."""
        mark = new_breaker()
        last = dict(messages[-1]) if messages else {}
        names = _REASONING_NAMES if field in _REASONING_NAMES else (field,)
        names = tuple(name for name in names if name in last)
        for name in names:
            last[name] = _with_mark(last[name], mark + " ")
        text = self._written([*messages[:-1], last], tools, variables, False) if names else ""
        place = text.rfind(mark)
        if place < 0:
            raise Refused(
                f"the last message has no {field} that the chat template lets go on", param="continue_final_message"
            )
        # Without the space behind the mark the template trims texts, and would have trimmed this one.
        return text[:place] if text[place + len(mark) :][:1] == " " else text[:place].rstrip()

    def _tail(self, text: str, before: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        """What the prompt has behind the conversation before the answer."""
        try:
            head = self._written(before, tools, variables, False)
        except Refused:  # some templates refuse a conversation that ends like this
            return ""
        return text[len(os.path.commonprefix([head, text])) :]

    def _encode(self, text: str, breaker: str) -> list[int]:
        try:
            if breaker not in text:
                return self.tokenizer.encode(text)
            ids: list[int] = []
            for part, is_plain in self._parts(text, breaker):
                ids += self._plain(part) if is_plain else self.tokenizer.encode(part)
            return ids
        except (UnicodeError, TypeError) as error:
            raise Refused("the messages hold text that is not Unicode (a lone surrogate)", param="messages") from error

    def _parts(self, text: str, breaker: str) -> Iterator[tuple[str, bool]]:
        """The text in stretches: between two of the template's control tokens, with a broken spelling (then plain, and
        without the breaker), or else together with its neighbours."""
        found = self._control.pattern.finditer(text) if self._control.pattern is not None else ()
        begin = after = 0  # of the stretch that is not plain, and of what follows the last control token
        for start, end in [*(match.span() for match in found), (len(text), len(text))]:
            if breaker in text[after:start]:
                yield text[begin:after], False
                yield text[after:start].replace(breaker, ""), True
                begin = start
            after = end
        yield text[begin:], False


@lru_cache(maxsize=64)
def _renderer(template: ChatTemplate, tokenizer: PromptTokenizer) -> Renderer:
    """Made once for a model: reading all its tokens' spellings takes a moment."""
    return Renderer(template, tokenizer)


def _with_mark(value: Any, mark: str) -> Any:
    """A message's text, or the last text of its parts, with something behind it."""
    if isinstance(value, str):
        return value + mark
    parts = list(value) if isinstance(value, list) else []
    for place in reversed(range(len(parts))):
        if isinstance(parts[place], Mapping) and isinstance(parts[place].get("text"), str):
            parts[place] = {**parts[place], "text": parts[place]["text"] + mark}
            return parts
    return value


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object where they can be."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
