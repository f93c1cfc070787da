"""The document tree that a configuration is read into: values with the place they came from.

YAML decides a scalar's type from its looks (`1e-4` is a string, `off` is false, `010` is eight). Here a plain scalar
keeps its text, and `settle` gives it the type that the schema's field has.
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Where:
    """A place: `file` (or the override that it came from) and its line, counted from 1 (0: the source has no lines)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass
class Scalar:
    """One value as written. `plain`: without quotes, so that its looks may decide its type."""

    text: str
    plain: bool
    where: Where

    @property
    def is_null(self) -> bool:
        """Whether it stands for nothing: empty, `~` or `null`, without quotes."""
        return self.plain and self.text in _NULL

    @property
    def value(self) -> None | bool | int | float | str:
        """What it looks like: null, bool, decimal int, float, or else the text. Quoted text is always text."""
        if not self.plain:
            return self.text
        if self.is_null:
            return None
        lowered = self.text.lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        if _INTEGER.fullmatch(self.text):
            return int(self.text)
        if _FLOAT.fullmatch(self.text):
            return float(self.text)
        return self.text


@dataclass
class Entry:
    """One key of a mapping: the key as it was spelled, the place of that, and the value."""

    spelled: str
    where: Where
    node: Node


@dataclass
class Mapping:
    """Keys in the order of the file, each once."""

    where: Where
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass
class Sequence:
    """A list."""

    where: Where
    items: list[Node] = field(default_factory=list)


Node = Union[Scalar, Mapping, Sequence]


def plain_value(node: Node) -> Any:
    """The node as ordinary Python values, each typed by its looks. For the parts that no schema describes."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain_value(item) for item in node.items]
    return {key: plain_value(entry.node) for key, entry in node.entries.items()}


def shown(node: Node) -> str:
    """The value in a message: short, on one line."""
    text = node.text if isinstance(node, Scalar) else str(plain_value(node))
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type, with `Annotated` and unions taken apart."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [each for argument in typing.get_args(annotation) for each in members(argument)]
    return [annotation]


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, directly or as the items of a list; None where it holds none."""
    for each in members(annotation):
        if typing.get_origin(each) is list:
            return nested_model(typing.get_args(each)[0])
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def is_nullable(annotation: Any) -> bool:
    """Whether the field takes null."""
    return type(None) in members(annotation)


def settle(node: Node, annotation: Any) -> Any:
    """The node as the Python value that a field of type `annotation` is validated from.

    Text fields get the text as written (`run_name: 007` stays "007", `off` stays "off"); numbers get a number where it
    looks like one and else the text, so that the error shows what was written; `Any` is typed by its looks. Empty
    values of fields that take no null must have been left out before.
    """
    kinds = members(annotation)
    if isinstance(node, Scalar):
        return _settle_scalar(node, kinds)
    if isinstance(node, Sequence):
        inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is list), Any)
        return [settle(item, inner) for item in node.items]
    model = nested_model(annotation)
    if model is not None:
        return settle_model(node, model)
    inner = next((typing.get_args(kind)[1] for kind in kinds if typing.get_origin(kind) is dict), Any)
    return {key: settle(entry.node, inner) for key, entry in node.entries.items()}


def _settle_scalar(node: Scalar, kinds: list[Any]) -> Any:
    if node.is_null and type(None) in kinds:
        return None
    if Any in kinds:
        return node.value
    looks = node.value
    numeric = any(kind in (int, float) for kind in kinds)
    if numeric and isinstance(looks, (int, float)) and not isinstance(looks, bool):
        return looks
    literals = [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    switch = bool in kinds or False in literals
    if switch and isinstance(looks, bool):
        return looks
    return node.text


def settle_model(node: Mapping, model: type[BaseModel]) -> dict[str, Any]:
    """The mapping as keyword arguments of `model`, empty keys left to their defaults. Unknown keys must be gone."""
    values: dict[str, Any] = {}
    for key, entry in node.entries.items():
        annotation = field_annotation(model, key)
        if isinstance(entry.node, Scalar) and entry.node.is_null and not is_nullable(annotation):
            continue
        values[key] = settle(entry.node, annotation)
    return values


def field_annotation(model: type[BaseModel], key: str) -> Any:
    """The declared type of a field."""
    return model.model_fields[key].annotation


def place_of(node: Node, path: tuple[str | int, ...]) -> Where | None:
    """Where the value at `path` was written, or the nearest thing around it; None for what nobody wrote."""
    where: Where | None = None
    for step in path:
        if isinstance(node, Mapping) and step in node.entries:
            where, node = node.entries[step].where, node.entries[step].node
        elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            where = node.where
        else:
            break
    return where
