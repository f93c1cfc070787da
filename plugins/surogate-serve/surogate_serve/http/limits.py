"""What the face allows: its settings, and the reading of a body as JSON within limits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pydantic_core

from ..types import Refused

MAX_ECHO = 200
"""Characters of a request that an error may repeat."""
_SHAPE, _LONG = bytes.maketrans(b"123456789E", b"000000000e"), b"0" * 300
"""What numbers look like, and one that has too many digits."""
APART_BYTES = 32768
"""Of a request from which on its prompt is made in a thread, so that everyone else's streams go on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. What exceeds one is refused with a status that says which."""

    body_bytes: int = 32 << 20
    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    """From a connection's first moment, or the end of the answer before, to the end of the next request's headers."""
    body_seconds: float = 30.0
    """For the whole body: a client that dribbles is answered 408."""
    send_seconds: float = 60.0
    """A client that reads nothing for so long is let go, and what it asked for is cancelled."""
    json_depth: int = 64
    connections: int = 16384
    queued: int = 1024
    """Choices that wait for a first token or run, of one model; more are answered 429."""
    queue_seconds: float = 120.0
    """A request that waited so long for its turn is answered 503."""
    keep_alive_seconds: float = 15.0
    """After so long without an event, a stream carries a comment."""
    drain_seconds: float = 30.0
    """For what runs when the process is asked to end."""
    choices: int = 128
    prompts: int = 1024
    stop_strings: int = 16
    stop_characters: int = 4096
    embedding_tokens: int = 1 << 20
    """Tokens of one request for embeddings, over all its inputs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the face is set up. Without ``api_keys`` everybody may ask; without ``admin_keys`` nobody administers."""

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call this server by, without a port; none: any."""
    limits: Limits = field(default_factory=Limits)
    request_log: Path | None = None
    log_prompts: bool = False
    parser: str | None = None
    """The parser of answers by name; None for the one that fits the model's template."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {clip(text)} is too large")
    return number


def clip(text: str) -> str:
    """``text``, shortened to what an error may repeat."""
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 3] + "..."


def parse_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """The object that ``body`` holds. Raises `Refused` (400) for what is no JSON object, lies too deep, or has strings
    with NUL or lone surrogates, which no tokenizer takes."""
    try:
        value = _load(body)
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: byte {error.start} does not fit", 400, "invalid_utf8") from None
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise Refused(f"the body is not valid JSON: {clip(str(error))}", 400, "invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(f"the body must be a JSON object, not {_kind(value)}", 400, "invalid_json")
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        _check_depth(value, limits)
    # Only an escape can bring what UTF-8 cannot, but for a NUL itself, which the reader of JSON refuses.
    if b"\\" in body and (b"\\u0000" in body or b"\\ud" in body or b"\\uD" in body):
        _check_text(value, "")
    return value


def _load(body: bytes) -> Any:
    """By the reader that is three times as fast, where it takes the body and cannot have made an infinity of a number;
    else by the one that says exactly what is wrong. Raises ValueError, RecursionError."""
    shape = body.translate(_SHAPE)
    if b"e000" not in shape and b"e+000" not in shape and _LONG not in shape:
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError:
            pass
    return json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)


def _too_deep(limits: Limits) -> Refused:
    return Refused(f"the body nests more than {limits.json_depth} levels", 400, "invalid_json")


def _check_depth(value: Any, limits: Limits) -> None:
    level = [value]
    for _ in range(limits.json_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(limits)


def _check_text(value: Any, path: str) -> None:
    """Depth is checked before, so that this may recurse."""
    if isinstance(value, str):
        if "\0" in value:
            raise Refused(f"{path or 'the body'} holds a NUL character", 400, "invalid_text", path or None)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refused(
                f"{path or 'the body'} holds half of a surrogate pair, which is no text",
                400,
                "invalid_text",
                path or None,
            ) from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, path)
            _check_text(inner, f"{path}.{clip(key)}" if path else clip(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_text(inner, f"{path}[{index}]")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), type(value).__name__)
