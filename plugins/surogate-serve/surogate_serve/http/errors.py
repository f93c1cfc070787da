"""Errors in each API's own shape. Whatever goes wrong is a `Refused` first; its status decides the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from ..types import Refused
from .limits import clip

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Anthropic has no status for what a server cannot do, and one of its own for a server that is full.
ANTHROPIC_STATUS = {501: 400, 503: 529}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, and so errors on it have that shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of an error as OpenAI's routes have it; also what a stream carries after its headers were sent."""
    error: dict[str, Any] = {
        "message": refused.message,
        "type": OPENAI_TYPES.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error"),
        "param": refused.param,
        "code": refused.code,
    }
    return {"error": error | refused.details}


def anthropic_error(refused: Refused, request_id: str) -> dict[str, Any]:
    """The body of an error, and of an `error` event, as Anthropic's routes have it."""
    status = ANTHROPIC_STATUS.get(refused.status, refused.status)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": request_id}


def error_answer(refused: Refused, path: str, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """(status, headers, body) that answer a request on ``path`` with an error. An error that would come again says so
    to the clients, which otherwise try again whatever is 500 and above."""
    headers = [(b"content-type", b"application/json")]
    if is_anthropic(path):
        status = ANTHROPIC_STATUS.get(refused.status, refused.status)
        body = anthropic_error(refused, request_id)
    else:
        status, body = refused.status, openai_error(refused)
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(refused.retry_after))).encode()))
    if refused.status in (500, 501):
        headers.append((b"x-should-retry", b"false"))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def from_validation(error: pydantic.ValidationError, given: Any) -> Refused:
    """The first of a model's complaints about ``given`` that lies deepest: of a union's members, the one that fits
    best."""
    found = max(
        error.errors(include_url=False, include_context=False, include_input=False), key=lambda e: len(e["loc"])
    )
    param = _param(found["loc"], given, found["type"] == "missing")
    name = param or "the body"
    message = found["msg"]
    message = message.removeprefix("Value error, ")
    return Refused(f"{name}: {clip(message)}", 400, None, param)


def _param(location: Sequence[int | str], given: Any, missing: bool) -> str | None:
    """A location as clients write it: messages[0].content. Pydantic mixes in names of union members, which ``given``
    does not have."""
    path = ""
    for index, step in enumerate(location):
        known = (isinstance(given, Mapping) and step in given) or (
            isinstance(given, list) and isinstance(step, int) and 0 <= step < len(given)
        )
        if not known and not (missing and index == len(location) - 1):
            continue
        path += f"[{step}]" if isinstance(step, int) else (f".{step}" if path else clip(step))
        given = given[step] if known else None
    return path or None


def unknown_model(name: str, models: Sequence[str]) -> Refused:
    return Refused(
        f"the model {clip(name)!r} does not exist; there are: {clip(', '.join(models))}",
        404,
        "model_not_found",
        "model",
    )
