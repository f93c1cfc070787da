"""`POST /v1/completions`: texts and token ids continued as they are, without a template or a parser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Delta, Generation, Prompt, Refused
from .completions_reply import CompletionReply, Continued
from .constraints import Wanted, grammar_of
from .limits import Settings
from .log import fresh_id
from .logprobs import TokenTexts
from .prompts import read_prompts
from .requests import (
    Chosen,
    GenerationFields,
    exchange_of,
    generation_of,
    json_bytes,
    read,
    resolve,
    room,
)
from .schema import json_body
from .sse import EventStream

DEFAULT_TOKENS = 16


class CompletionRequest(GenerationFields):
    """A request for completions. prompt: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionsRoute:
    """The route, over all models of a server."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._texts = {name: TokenTexts(model.tokenizer) for name, model in models.items()}

    async def answer(self, request: Request) -> Response:
        exchange, limits = exchange_of(request), self._settings.limits
        fields = read(request, CompletionRequest, self._settings)
        chosen = resolve(self._models, fields.model)
        _check_supported(fields)
        tokenizer = chosen.model.tokenizer
        with_special = fields.add_special_tokens is not False
        size = len(exchange.raw)
        prompts = await read_prompts(fields.prompt, tokenizer, "prompt", limits.prompts, size, with_special)
        if len(prompts) * (fields.best_of or fields.choices) > limits.queued:
            raise Refused(f"prompts times n (or best_of) may be {limits.queued} at most", param="prompt")
        wanted = DEFAULT_TOKENS if fields.max_tokens is None else fields.max_tokens
        rooms = [room(chosen.model, prompt, wanted, "prompt") for prompt in prompts]
        form = Wanted(fields.response_format, fields.structured_outputs)
        grammar = await grammar_of(chosen.model, None, Prompt(()), form)
        generations = [
            self._generation(fields, chosen, prompt, tokens, grammar)
            for prompt, tokens in zip(prompts, rooms, strict=True)
        ]
        reply = CompletionReply(
            id=f"cmpl-{fresh_id()}",
            model=chosen.name,
            created=int(time.time()),
            prompts=[self._continued(fields, chosen, prompt, tokenizer) for prompt in prompts],
            keep=fields.choices,
            logprobs=fields.logprobs is not None,
            include_usage=fields.include_usage,
            token_ids=bool(fields.return_token_ids),
            no_tokens=wanted == 0,
        )
        if not reply.needs_engine:
            exchange.prompt_tokens, exchange.finish = sum(map(len, prompts)), ["length"] * fields.choices * len(prompts)
        read_deltas = partial(read_all, chosen.model, generations if reply.needs_engine else [])
        if fields.stream:
            return EventStream(partial(reply.stream, read_deltas), reply.ending, limits, exchange)
        return Response(json_bytes(await reply.whole(read_deltas)), media_type="application/json")

    def _generation(
        self, fields: CompletionRequest, chosen: Chosen, prompt: Sequence[int], tokens: int, grammar: Any
    ) -> Generation:
        best_of = fields.best_of or fields.choices
        ranked = best_of > fields.choices
        return generation_of(
            fields, chosen, prompt, tokens, self._settings.limits,
            logprobs=0 if ranked and fields.logprobs is None else fields.logprobs,
            prompt_logprobs=bool(fields.echo) and fields.logprobs is not None, grammar=grammar,
            n=best_of,
        )  # fmt: skip

    def _continued(self, fields: CompletionRequest, chosen: Chosen, prompt: list[int], tokenizer: Any) -> Continued:
        texts = self._texts[chosen.model.name]
        text = tokenizer.decode(prompt) if fields.echo and not isinstance(fields.prompt, str) else ""
        if fields.echo and isinstance(fields.prompt, str):
            text = fields.prompt
        return Continued(prompt, text, bool(fields.echo), fields.best_of or fields.choices, texts)


def _check_supported(fields: CompletionRequest) -> None:
    if fields.suffix:
        raise Refused("this server does not fill in before a suffix", 501, "unsupported", "suffix")
    if fields.best_of is not None and fields.best_of < fields.choices:
        raise Refused("best_of must be at least n", param="best_of")
    if fields.best_of is not None and fields.best_of > fields.choices and fields.stream:
        raise Refused("a stream cannot tell the best of several: best_of must be n", param="best_of")


async def read_all(
    model: Any, generations: Sequence[Generation], take: Callable[[int, list[Delta]], None]
) -> None:
    """Gives the deltas of several requests to ``take``, each with its request's place. Cancelling it cancels all; what one
    raises ends them all."""
    reads = [model.read(generation, partial(take, place)) for place, generation in enumerate(generations)]
    if len(reads) == 1:
        await reads[0]
        return
    tasks = [asyncio.create_task(each) for each in reads]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter(tags=["OpenAI"])
    routes.add_api_route(
        "/v1/completions", CompletionsRoute(models, settings).answer, methods=["POST"],
        summary="Texts continued", openapi_extra=json_body(CompletionRequest), response_model=None,
    )  # fmt: skip
    return routes
