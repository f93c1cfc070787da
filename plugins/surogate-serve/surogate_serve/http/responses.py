"""`/v1/responses`: OpenAI's Responses, with what is kept of them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .chat import Effort
from .conversation import Conversation, ask, prompt_of
from .guard import Guard
from .limits import Settings
from .log import Exchange
from .logprobs import TokenTexts
from .requests import GenerationFields, Strict, exchange_of, json_bytes, read, resolve
from .responses_input import Item, items_of, template_messages, tool_choice_of, tools_of
from .responses_store import ResponseStore, Stored
from .responses_stream import ResponseReply
from .schema import json_body
from .sse import EventStream

_NAMES = {"messages": "input", "response_format": "text.format"}
"""Names of chat completions, and what Responses call the same."""
_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
logger = logging.getLogger("surogate.serve")


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Strict):
    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(GenerationFields):
    """A request for a response."""

    input: str | Annotated[list[Any], Field(max_length=65536)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    background: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    conversation: Any = None
    prompt: Any = None


class ResponsesRoute:
    """The routes, over all models of a server, and the responses that it keeps."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._texts = {name: TokenTexts(model.tokenizer) for name, model in models.items()}
        self._store = ResponseStore()
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background, by the response's id
        self._unread: dict[str, asyncio.Event] = {}  # those that ended while the server drains

    # -- making one --------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        settings, exchange = self._settings, exchange_of(request)
        fields = read(request, ResponsesRequest, settings)
        _check_supported(fields)
        items, conversation, size = self._conversation(request, fields)
        asked = await ask(conversation, settings)
        key, stored = exchange.key, fields.store is not False

        def keep(response: dict[str, Any]) -> None:
            if stored:
                self._store.put(key, Stored(response, items, size + len(json_bytes(response))))

        reply = ResponseReply(
            asked,
            _response(fields, conversation),
            texts=self._texts[conversation.chosen.model.name] if conversation.logprobs is not None else None,
            seal=_SEALED in (fields.include or ()),
            finished=keep,
        )
        if fields.background:
            return self._in_background(exchange.guard, exchange, reply, keep)
        if fields.stream:
            return EventStream(reply.stream, reply.ending, settings.limits, exchange)
        return _json(await reply.whole())

    async def input_tokens(self, request: Request) -> Response:
        fields = read(request, ResponsesRequest, self._settings)
        _check_supported(fields)
        _, conversation, _ = self._conversation(request, fields)
        prompt = await prompt_of(conversation, self._settings)
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    def _conversation(self, request: Request, fields: ResponsesRequest) -> tuple[list[Item], Conversation, int]:
        """The items up to the answer, what is asked, and about how many bytes the items are."""
        chosen = resolve(self._models, fields.model)
        size = len(exchange_of(request).raw)
        items = items_of(fields.input)
        if fields.previous_response_id is not None:
            key = exchange_of(request).key
            previous = self._store.get(key, fields.previous_response_id, "previous_response_id")
            if previous.response["status"] in ("queued", "in_progress"):
                raise Refused("the previous response is not finished yet", param="previous_response_id")
            items = [*previous.items, *items]
            size += previous.size
        if not items:
            raise Refused("input is empty", param="input")
        effort = None if fields.reasoning is None else fields.reasoning.effort
        output_format = None if fields.text is None else fields.text.format
        conversation = Conversation(
            chosen,
            template_messages(fields.instructions, items),
            fields,
            fields.max_output_tokens,
            tools=tools_of(fields.tools or ()),
            tool_choice=tool_choice_of(fields.tool_choice),
            parallel=fields.parallel_tool_calls is not False,
            thinking=None if effort is None else effort != "none",
            effort=effort,
            response_format=None if output_format is None else _response_format(output_format),
            logprobs=_logprobs(fields),
            size=size,
            names=_NAMES,
        )
        return items, conversation, size

    def _in_background(self, guard: Guard, exchange: Exchange, reply: ResponseReply, keep: Any) -> Response:
        """Answers at once; the response is found in the store. A server that drains goes on until the response was read,
        as it keeps none beyond its own end."""
        response = reply.response
        response["status"] = "queued"
        keep(response)

        async def run() -> None:
            response["status"] = "in_progress"
            try:
                await reply.whole()
            except asyncio.CancelledError:
                if guard.draining:
                    reply.fail(Refused("the server is shutting down", 503, "shutting_down"))
                else:
                    response["status"] = "cancelled"
                raise
            except Refused as refused:
                reply.fail(refused)
            except Exception:
                logger.exception("response %s failed", response["id"])
                reply.fail(Refused("the server failed while it answered", 500, "internal_error"))
            finally:
                self._running.pop(response["id"], None)
            if guard.draining:
                read = self._unread[response["id"]] = asyncio.Event()
                await read.wait()

        answer = _json(response)
        self._running[response["id"]] = guard.goes_on(exchange, run())
        return answer

    # -- those that are kept -----------------------------------------------------------------------------------------

    async def retrieve(self, request: Request, number: str) -> Response:
        stored = self._of(request, number)
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise Refused("a response that is kept cannot be streamed again", 400, "unsupported", "stream")
        if (read := self._unread.pop(stored.response["id"], None)) is not None:
            read.set()
        return _json(stored.response)

    async def delete(self, request: Request, number: str) -> Response:
        made = self._of(request, number).response["id"]
        if (task := self._running.get(made)) is not None:
            task.cancel()
        self._store.delete(exchange_of(request).key, made)
        return _json({"id": made, "object": "response", "deleted": True})

    async def cancel(self, request: Request, number: str) -> Response:
        stored = self._of(request, number)
        if not stored.response["background"]:
            raise Refused("only responses with `background` can be cancelled", param="response_id")
        made = stored.response["id"]
        if (task := self._running.get(made)) is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
            if stored.response["status"] == "queued":  # cancelled before it ran at all
                stored.response["status"] = "cancelled"
                self._running.pop(made, None)
        return _json(stored.response)

    async def input_items(self, request: Request, number: str) -> Response:
        items = self._of(request, number).input
        query = request.query_params
        order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise Refused("order is asc or desc", param="order")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= 100):
            raise Refused("limit is 1 to 100", param="limit")
        listed = items if order == "asc" else items[::-1]
        if after is not None:
            places = [index for index, item in enumerate(listed) if item["id"] == after]
            if not places:
                raise Refused("after names no item of this response", param="after")
            listed = listed[places[0] + 1 :]
        page = listed[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        more = len(listed) > len(page)
        return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})

    def _of(self, request: Request, number: str) -> Stored:
        """number: an id without its `resp_`."""
        exchange = exchange_of(request)
        exchange.route = "/v1/responses/{id}"
        return self._store.get(exchange.key, f"resp_{number}")


