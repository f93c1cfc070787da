"""Says what a failed validation found, in terms of the file: place, key, what was written, what would be right."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .tree import Mapping, nested_model, place_of

# Follows from another error: a default that depends on a key which is itself wrong.
_CONSEQUENCE = "default_factory_not_called"


def config_error(error: ValidationError, model: type[BaseModel], document: Mapping) -> ConfigError:
    """The validation's errors as one `ConfigError`, a line each."""
    by_key: dict[tuple[str | int, ...], list[dict[str, Any]]] = {}
    lines: list[str] = []
    for each in error.errors(include_url=False):
        if each["type"] == _CONSEQUENCE:
            continue
        if each["type"] == "together":
            lines += [_together(problem, document) for problem in each["ctx"]["problems"]]
            continue
        by_key.setdefault(_key_path(each["loc"], model), []).append(each)
    for path, found in by_key.items():
        where = place_of(document, path) or document.where.file
        lines.append(f"{where}: {_describe(path, found)}")
    return ConfigError("\n".join(lines))


def _together(problem: Any, document: Mapping) -> str:
    places = [place_of(document, (key,)) for key in problem.keys]
    known = list(dict.fromkeys(str(place) for place in places if place is not None))
    return f"{' and '.join(known) or document.where.file}: {problem.message}"


def _key_path(location: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str | int, ...]:
    """The part of pydantic's location that is keys: what follows names the alternatives of a union."""
    path: list[str | int] = []
    inner: type[BaseModel] | None = model
    for step in location:
        if isinstance(step, int):
            path.append(step)
        elif inner is not None and step in inner.model_fields:
            path.append(step)
            inner = nested_model(inner.model_fields[step].annotation)
        else:
            break
    return tuple(path)


def _describe(path: tuple[str | int, ...], errors: list[dict[str, Any]]) -> str:
    key = ".".join(str(step) for step in path)
    first = errors[0]
    if first["type"] == "missing":
        return f"`{key}` is missing"
    if first["type"] == "literal_error" and len(errors) == 1:
        options = [option.strip(" '") for option in first["ctx"]["expected"].replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(str(first["input"]).lower(), options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"`{key}`: {first['input']!r} is not one of {', '.join(options)}{hint}"
    reasons = list(dict.fromkeys(_reason(each) for each in errors))
    return f"`{key}`: {', or '.join(reasons)} (it says {_short(first['input'])})"


def _reason(error: dict[str, Any]) -> str:
    text = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return text.split(", unable to parse")[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
