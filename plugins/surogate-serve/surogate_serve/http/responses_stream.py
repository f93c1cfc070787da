"""An answer in the shape of OpenAI's Responses: whole, and as events. Both read the same events of the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from ..types import Content, Event, Finished, Reasoning, Refused, ToolCallArguments, ToolCallBegin, ToolCallEnd, Usage
from .chat_reply import failure
from .conversation import Asked
from .logprobs import TokenTexts, chat_logprobs
from .requests import json_bytes
from .responses_input import sealed
from .sse import Frames, event_frame, quoted


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_body(refused: Refused) -> dict[str, Any]:
    """`error` of a response that failed."""
    code = "rate_limit_exceeded" if refused.status == 429 else "server_error"
    return {"code": code, "message": refused.message}


_DELTAS = {"function_call": "function_call_arguments", "message": "output_text", "reasoning": "reasoning_text"}


class _Item:
    """An item that is being made. index: its place in the output. text: of its content, or its arguments."""

    def __init__(self, kind: str, prefix: str, index: int, **fields: Any) -> None:
        self.kind, self.id, self.index, self.fields = kind, f"{prefix}_{uuid.uuid4().hex}", index, fields
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []


class ResponseReply:
    """One answer. ``response`` is the object as it stands, complete at the end; ``finished(response)`` is called with it
    then. texts: None where no log-probabilities are wanted. seal: reasoning is told once more as a client can carry it.
    """

    def __init__(
        self,
        asked: Asked,
        response: dict[str, Any],
        *,
        texts: TokenTexts | None = None,
        seal: bool = False,
        finished: Callable[[dict[str, Any]], None] = lambda response: None,
    ) -> None:
        self.response = response
        self._asked, self._texts, self._seal, self._finished_call = asked, texts, seal, finished
        self._number = 0
        self._item: _Item | None = None
        self._finished: Finished | None = None
        self._head = b""  # of the frames of the open item's deltas

    async def whole(self) -> dict[str, Any]:
        """The whole response. Raises `Refused` where the answer ended in an error."""

        def take(events: list[Event | Usage]) -> None:
            for event in events:
                if isinstance(event, Usage):
                    self._complete(event)
                else:
                    for _ in self._frames_of(event):
                        pass

        await self._asked.read(take)
        return self.response

    async def stream(self, out: Frames) -> None:
        """Puts the events. Raises `Refused` where the answer ended in an error."""

        def take(events: list[Event | Usage]) -> None:
            for event in events:
                if type(event) is Content and self._item is not None and self._item.kind == "message":
                    out.put(self._delta(event.text, self._logprobs(event)))  # nearly all of them
                    continue
                if isinstance(event, Usage):
                    self._complete(event)
                    out.put(self._frame(f"response.{self.response['status']}", response=self.response))
                    return
                if self._number == 0:
                    if isinstance(event, Finished) and (refused := failure(event)) is not None:
                        raise refused
                    out.put(self._frame("response.created", response=self.response))
                    out.put(self._frame("response.in_progress", response=self.response))
                for frame in self._frames_of(event):
                    out.put(frame)
            out.flush()

        await self._asked.read(take)

    def ending(self, refused: Refused) -> bytes:
        """What ends a stream that cannot go on."""
        self.fail(refused)
        return self._frame("response.failed", response=self.response)

    def fail(self, refused: Refused) -> None:
        self.response |= {"status": "failed", "error": error_body(refused)}

    def _complete(self, usage: Usage) -> None:
        assert self._finished is not None
        response = self.response
        if self._finished.reason in ("length", "context"):
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            response |= {"status": "completed", "completed_at": int(time.time())}
        response["usage"] = usage_body(usage)
        self._finished_call(response)

    def _frame(self, event: str, **fields: Any) -> bytes:
        body = {"type": event, "sequence_number": self._number} | fields
        self._number += 1
        return event_frame(event, json_bytes(body))

    # -- items -------------------------------------------------------------------------------------------------------

    def _frames_of(self, event: Event) -> Iterator[bytes]:
        """One item is open at a time. Raises `Refused` where the answer ended in an error."""
        if isinstance(event, Content):
            if self._item is None or self._item.kind != "message":
                yield from self._begin("message", "msg", role="assistant", content=[])
            yield self._delta(event.text, self._logprobs(event))
        elif isinstance(event, Reasoning):
            if self._item is None or self._item.kind != "reasoning":
                yield from self._begin("reasoning", "rs", summary=[], content=[])
            yield self._delta(event.text)
        elif isinstance(event, ToolCallBegin):
            yield from self._begin("function_call", "fc", call_id=event.id, name=event.name, arguments="")
        elif isinstance(event, ToolCallArguments):
            yield self._delta(event.text)
        elif isinstance(event, ToolCallEnd):
            yield from self._close("completed")
        elif isinstance(event, Finished):
            if (refused := failure(event)) is not None:
                raise refused
            self._finished = event
            if self._item is None and not self.response["output"]:
                yield from self._begin("message", "msg", role="assistant", content=[])
            # A call that is still open will never be whole, whatever ended the answer.
            cut = event.reason in ("length", "context") or (self._item and self._item.kind == "function_call")
            yield from self._close("incomplete" if cut else "completed")

    def _logprobs(self, event: Content) -> list[dict[str, Any]]:
        if self._texts is None:
            return []
        assert self._item is not None
        logprobs = chat_logprobs(event.logprobs, self._texts)
        self._item.logprobs += logprobs
        return logprobs

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[bytes]:
        yield from self._close("completed")
        item = self._item = _Item(kind, prefix, len(self.response["output"]), **fields)
        opened = {"id": item.id, "type": kind, "status": "in_progress"} | fields
        yield self._frame("response.output_item.added", output_index=item.index, item=opened)
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if kind != "function_call":
            place["content_index"] = 0
            yield self._frame("response.content_part.added", **place, part=self._part(item))
        event = f"response.{_DELTAS[kind]}.delta".encode()
        self._head = b"event: " + event + b'\ndata: {"type":"' + event + b'",' + json_bytes(place)[1:-1]

    def _delta(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        """logprobs: None for items that have none."""
        assert self._item is not None
        self._item.text.append(text)
        frame = self._head + b',"sequence_number":%d,"delta":' % self._number + quoted(text)
        self._number += 1
        if logprobs is None:
            return frame + b"}\n\n"
        return frame + b',"logprobs":' + (json_bytes(logprobs) if logprobs else b"[]") + b"}\n\n"

    def _part(self, item: _Item) -> dict[str, Any]:
        text = "".join(item.text)
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": item.logprobs}

    def _close(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        self._item = None
        text = "".join(item.text)
        done: dict[str, Any] = {"id": item.id, "type": item.kind, "status": status} | item.fields
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            done["arguments"] = text
            name = item.fields["name"]
            yield self._frame("response.function_call_arguments.done", **place, name=name, arguments=text)
        else:
            part = self._part(item)
            done["content"] = [part]
            place["content_index"] = 0
            if item.kind == "message":
                logprobs = item.logprobs
                yield self._frame("response.output_text.done", **place, text=text, logprobs=logprobs)
            else:
                if self._seal:
                    done["encrypted_content"] = sealed(text)
                yield self._frame("response.reasoning_text.done", **place, text=text)
            yield self._frame("response.content_part.done", **place, part=part)
        self.response["output"].append(done)
        yield self._frame("response.output_item.done", output_index=item.index, item=done)
