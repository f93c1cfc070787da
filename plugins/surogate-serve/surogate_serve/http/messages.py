"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .conversation import Conversation, ask, prompt_of
from .limits import Settings
from .log import fresh_id
from .messages_input import Block, InputMessage, InputTool, InputToolChoice, template_messages, tool_choice_of, tools_of
from .messages_stream import MessageReply
from .requests import GenerationFields, ModelName, Strict, exchange_of, json_bytes, read, resolve
from .schema import json_body
from .sse import EventStream

_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Names of chat completions, and what Anthropic calls the same."""


class ThinkingConfig(Strict):
    """Budgets below 1024 tokens, which Anthropic refuses, are of use to small models."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    output_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """A conversation whose tokens are counted."""

    model: ModelName | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=65536)]
    system: str | list[Block] | None = None
    tools: Annotated[list[InputTool], Field(max_length=1024)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """A request for a message. max_tokens 0 reads the prompt into the cache and answers nothing."""

    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: dict[str, Any] | None = None


class MessagesRoute:
    """The two routes, over all models of a server."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def answer(self, request: Request) -> Response:
        settings, exchange = self._settings, exchange_of(request)
        fields = read(request, MessagesRequest, settings)
        conversation = self._conversation(request, fields)
        asked = await ask(conversation, settings)
        reply = MessageReply(
            asked,
            id=f"msg_{fresh_id()}",
            model=conversation.chosen.name,
            request_id=exchange.request_id,
            thinking=bool(conversation.thinking),
            thinking_shown=fields.thinking is None or fields.thinking.display != "omitted",
        )
        if fields.stream:
            return EventStream(reply.stream, reply.ending, settings.limits, exchange)
        return Response(json_bytes(await reply.whole()), media_type="application/json")

    async def count(self, request: Request) -> Response:
        fields = read(request, CountRequest, self._settings)
        prompt = await prompt_of(self._conversation(request, fields), self._settings)
        return Response(json_bytes({"input_tokens": len(prompt.tokens)}), media_type="application/json")

    def _conversation(self, request: Request, fields: CountRequest) -> Conversation:
        chosen = resolve(self._models, fields.model)
        thinking = _thinks(fields)
        prefilled = fields.messages[-1].role == "assistant"
        if prefilled:
            _check_prefill(fields, thinking)
        output, choice = fields.output_config or OutputConfig(), fields.tool_choice
        sampled = fields if isinstance(fields, MessagesRequest) else None
        return Conversation(
            chosen,
            template_messages(fields.system, fields.messages),
            _generation_fields(fields),
            None if sampled is None else sampled.max_tokens,
            tools=tools_of(fields.tools or ()),
            tool_choice=tool_choice_of(choice),
            parallel=choice is None or not choice.disable_parallel_tool_use,
            thinking=thinking,
            effort=output.effort,
            budget=_budget(fields, sampled) if thinking else None,
            response_format=None if output.format is None else _response_format(output.format),
            prefilled=prefilled,
            size=len(exchange_of(request).raw),
            names=_NAMES,
        )


def _thinks(fields: CountRequest) -> bool:
    """Off where nothing is said. Between tools: in answers to their results."""
    kind = "disabled" if fields.thinking is None else fields.thinking.type
    if kind == "between_tools":
        content = fields.messages[-1].content
        return isinstance(content, list) and any(block.type == "tool_result" for block in content)
    return kind != "disabled"


def _check_prefill(fields: CountRequest, thinking: bool) -> None:
    content = fields.messages[-1].content
    path = f"messages[{len(fields.messages) - 1}].content"
    if isinstance(content, list) and any(block.type != "text" for block in content):
        raise Refused("a last message of the assistant is gone on with, and may hold only text", param=path)
    if thinking:
        raise Refused("a last message of the assistant cannot be gone on with while thinking is on", param=path)


def _budget(fields: CountRequest, sampled: MessagesRequest | None) -> int | None:
    assert fields.thinking is not None
    budget = fields.thinking.budget_tokens
    if fields.thinking.type != "enabled":
        return None
    if budget is None:
        raise Refused("thinking.budget_tokens is missing", param="thinking.budget_tokens")
    if sampled is not None and budget >= sampled.max_tokens:
        raise Refused("thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens")
    return budget


def _response_format(output_format: OutputFormat) -> dict[str, Any]:
    schema = {"name": "output", "schema": output_format.output_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _generation_fields(fields: CountRequest) -> GenerationFields:
    if not isinstance(fields, MessagesRequest):
        return GenerationFields.model_construct()
    return GenerationFields.model_construct(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
    )


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["Anthropic"]), MessagesRoute(models, settings)
    routes.add_api_route(
        "/v1/messages", route.answer, methods=["POST"], summary="An answer to a conversation",
        openapi_extra=json_body(MessagesRequest), response_model=None,
    )  # fmt: skip
    routes.add_api_route(
        "/v1/messages/count_tokens", route.count, methods=["POST"], summary="How many tokens a conversation has",
        openapi_extra=json_body(CountRequest), response_model=None,
    )  # fmt: skip
    return routes
