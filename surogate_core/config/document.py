"""Writes what is generated from the models: docs/schema/train.json and the tables in docs/config.md.

    python -m surogate_core.config.document [docs folder]
"""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..errors import ConfigError
from ..files import write_text
from .aliases import CONVERTED, DATASET_RENAMED, DECIDED, NESTED, REFUSED, RENAMED, RESPELLED, Meaning, Refusal
from .dataset import DatasetConfig
from .fields import ByteSize, CountOrFraction
from .train import SECTIONS, TrainConfig
from .tree import members

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"

_COUNT_OR_FRACTION = typing.get_args(CountOrFraction)[0]
_BYTE_SIZE = typing.get_args(ByteSize)[0]
_WORDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "empty"}


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors: our own spellings, a data set also as a mere path."""
    result = TrainConfig.model_json_schema()
    item = {"anyOf": [{"$ref": "#/$defs/DatasetConfig"}, {"type": "string"}]}
    for key in ("datasets", "validation_datasets"):
        described = result["properties"][key]
        described.pop("type")
        described.pop("minItems", None)
        described["anyOf"] = [{"type": "array", "items": item}, *item["anyOf"]]
        described.pop("items")
    described_default = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Surogate training run"}
    return described_default | {key: value for key, value in result.items() if key not in ("title", "description")}


def type_text(annotation: Any) -> str:
    """A field's type in words."""
    if annotation == _COUNT_OR_FRACTION:
        return "integer, or fraction below 1"
    if annotation == _BYTE_SIZE:
        return "bytes, size, or `auto`"
    return " or ".join(dict.fromkeys(_one_type(each) for each in members(annotation) if each is not type(None)))


def _one_type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in annotation.__args__)
    if origin is list:
        inner = annotation.__args__[0]
        return "list of data sets" if inner is DatasetConfig else f"list of {_one_type(inner)}s"
    if origin is dict or isinstance(annotation, types.GenericAlias):
        return "mapping"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_text(field: FieldInfo) -> str:
    """A field's default as it would be written; empty where it depends on others, as its description then says."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        if field.default_factory_takes_validated_data:
            return "derived"
        value = field.default_factory()  # type: ignore[call-arg]
    else:
        value = field.default
    assert value is not PydanticUndefined
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value).strip(chr(34))}`"


def key_table(model: type[BaseModel], keys: typing.Iterable[str]) -> str:
    """A Markdown table of fields."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        field = model.model_fields[key]
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{key}` | {type_text(field.annotation)} | {default_text(field)} | {meaning} |")
    return "\n".join(rows)


def alias_tables() -> str:
    """Markdown tables of the spellings of other tools."""
    ours: dict[str, list[str]] = {}
    for spelled, key in RENAMED.items():
        ours.setdefault(key, []).append(f"`{spelled}`")
    for group, keys in NESTED.items():
        for spelled, key in keys.items():
            ours.setdefault(key, []).append(f"`{group}.{spelled}`")
    for spelled, key in DATASET_RENAMED.items():
        ours.setdefault(f"datasets[].{key}", []).append(f"`{spelled}`")
    renamed = ["| our key | also read |", "| --- | --- |"]
    renamed += [f"| `{key}` | {', '.join(spelled)} |" for key, spelled in ours.items()]
    converted = ["| written | read as |", "| --- | --- |"]
    for key, table in CONVERTED.items():
        converted += [f"| `{key}: {value}` | {_meaning_text(meaning)} |" for value, meaning in table.items()]
    for key, values in RESPELLED.items():
        converted += [f"| `{key}: {value}` | `{key}: {our}` |" for value, our in values.items()]
    converted += [f"| `{key}` | nothing: {reason} |" for key, reason in DECIDED.items()]
    converted += [f"| `{key}` | refused: {refusal.message} |" for key, refusal in REFUSED.items()]
    return "\n".join(["### Other names", "", *renamed, "", "### Converted values", "", *converted])


def _meaning_text(meaning: Meaning | Refusal | None) -> str:
    if meaning is None:
        return "nothing: it asks for nothing"
    if isinstance(meaning, Refusal):
        return f"refused: {meaning.message}"
    weak = ", where no other key speaks" if meaning.weak else ""
    return f"`{meaning.key}: {meaning.value}`{weak}"


def generated_part() -> str:
    """What stands between the markers of docs/config.md."""
    parts = []
    for section in SECTIONS:
        parts += [f"### {section.__doc__}", key_table(TrainConfig, section.__annotations__)]
        if "datasets" in section.__annotations__:
            parts += ["### An entry of `datasets`", key_table(DatasetConfig, DatasetConfig.model_fields)]
    return "\n\n".join([*parts, "## Spellings of other tools", alias_tables()])


def page(old: str) -> str:
    """docs/config.md with its generated part renewed. Raises `ValueError` where the markers are missing."""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/config.md has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{generated_part()}\n\n{END}{after}"


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def main(docs: Path) -> None:
    """Writes both files."""
    write_text(docs / "schema" / "train.json", schema_text(), ConfigError)
    write_text(docs / "config.md", page((docs / "config.md").read_text(encoding="utf-8")), ConfigError)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
