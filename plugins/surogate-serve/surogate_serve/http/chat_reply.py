"""An answer in the shapes of chat completions: whole, and as chunks. Both read the same events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..types import (
    Content,
    Event,
    Finished,
    Reasoning,
    Refused,
    ToolCallArguments,
    ToolCallBegin,
    Usage,
)
from .errors import openai_error
from .logprobs import TokenTexts, chat_logprobs
from .requests import FINGERPRINT, json_bytes
from .sse import DONE, Frames, data_frame, quoted

Read = Callable[[Callable[[list[Event | Usage]], None]], Awaitable[None]]
"""Gives an answer's events to what it is called with."""
FINISH = {"stop": "stop", "length": "length", "context": "length", "tool_calls": "tool_calls"}


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` as chat and completions have it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def failure(finished: Finished) -> Refused | None:
    """The error that a choice ended in, where it did."""
    if finished.reason not in ("error", "cancelled"):
        return None
    return Refused(finished.error or "the engine could not finish this answer", 500, "generation_failed")


def _check(event: Event | Usage) -> None:
    """Raises `Refused` where a choice ended in an error."""
    if isinstance(event, Finished) and (refused := failure(event)) is not None:
        raise refused


class ChatReply:
    """One answer. texts: None where no log-probabilities are wanted. named_tool: the request named the tool to call,
    for which OpenAI says "stop". reasoning: whether it is told at all."""

    def __init__(
        self,
        *,
        id: str,
        model: str,
        created: int,
        choices: int,
        texts: TokenTexts | None,
        named_tool: bool,
        reasoning: bool,
        include_usage: bool,
    ) -> None:
        self._id, self._model, self._created, self._choices = id, model, created, choices
        self._texts, self._named_tool, self._reasoning, self._include_usage = (
            texts,
            named_tool,
            reasoning,
            include_usage,
        )

    def _finish(self, finished: Finished) -> str:
        reason = FINISH[finished.reason]
        return "stop" if reason == "tool_calls" and self._named_tool else reason

    # -- whole -------------------------------------------------------------------------------------------------------

    async def whole(self, read: Read) -> dict[str, Any]:
        """The whole answer. Raises `Refused` where a choice ended in an error."""
        choices = [_Whole() for _ in range(self._choices)]
        usage = Usage()

        def take(events: list[Event | Usage]) -> None:
            nonlocal usage
            for event in events:
                if isinstance(event, Usage):
                    usage = event
                else:
                    _check(event)
                    choices[event.choice].take(event)

        await read(take)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, whole) for index, whole in enumerate(choices)],
            "usage": usage_body(usage),
            "system_fingerprint": FINGERPRINT,
        }

    def _choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        content = "".join(whole.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if whole.calls and not content else content,
            "refusal": None,
        }
        if whole.reasoning and self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(whole.reasoning)
        if whole.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
                for call, arguments in whole.calls
            ]
        logprobs = None
        if self._texts is not None:
            logprobs = {"content": chat_logprobs(whole.logprobs, self._texts), "refusal": None}
        assert whole.finished is not None
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish(whole.finished),
        }
        return choice if whole.finished.stop is None else choice | {"stop_reason": whole.finished.stop}

    # -- chunks ------------------------------------------------------------------------------------------------------

    async def stream(self, read: Read, out: Frames) -> None:
        """Puts the chunks. Raises `Refused` where a choice ended in an error."""
        head = json_bytes({
            "id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model,
            "system_fingerprint": FINGERPRINT,
        })[:-1]  # fmt: skip
        begin = b"data: " + head + b',"choices":[{"index":'
        heads = [begin + b"%d" % index + b',"delta":' for index in range(self._choices)]
        tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        plain = b',"logprobs":null,"finish_reason":null' + tail
        contents, content_plain = [each + b'{"content":' for each in heads], b"}" + plain
        started = False

        def take(events: list[Event | Usage]) -> None:
            nonlocal started
            for event in events:
                if not started:
                    _check(event)
                    started = True
                    for each in heads:
                        out.put(each + b'{"role":"assistant","content":"","refusal":null}' + plain)
                if isinstance(event, Content):  # nearly all of them
                    after = content_plain if self._texts is None else self._with_logprobs(event) + tail
                    out.put(contents[event.choice] + quoted(event.text) + after)
                elif isinstance(event, Usage):
                    if self._include_usage:
                        out.put(b"data: " + head + b',"choices":[],"usage":' + json_bytes(usage_body(event)) + b"}\n\n")
                    out.put(DONE)
                    return
                elif isinstance(event, Finished):
                    _check(event)
                    out.put(heads[event.choice] + self._last(event) + tail)
                elif (delta := self._delta(event)) is not None:
                    out.put(heads[event.choice] + delta + plain)
            out.flush()

        await read(take)

    def ending(self, refused: Refused) -> bytes:
        """What ends a stream that cannot go on."""
        return data_frame(json_bytes(openai_error(refused))) + DONE

    def _with_logprobs(self, event: Content) -> bytes:
        assert self._texts is not None
        logprobs = {"content": chat_logprobs(event.logprobs, self._texts), "refusal": None}
        return b'},"logprobs":' + json_bytes(logprobs) + b',"finish_reason":null'

    def _last(self, event: Finished) -> bytes:
        stop = b"" if event.stop is None else b',"stop_reason":' + json_bytes(event.stop)
        return b'{},"logprobs":null,"finish_reason":"' + self._finish(event).encode() + b'"' + stop

    def _delta(self, event: Event) -> bytes | None:
        """Of reasoning and calls. A call's id and name are sent once: clients put strings of one index together."""
        if isinstance(event, Reasoning):
            text = quoted(event.text)
            return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}" if self._reasoning else None
        if isinstance(event, ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return json_bytes({"tool_calls": [call]})
        if isinstance(event, ToolCallArguments):
            fragment = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % event.index
            return fragment + quoted(event.text) + b"}}]}"
        return None


class _Whole:
    """A choice as it is put together."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[tuple[ToolCallBegin, list[str]]] = []
        self.logprobs: list[Any] = []
        self.finished: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Content):
            self.content.append(event.text)
            self.logprobs.extend(event.logprobs)
        elif isinstance(event, Reasoning):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallBegin):
            self.calls.append((event, []))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index][1].append(event.text)
        elif isinstance(event, Finished):
            self.finished = event
