"""What the generating routes of OpenAI's API share: the fields of a request, the model that it names, and the
`Generation` that comes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple, TypeVar

import pydantic
from pydantic import ConfigDict, Field
from starlette.requests import Request

from ..types import Generation, Refused, Sampling
from .errors import from_validation, unknown_model
from .limits import Limits, Settings, parse_json
from .log import Exchange

FINGERPRINT = f"surogate-{version('surogate-serve')}"
"""What `system_fingerprint` says: with the same one, and the same model and options, a seed gives the same text."""
_SEED_LIMIT = 1 << 64
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Strict(pydantic.BaseModel):
    """A part of a request: types are not converted, and what is not known is left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


ModelName = Annotated[str, Field(min_length=1, max_length=4096)]
Text256 = Annotated[str, Field(max_length=256)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class GenerationFields(Strict):
    """Fields of chat, completions and responses; None as if it was not given."""

    model: ModelName | None = None
    """May be left out where one is served."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=_SEED_LIMIT)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # What other servers of open models have beside OpenAI's fields.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Text256 | None = None
    structured_outputs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _options_fit(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


Fields = TypeVar("Fields", bound=pydantic.BaseModel)


def exchange_of(request: Request) -> Exchange:
    """The record of this request that the guard keeps."""
    return request.scope["surogate"]


def read(request: Request, kind: type[Fields], settings: Settings) -> Fields:
    """The request's body as ``kind``. Raises `Refused` (400) that names the field which does not fit."""
    exchange = exchange_of(request)
    exchange.route = exchange.path
    given = parse_json(exchange.raw, settings.limits)
    if settings.log_prompts:
        exchange.body = given
    name = given.get("model")
    exchange.model = name[:256] if isinstance(name, str) else None
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise from_validation(error, given) from None
    except RecursionError:
        raise Refused("the body nests too deep", 400, "invalid_json") from None


class Chosen(NamedTuple):
    """The model that a request names. adapter: None for the base. name: as it was asked for, which answers repeat."""

    name: str
    model: Any
    adapter: str | None


def resolve(models: Mapping[str, Any], name: str | None) -> Chosen:
    """A model by its name, or an adapter by its own or as "model:adapter"; None: the one that is served. Raises
    `Refused`."""
    if name is None:
        main = [each for model in models.values() for each in model.main]
        if len(main) != 1:
            raise Refused("this server has several models: name one", param="model")
        (name,) = main
    if name in models:
        return Chosen(name, models[name], None)
    for model in models.values():
        if name in model.adapters:
            return Chosen(name, model, name)
    base, _, adapter = name.rpartition(":")
    if base in models and adapter in models[base].adapters:
        return Chosen(name, models[base], adapter)
    raise unknown_model(name, model_names(models))


def model_names(models: Mapping[str, Any]) -> list[str]:
    """All that `resolve` finds, of each model first what it was served for."""
    return [name for model in models.values() for name in model.names]


def parser_of(model: Any, settings: Settings) -> Any:
    """The parser that answers of this model are read with."""
    return model.parser if settings.parser is None else _parser_named(model, settings.parser)


@lru_cache(maxsize=64)
def _parser_named(model: Any, name: str) -> Any:
    """Made once: its tables are as large as the format."""
    return model.parser_named(name)


def stop_strings(stop: str | Sequence[str] | None, limits: Limits) -> tuple[str, ...]:
    """Raises `Refused` where there are too many, or one is empty."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > limits.stop_strings:
        raise Refused(f"at most {limits.stop_strings} stop strings may be given, not {len(strings)}", param="stop")
    if any(len(each) > limits.stop_characters for each in strings):
        raise Refused(f"a stop string may have at most {limits.stop_characters} characters", param="stop")
    return tuple(each for each in strings if each)


def sampling_of(fields: GenerationFields, vocab_size: int) -> Sampling:
    """Raises `Refused` for biases of tokens that there are none of."""
    bias: dict[int, float] = {}
    for key, value in (fields.logit_bias or {}).items():
        digits = key if len(key) <= 10 and key.isascii() and key.isdigit() else ""
        if not digits or int(digits) >= vocab_size:
            raise Refused(
                f"the keys of logit_bias are token ids from 0 to {vocab_size - 1}, not {key[:40]!r}", param="logit_bias"
            )
        bias[int(digits)] = float(value)
    given = {
        "temperature": fields.temperature,
        # 0 would keep nothing; the smallest share keeps the likeliest token.
        "top_p": None if fields.top_p is None else max(fields.top_p, 1e-6),
        "top_k": None if fields.top_k is None else min(max(fields.top_k, 0), vocab_size),
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "seed": None if fields.seed is None else fields.seed % _SEED_LIMIT,
    }
    return Sampling(logit_bias=bias, **{name: value for name, value in given.items() if value is not None})


def room(model: Any, prompt: Sequence[int], wanted: int | None, param: str) -> int:
    """How many tokens an answer may have: ``wanted``, cut to what the context leaves. Raises `Refused` where it leaves
    none."""
    left = model.context - len(prompt)
    if left < (0 if wanted == 0 else 1):
        raise Refused(
            f"the prompt has {len(prompt)} tokens; the context of {model.context} leaves no room for an answer",
            400,
            "context_length_exceeded",
            param,
            n_prompt_tokens=len(prompt),
            n_ctx=model.context,
        )
    return left if wanted is None else min(wanted, left)


def generation_of(
    fields: GenerationFields,
    chosen: Chosen,
    prompt: Sequence[int],
    max_tokens: int,
    limits: Limits,
    *,
    logprobs: int | None = None,
    **more: Any,
) -> Generation:
    """A request to the engine; ``more`` are fields of `Generation`."""
    vocab_size = chosen.model.tokenizer.vocab_size
    if any(token >= vocab_size for token in fields.stop_token_ids or ()):
        raise Refused(f"stop_token_ids must be below {vocab_size}", param="stop_token_ids")
    more.setdefault("n", fields.choices)
    return Generation(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling_of(fields, vocab_size),
        stop=stop_strings(fields.stop, limits),
        include_stop=bool(fields.include_stop_str_in_output),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        logprobs=logprobs,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        adapter=chosen.adapter,
        **more,
    )


def needed(value: Any, path: str, name: str) -> Any:
    """``value``, which is ``name`` of what lies at ``path``. Raises `Refused` where it is not there."""
    if value is None:
        raise Refused(f"{path}.{name} is missing", param=f"{path}.{name}")
    return value


def json_bytes(value: Any) -> bytes:
    """JSON without spaces, in ASCII."""
    return _ENCODER.encode(value).encode("ascii")
