"""An answer in the shape of Anthropic's Messages: whole, and as events. Both read the same events of the answer."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import pydantic_core

from ..types import Content, Event, Finished, Reasoning, Refused, ToolCallArguments, ToolCallBegin, ToolCallEnd, Usage
from .chat_reply import failure
from .conversation import Asked
from .errors import anthropic_error
from .requests import json_bytes
from .sse import Frames, event_frame, quoted

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}
_PING = event_frame("ping", b'{"type":"ping"}')
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
_END = b"}}\n\n"
_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


def signature_of(thinking: str) -> str:
    """What stands for the proof that thinking was not changed. Clients send it back; nothing here reads it."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode()


def usage_body(asked: Asked, usage: Usage | None) -> dict[str, Any]:
    """`usage`, whose input tokens are those that were not cached; without one, of an answer that only begins."""
    cached = asked.cached_tokens if usage is None else usage.cached_tokens
    prompt = asked.prompt_tokens if usage is None else usage.prompt_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0 if usage is None else usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": 0 if usage is None else usage.reasoning_tokens},
    }


class MessageReply:
    """One answer. thinking: whether reasoning is told at all. thinking_shown: with its text."""

    def __init__(
        self, asked: Asked, *, id: str, model: str, request_id: str, thinking: bool, thinking_shown: bool = True
    ) -> None:
        self._asked, self._id, self._model, self._request_id = asked, id, model, request_id
        self._thinking, self._thinking_shown = thinking, thinking_shown
        self._content: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the block that is open
        self._head = b""  # of the frames of its deltas
        self._text: list[str] = []  # of the open block
        self._finished: Finished | None = None

    async def whole(self) -> dict[str, Any]:
        """The whole message. Raises `Refused` where the answer ended in an error."""
        usage = Usage()

        def take(events: list[Event | Usage]) -> None:
            nonlocal usage
            for event in events:
                if isinstance(event, Usage):
                    usage = event
                else:
                    for _ in self._frames_of(event):
                        pass

        await self._asked.read(take)
        return self._message(usage) | {"content": self._content, **self._ending()}

    async def stream(self, out: Frames) -> None:
        """Puts the events. Raises `Refused` where the answer ended in an error."""
        started = False

        def take(events: list[Event | Usage]) -> None:
            nonlocal started
            for event in events:
                if type(event) is Content and self._open == "text":  # nearly all of them
                    out.put(self._delta(event.text))
                    continue
                if isinstance(event, Usage):
                    out.put(self._last(event))
                    return
                frames = list(self._frames_of(event))
                if not started:
                    started = True
                    start = {"type": "message_start", "message": self._message(None)}
                    out.put(event_frame("message_start", json_bytes(start)) + _PING)
                for frame in frames:
                    out.put(frame)
            out.flush()

        await self._asked.read(take)

    def ending(self, refused: Refused) -> bytes:
        """What ends a stream that cannot go on."""
        return event_frame("error", json_bytes(anthropic_error(refused, self._request_id)))

    def _message(self, usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(self._asked, usage),
        }

    def _ending(self) -> dict[str, Any]:
        finished = self._finished
        assert finished is not None
        if isinstance(finished.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
        reason = "context" if finished.reason == "length" and self._asked.cut else finished.reason
        return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}

    def _last(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending(), "usage": usage_body(self._asked, usage)}
        return event_frame("message_delta", json_bytes(delta)) + event_frame("message_stop", b'{"type":"message_stop"}')

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _frames_of(self, event: Event) -> Iterator[bytes]:
        """One block is open at a time. Raises `Refused` where the answer ended in an error."""
        if isinstance(event, Content):
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta(event.text)
        elif isinstance(event, Reasoning):
            if not self._thinking:
                return
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            if self._thinking_shown:
                yield self._delta(event.text)
            else:
                self._text.append(event.text)
        elif isinstance(event, ToolCallBegin):
            block = {"type": "tool_use", "id": "toolu_" + event.id.removeprefix("call_"), "name": event.name, "input": {}}
            yield from self._begin(block)
        elif isinstance(event, ToolCallArguments):
            yield self._delta(event.text)
        elif isinstance(event, ToolCallEnd):
            yield from self._close()
        elif isinstance(event, Finished):
            if (refused := failure(event)) is not None:
                raise refused
            self._finished = event
            yield from self._close()
            if not self._content:
                yield from self._begin({"type": "text", "text": ""})
                yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        start = {"type": "content_block_start", "index": len(self._content), "content_block": block}
        yield event_frame("content_block_start", json_bytes(start))
        self._head = _DELTA % (len(self._content), *_DELTAS[block["type"]])
        self._content.append(dict(block))
        self._open = block["type"]

    def _delta(self, text: str) -> bytes:
        self._text.append(text)
        return self._head + quoted(text) + _END

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        block, text = self._content[-1], "".join(self._text)
        if self._open == "text":
            block["text"] = text
        elif self._open == "thinking":
            block |= {"thinking": text if self._thinking_shown else "", "signature": signature_of(text)}
            kind, field = b"signature_delta", b"signature"
            yield _DELTA % (len(self._content) - 1, kind, field) + quoted(block["signature"]) + _END
        else:
            # A call that was cut short has what of its arguments is whole, as the clients' own readers of streams say.
            block["input"] = pydantic_core.from_json(text or "{}", allow_partial=True)
        self._open = None
        self._text.clear()
        yield event_frame("content_block_stop", b'{"type":"content_block_stop","index":%d}' % (len(self._content) - 1))
