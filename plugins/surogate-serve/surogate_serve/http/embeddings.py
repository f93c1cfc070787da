"""`POST /v1/embeddings`: vectors of texts, made of a model's final hidden states as its files say, or by their mean."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from surogate_core.weights.embedding import Embedding, shaped

from ..engine.embedding import Embedder
from ..types import Refused
from .limits import Settings, clip
from .prompts import read_prompts
from .requests import ModelName, Strict, exchange_of, json_bytes, read, resolve
from .schema import json_body


class EmbeddingRequest(Strict):
    """A request for embeddings. input: a text, a list of texts, token ids, or a list of lists of token ids."""

    model: ModelName | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    """Which of the model's prompts comes before every text."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Cut what is longer to so many tokens; -1: to the context. Without it, what is too long is refused."""


class EmbeddingsRoute:
    """The route, over all models of a server."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def answer(self, request: Request) -> Response:
        limits, exchange = self._settings.limits, exchange_of(request)
        fields = read(request, EmbeddingRequest, self._settings)
        chosen = resolve(self._models, fields.model)
        if chosen.adapter is not None:
            base = chosen.model.name
            raise Refused(
                f"embeddings are made by models, not by adapters: name {base!r}", 501, "unsupported", "model"
            )
        about = chosen.model.vectors
        size = _size(fields.dimensions, about)
        given = _prompted(fields.input, about.embedding, fields.prompt_name)
        with_special, bytes_ = fields.add_special_tokens is not False, len(exchange.raw)
        prompts = await read_prompts(given, chosen.model.tokenizer, "input", limits.prompts, bytes_, with_special)
        ends = chosen.model.tokenizer.stop_token_ids
        prompts = [_fit(prompt, fields, about.longest, ends, index) for index, prompt in enumerate(prompts)]
        count = sum(map(len, prompts))
        if count > limits.embedding_tokens:
            raise Refused(
                f"the inputs have {count} tokens, and at most {limits.embedding_tokens} may come at once", param="input"
            )
        exchange.prompt_tokens = count
        vectors = np.asarray(await chosen.model.embed(prompts, fields.pooling), np.float32)
        if not np.isfinite(vectors).all():
            raise Refused("the model gave numbers that are not finite for these inputs", 500, "generation_failed")
        normalize = about.embedding.normalized if fields.normalize is None else fields.normalize
        vectors = shaped(vectors, size, normalize).astype("<f4", copy=False)
        as_text = fields.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(row) if as_text else row.tolist()}
            for index, row in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        body = {"object": "list", "data": data, "model": chosen.name, "usage": usage}
        return Response(json_bytes(body), media_type="application/json")


def _fit(prompt: list[int], fields: EmbeddingRequest, most: int, ends: Sequence[int], index: int) -> list[int]:
    """``prompt``, cut where that is asked for; a token of ``ends`` behind it stays, as a vector may be made of it."""
    cut = fields.truncate_prompt_tokens or 0
    kept = most if cut == -1 else min(cut, most)
    if cut and len(prompt) > kept:
        prompt = prompt[: kept - 1] + prompt[-1:] if prompt[-1] in ends else prompt[:kept]
    if len(prompt) > most:
        raise Refused(
            f"input {index} has {len(prompt)} tokens, and this model takes at most {most}", 400,
            "context_length_exceeded", "input", n_prompt_tokens=len(prompt), n_ctx=most,
        )  # fmt: skip
    return prompt


def _size(size: int | None, about: Embedder) -> int | None:
    """What vectors are to be cut to, None for nothing. Raises `Refused` for a size that the model does not have."""
    sizes, width = about.embedding.sizes, about.width
    if size is None or size == width:
        return None
    if size > width or (sizes and size not in sizes):
        known = ", ".join(map(str, sizes)) if sizes else f"1 to {width}"
        raise Refused(f"this model's vectors have no {size} dimensions; they have {known}", param="dimensions")
    return size


def _prompted(given: Any, embedding: Embedding, name: str | None) -> Any:
    """``given``, its texts with the model's prompt of this name before them, or with the one that is always meant. Token
    ids are as they are to be; with a name they are refused."""
    if name is None and embedding.default_prompt is None:
        return given
    if name is not None and name not in embedding.prompts:
        known = ", ".join(embedding.prompts) or "none"
        raise Refused(f"this model has no prompt {clip(name)!r}; it has: {known}", param="prompt_name")
    prompt = embedding.prompts[name or embedding.default_prompt]
    if isinstance(given, str):
        return prompt + given
    if not isinstance(given, list):
        return given
    if name is not None and not all(isinstance(each, str) for each in given):
        raise Refused("a prompt goes before texts, and some of these inputs are token ids", param="prompt_name")
    return [prompt + each if isinstance(each, str) else each for each in given]


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