def _check_supported(fields: ResponsesRequest) -> None:
    if fields.choices != 1:
        raise Refused("a response has one answer: n must be 1", param="n")
    for name in ("conversation", "prompt"):
        if getattr(fields, name) is not None:
            raise Refused(f"{name} refers to what is kept at OpenAI, and is not supported", 400, "unsupported", name)
    if fields.background and fields.store is False:
        raise Refused("background needs store, as the response is found there", param="background")
    if fields.background and fields.stream:
        raise Refused("background and stream together are not supported", 400, "unsupported", "background")


def _logprobs(fields: ResponsesRequest) -> int | None:
    """How many alternatives are told of each token; None where nothing asks for log-probabilities."""
    wanted = fields.top_logprobs or 0
    return wanted if wanted or _LOGPROBS in (fields.include or ()) else None


def _response_format(given: TextFormat) -> dict[str, Any] | None:
    """The format as chat completions say it."""
    if given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.json_schema is None:
        raise Refused("text.format.schema is missing", param="text.format.schema")
    named = {"name": given.name or "output", "schema": given.json_schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {key: value for key, value in named.items() if value is not None}}


def _response(fields: ResponsesRequest, conversation: Conversation) -> dict[str, Any]:
    """The object as it begins: what was asked for, and nothing of the answer."""
    text, reasoning = fields.text or TextConfig(), fields.reasoning or ReasoningConfig()
    text_format = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
    empty = {"parameters": None, "strict": None}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": conversation.chosen.name,
        "output": [],
        "parallel_tool_calls": conversation.parallel,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": text_format, "verbosity": text.verbosity or "medium"},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [{"type": "function"} | empty | tool["function"] for tool in conversation.tools],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(json_bytes(body), media_type="application/json")


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["OpenAI"]), ResponsesRoute(models, settings)
    one = "/v1/responses/resp_{number}"  # so that input_tokens is no response's id
    for path, endpoint, text in (
        ("/v1/responses", route.create, "A response"),
        ("/v1/responses/input_tokens", route.input_tokens, "How many tokens a request's input has"),
    ):
        body = json_body(ResponsesRequest)
        routes.add_api_route(
            path, endpoint, methods=["POST"], summary=text, openapi_extra=body, response_model=None
        )
    for path, endpoint, method, text in (
        (one, route.retrieve, "GET", "A response that is kept"),
        (one, route.delete, "DELETE", "Forgets a response"),
        (f"{one}/cancel", route.cancel, "POST", "Ends a response in the background"),
        (f"{one}/input_items", route.input_items, "GET", "What a response answers"),
    ):
        routes.add_api_route(path, endpoint, methods=[method], summary=text, response_model=None)
    return routes
