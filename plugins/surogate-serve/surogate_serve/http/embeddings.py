"""`POST /v1/embeddings`: vectors of texts, pooled from a causal model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .limits import Settings
from .prompts import prompts_of
from .requests import ModelName, Strict, exchange_of, json_bytes, read, resolve
from .schema import json_body


class EmbeddingRequest(Strict):
    """A request for embeddings. input: a text, a list of texts, token ids, or a list of lists of token ids."""

    model: ModelName | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Cut what is longer to so many tokens; -1: to the context. Without it, what is too long is refused."""


class EmbeddingsRoute:
    """The route, over all models of a server."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def answer(self, request: Request) -> Response:
        limits, exchange = self._settings.limits, exchange_of(request)
        fields = await read(request, EmbeddingRequest, self._settings)
        chosen = resolve(self._models, fields.model)
        if chosen.adapter is not None:
            raise Refused("embeddings are made by models, not by adapters", 501, "unsupported", "model")
        prompts = await asyncio.to_thread(
            prompts_of, fields.input, chosen.model.tokenizer, "input", limits.prompts,
            add_special_tokens=fields.add_special_tokens is not False,
        )  # fmt: skip
        prompts = [_fit(prompt, fields, chosen.model, index) for index, prompt in enumerate(prompts)]
        count = sum(map(len, prompts))
        if count > limits.embedding_tokens:
            raise Refused(
                f"the inputs have {count} tokens, and at most {limits.embedding_tokens} may come at once", param="input"
            )
        exchange.prompt_tokens = count
        vectors = np.asarray(await chosen.model.embed(prompts, fields.pooling or "mean"), "<f4")
        vectors = _shaped(vectors, fields)
        as_text = fields.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(row) if as_text else row.tolist()}
            for index, row in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        body = {"object": "list", "data": data, "model": chosen.name, "usage": usage}
        return Response(json_bytes(body), media_type="application/json")


def _fit(prompt: list[int], fields: EmbeddingRequest, model: Any, index: int) -> list[int]:
    cut = fields.truncate_prompt_tokens
    if cut is not None and cut != 0:
        prompt = prompt[: model.context if cut == -1 else min(cut, model.context)]
    if len(prompt) > model.context:
        raise Refused(
            f"input {index} has {len(prompt)} tokens, and this model's context has {model.context}", 400,
            "context_length_exceeded", "input", n_prompt_tokens=len(prompt), n_ctx=model.context,
        )  # fmt: skip
    return prompt


def _shaped(vectors: np.ndarray, fields: EmbeddingRequest) -> np.ndarray:
    """Cut to the dimensions that were asked for, and of length 1 unless that is not wanted. vectors: f32 [n, d]."""
    if not np.isfinite(vectors).all():
        raise Refused("the model gave numbers that are not finite for these inputs", 500, "generation_failed")
    if fields.dimensions is not None:
        if fields.dimensions > vectors.shape[1]:
            raise Refused(f"this model's embeddings have {vectors.shape[1]} dimensions", param="dimensions")
        vectors = vectors[:, : fields.dimensions]
    if fields.normalize is not False:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return np.ascontiguousarray(vectors, "<f4")


def _base64(row: np.ndarray) -> str:
    """Little-endian f32."""
    return base64.b64encode(row.tobytes()).decode("ascii")


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter(tags=["OpenAI"])
    routes.add_api_route(
        "/v1/embeddings", EmbeddingsRoute(models, settings).answer, methods=["POST"],
        summary="Vectors of texts", openapi_extra=json_body(EmbeddingRequest), response_model=None,
    )  # fmt: skip
    return routes
