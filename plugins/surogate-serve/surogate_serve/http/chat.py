"""`POST /v1/chat/completions`: what a request may say, and how it becomes a prompt and a generation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .chat_messages import Message, template_messages
from .chat_reply import ChatReply
from .conversation import Conversation, ask
from .limits import Settings
from .log import fresh_id
from .logprobs import TokenTexts
from .requests import Chosen, GenerationFields, Strict, exchange_of, json_bytes, read, resolve
from .schema import json_body
from .sse import EventStream

_RESERVED = frozenset({
    "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "template", "tokenizer", "self",
})  # fmt: skip
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ToolFunction(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: str
    function: ToolFunction | None = None


class ChatRequest(GenerationFields):
    """A request for chat completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None


class ChatRoute:
    """The route, over all models of a server."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._texts = {name: TokenTexts(model.tokenizer) for name, model in models.items()}

    async def answer(self, request: Request) -> Response:
        settings, exchange = self._settings, exchange_of(request)
        fields = read(request, ChatRequest, settings)
        _check_supported(fields)
        conversation = _conversation(request, fields, resolve(self._models, fields.model))
        asked = await ask(conversation, settings)
        reply = ChatReply(
            id=f"chatcmpl-{fresh_id()}",
            model=conversation.chosen.name,
            created=int(time.time()),
            choices=fields.choices,
            texts=self._texts[conversation.chosen.model.name] if fields.logprobs else None,
            named_tool=isinstance(asked.tool_choice, dict),
            reasoning=fields.include_reasoning is not False,
            include_usage=fields.include_usage,
        )
        if fields.stream:
            return EventStream(partial(reply.stream, asked.read), reply.ending, settings.limits, exchange)
        return Response(json_bytes(await reply.whole(asked.read)), media_type="application/json")


def _conversation(request: Request, fields: ChatRequest, chosen: Chosen) -> Conversation:
    effort, wanted = fields.reasoning_effort, fields.max_completion_tokens
    variables = dict(fields.chat_template_kwargs or {})
    if fields.add_generation_prompt is not None:
        variables["add_generation_prompt"] = fields.add_generation_prompt
    return Conversation(
        chosen,
        template_messages(fields.messages),
        fields,
        fields.max_tokens if wanted is None else wanted,
        tools=_tools_of(fields),
        tool_choice=fields.tool_choice,
        parallel=fields.parallel_tool_calls is not False,
        thinking=None if effort is None else effort != "none",
        effort=effort,
        budget=fields.thinking_token_budget,
        budget_counts=True,
        response_format=fields.response_format,
        variables=variables,
        prefilled=bool(fields.continue_final_message),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        size=len(exchange_of(request).raw),
    )


def _check_supported(fields: ChatRequest) -> None:
    if fields.top_logprobs and not fields.logprobs:
        raise Refused("top_logprobs needs logprobs to be true", param="top_logprobs")
    if fields.return_token_ids:
        raise Refused("token ids are only returned by /v1/completions", 501, "unsupported", "return_token_ids")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise Refused(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if fields.continue_final_message and fields.messages[-1].role != "assistant":
        raise Refused("continue_final_message needs a last message of the assistant", param="continue_final_message")
    for name in fields.chat_template_kwargs or ():
        if name in _RESERVED or not name.isidentifier():
            raise Refused(f"chat_template_kwargs may not set {name[:64]!r}", param="chat_template_kwargs")


def _tools_of(fields: ChatRequest) -> list[dict[str, Any]]:
    tools = []
    for index, tool in enumerate(fields.tools or ()):
        if tool.type != "function":
            raise Refused(
                f"tools of type {tool.type[:64]!r} are not supported", 501, "unsupported", f"tools[{index}].type"
            )
        if tool.function is None:
            raise Refused("a tool of type function needs `function`", param=f"tools[{index}].function")
        function = {key: value for key, value in tool.function.model_dump().items() if value is not None}
        tools.append({"type": "function", "function": function})
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise Refused("two tools have the same name", param="tools")
    return tools


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter()
    routes.add_api_route(
        "/v1/chat/completions", ChatRoute(models, settings).answer, methods=["POST"], tags=["OpenAI"],
        summary="An answer to a conversation", openapi_extra=json_body(ChatRequest), response_model=None,
    )  # fmt: skip
    return routes
