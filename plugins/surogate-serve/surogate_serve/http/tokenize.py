"""`POST /tokenize` and `/detokenize`: what a model makes of a text, and of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .chat_messages import Message, template_messages
from .limits import Settings
from .prompts import prompts_of
from .requests import ModelName, Strict, json_bytes, read, resolve
from .schema import json_body


class OfModel(Strict):
    """model: may be left out where there is one."""

    model: ModelName | None = None


class TokenizeRequest(OfModel):
    """Either prompt (content is another name for it) or messages."""

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(OfModel):
    tokens: Any


class TokenizeRoute:
    """The two routes."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def tokenize(self, request: Request) -> Response:
        fields = read(request, TokenizeRequest, self._settings)
        model = resolve(self._models, fields.model).model
        text = fields.prompt if fields.prompt is not None else fields.content
        if (text is None) == (fields.messages is None):
            raise Refused("either prompt or messages must be given", param="prompt")
        tokens = await asyncio.to_thread(_tokens, model, fields, text)
        body = {"count": len(tokens), "max_model_len": model.context, "tokens": list(tokens)}
        if fields.return_token_strs:
            body["token_strs"] = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
        return Response(json_bytes(body), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        fields = read(request, DetokenizeRequest, self._settings)
        model = resolve(self._models, fields.model).model
        tokens: list[int] = []
        if fields.tokens != []:
            if not isinstance(fields.tokens, list) or not isinstance(fields.tokens[0], int):
                raise Refused("tokens must be a list of token ids", param="tokens")
            (tokens,) = prompts_of(fields.tokens, model.tokenizer, "tokens", 1)
        text = await asyncio.to_thread(model.tokenizer.decode, tokens)
        return Response(json_bytes({"prompt": text, "content": text}), media_type="application/json")


def _tokens(model: Any, fields: TokenizeRequest, text: str | None) -> list[int]:
    if text is not None:
        special = fields.add_special_tokens is not False
        return model.tokenizer.encode(text, add_special_tokens=special, parse_special=fields.parse_special is not False)
    options = {} if fields.add_generation_prompt is None else {"add_generation_prompt": fields.add_generation_prompt}
    return model.render(template_messages(fields.messages or ()), tools=fields.tools or None, **options).tokens


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["Tokens"]), TokenizeRoute(models, settings)
    for path, endpoint, kind, text in (
        ("/tokenize", route.tokenize, TokenizeRequest, "Token ids of a text or a conversation"),
        ("/detokenize", route.detokenize, DetokenizeRequest, "The text of token ids"),
    ):
        routes.add_api_route(
            path, endpoint, methods=["POST"], summary=text, openapi_extra=json_body(kind), response_model=None
        )
    return routes
