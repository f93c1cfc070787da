"""Types of configuration values that need more than a Python type: counts or fractions, sizes in bytes, name lists."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class ConfigModel(BaseModel):
    """Base of every configuration object: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BYTES = re.compile(r"(?P<number>[0-9][0-9_]*(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(value: Any) -> Any:
    """Turns "1.2GiB" into bytes (an int); leaves ints and "auto" alone. Raises `ValueError` for what has no meaning."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no size: write a number of bytes, a size such as 1.2GiB, or auto")
    factor = _UNITS.get((match["unit"] or "b").lower())
    if factor is None:
        raise ValueError(f"{match['unit']!r} is no unit of size: there are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(float(match["number"].replace("_", "")) * factor)


def parse_count_or_fraction(value: Any) -> Any:
    """Keeps integers (a count) and fractions below 1; turns 100.0 into 100; refuses 1.0, which could be either."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number: write an integer (a count), a fraction below 1, or 0 for none")
    if value < 0:
        raise ValueError(f"{value} is negative: write 0 for none")
    if isinstance(value, int) or value < 1:
        return value
    if value == 1:
        raise ValueError("1.0 could mean one or all: write 1 for one, or a fraction below 1")
    if value != int(value):
        raise ValueError(f"{value} is neither an integer nor a fraction below 1")
    return int(value)


def parse_names(value: Any) -> Any:
    """Turns "a, b" into ["a", "b"]; leaves lists alone."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def parse_trackers(value: Any) -> Any:
    """Turns "none", "off", "no" and false into an empty list, and "a, b" into ["a", "b"]."""
    if value is False or (isinstance(value, str) and value.lower() in ("none", "off", "no", "false", "")):
        return []
    return parse_names(value)


def parse_targets(value: Any) -> Any:
    """Turns the usual spellings of "every linear layer" into ["all"], and "a, b" into ["a", "b"]."""
    names = parse_names(value)
    if isinstance(names, list):
        return ["all" if name in ("all-linear", "all_linear") else name for name in names]
    return names


def parse_resume(value: Any) -> Any:
    """Turns true into "auto"; leaves false and paths alone."""
    return "auto" if value is True else value


_COUNT_OR_FRACTION = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]
}
_BYTES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^(auto|[0-9][0-9_]*(\.[0-9]+)?\s*([kKmMgGtT]?[bB]|[kKmMgGtT]i[bB])?)$"},
    ]
}
_NAMES_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}

CountOrFraction = Annotated[
    int | float, BeforeValidator(parse_count_or_fraction), WithJsonSchema(_COUNT_OR_FRACTION)
]
ByteSize = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(parse_bytes), WithJsonSchema(_BYTES_SCHEMA)
]
Targets = Annotated[
    list[str], Field(min_length=1), BeforeValidator(parse_targets), WithJsonSchema(_NAMES_SCHEMA)
]
Trackers = Annotated[list[str], BeforeValidator(parse_trackers), WithJsonSchema(_NAMES_SCHEMA)]
Resume = Annotated[str | Literal[False], BeforeValidator(parse_resume)]
