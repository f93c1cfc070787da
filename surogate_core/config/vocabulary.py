"""Reads other tools' spellings into ours: renames keys, converts values, refuses what has no meaning here.

Every reading is noted ("read `micro_batch_size` as per_device_train_batch_size"), two spellings that disagree are an
error naming both lines, and an unknown key is an error with the nearest names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from .aliases import (
    CONVERTED,
    DATASET_COLUMNS,
    DATASET_RENAMED,
    DECIDED,
    NESTED,
    REFUSED,
    RENAMED,
    RESPELLED,
    Meaning,
    Refusal,
)
from .dataset import DatasetConfig
from .train import TrainConfig
from .tree import Entry, Mapping, Node, Scalar, Sequence, plain_value, shown

Note = Callable[[str], None]

DATASET_KEYS = ("datasets", "validation_datasets")
KEYS = tuple(TrainConfig.model_fields)
SPELLINGS = sorted({*KEYS, *RENAMED, *CONVERTED, *DECIDED, *REFUSED, *NESTED})


@dataclass
class _Claim:
    """One statement about one of our keys."""

    key: str
    entry: Entry
    weak: bool = False


def translate(document: Mapping, note: Note) -> Mapping:
    """The document in our vocabulary. Raises `ConfigError` listing every key that is unknown or refused."""
    problems: list[ConfigError] = []
    claims: list[_Claim] = []
    for entry in document.entries.values():
        try:
            claims += _read(entry, note)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)
    result = _agree(claims, document)
    for key in DATASET_KEYS:
        if key in result.entries:
            entry = result.entries[key]
            result.entries[key] = Entry(entry.spelled, entry.where, _translate_datasets(entry.node, key, note))
    return result


def raise_all(problems: list[ConfigError]) -> None:
    """Raises the problem, or all of them as one; nothing where there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))


def unknown_key(where: object, spelled: str, known: Iterable[str], prefix: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest that do."""
    near = nearest_keys(spelled, known)
    if not near:
        return ConfigError(f"{where}: unknown key `{prefix}{spelled}`", "docs/config.md lists every key.")
    shown_names = [f"`{prefix}{name}`" + (f" ({prefix}{RENAMED[name]})" if name in RENAMED else "") for name in near]
    return ConfigError(f"{where}: unknown key `{prefix}{spelled}`", f"Did you mean {' or '.join(shown_names)}?")


def nearest_keys(spelled: str, known: Iterable[str]) -> list[str]:
    """Up to three known keys that look like `spelled`, the nearest first; learningRate and learning-rate count too."""
    written = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", spelled).replace("-", "_").lower()
    return difflib.get_close_matches(written, list(known), n=3, cutoff=0.7)


def _read(entry: Entry, note: Note) -> list[_Claim]:
    key = entry.spelled
    if key in NESTED and isinstance(entry.node, Mapping):
        return _read_group(key, entry.node, note)
    if key in REFUSED:
        raise ConfigError(f"{entry.where}: {REFUSED[key].message}", REFUSED[key].hint)
    if key in DECIDED:
        note(f"read `{key}` and changed nothing: {DECIDED[key]}")
        return []
    if key in CONVERTED:
        return _convert(entry, note)
    if key in RENAMED:
        note(f"read `{key}` as {RENAMED[key]}")
        return [_respell(RENAMED[key], entry, note)]
    if key in KEYS:
        return [_respell(key, entry, note)]
    raise unknown_key(entry.where, key, SPELLINGS)


def _read_group(group: str, node: Mapping, note: Note) -> list[_Claim]:
    claims = []
    for inner in node.entries.values():
        key = NESTED[group].get(inner.spelled)
        if key is None:
            raise unknown_key(inner.where, inner.spelled, NESTED[group], f"{group}.")
        spelled = f"{group}.{inner.spelled}"
        note(f"read `{spelled}` as {key}")
        claims.append(_respell(key, Entry(spelled, inner.where, inner.node), note))
    return claims


def _written(node: Node) -> str:
    """A value as the tables have it: switches as true and false, an empty value as none, a list of one as its item."""
    if isinstance(node, Sequence) and len(node.items) == 1:
        node = node.items[0]
    if not isinstance(node, Scalar):
        return shown(node)
    looks = node.value
    if isinstance(looks, bool):
        return "true" if looks else "false"
    return "none" if looks is None else node.text


def _convert(entry: Entry, note: Note) -> list[_Claim]:
    table = CONVERTED[entry.spelled]
    written = _written(entry.node)
    if written not in table:
        options = ", ".join(table)
        raise ConfigError(
            f"{entry.where}: `{entry.spelled}: {shown(entry.node)}` has no counterpart here",
            f"Of `{entry.spelled}`, these values are understood: {options}.",
        )
    meaning = table[written]
    if meaning is None:
        note(f"read `{entry.spelled}: {written}` and changed nothing: it asks for nothing")
        return []
    if isinstance(meaning, Refusal):
        raise ConfigError(f"{entry.where}: `{entry.spelled}: {written}`: {meaning.message}", meaning.hint)
    return [_claim_of(meaning, entry, written, note)]


def _claim_of(meaning: Meaning, entry: Entry, written: str, note: Note) -> _Claim:
    remark = f" ({meaning.remark})" if meaning.remark else ""
    if not meaning.weak:
        note(f"read `{entry.spelled}: {written}` as {meaning.key}: {meaning.value}{remark}")
    node = Scalar(meaning.value, True, entry.node.where)
    return _Claim(meaning.key, Entry(entry.spelled, entry.where, node), meaning.weak)


def _respell(key: str, entry: Entry, note: Note) -> _Claim:
    """A statement about one of our keys, its value put into our words."""
    node = entry.node
    if isinstance(node, Scalar):
        ours = RESPELLED.get(key, {}).get(node.text)
        if ours is not None:
            note(f"read `{entry.spelled}: {node.text}` as {key}: {ours or 'empty (none)'}")
            node = Scalar(ours, True, node.where)
        elif key == "warmup_steps" and isinstance(node.value, float) and 0 < node.value < 1:
            note(f"read `{entry.spelled}: {node.text}` as warmup_ratio, since it is below 1")
            key = "warmup_ratio"
    return _Claim(key, Entry(entry.spelled, entry.where, node))


def _agree(claims: list[_Claim], document: Mapping) -> Mapping:
    """One value for each key. Where spellings disagree, neither is taken."""
    result = Mapping(document.where)
    strong = {claim.key for claim in claims if not claim.weak}
    for claim in claims:
        if claim.weak and claim.key in strong:
            continue
        first = result.entries.get(claim.key)
        if first is None:
            result.entries[claim.key] = claim.entry
        elif _comparable(claim.key, first.node) != _comparable(claim.key, claim.entry.node):
            raise ConfigError(
                f"{claim.entry.where}: `{claim.entry.spelled}` and `{first.spelled}` ({first.where}) both set "
                f"{claim.key}, to different values: {shown(claim.entry.node)} and {shown(first.node)}",
                f"Keep one of them, best as `{claim.key}`.",
            )
    return result


def _comparable(key: str, node: Node) -> object:
    value = plain_value(node)
    if key in (*DATASET_KEYS, "lora_target_modules", "report_to") and not isinstance(value, list):
        return [value]
    return value


def _translate_datasets(node: Node, key: str, note: Note) -> Node:
    if isinstance(node, Sequence):
        items = [translate_dataset(item, f"{key}.{index}.", note) for index, item in enumerate(node.items)]
        return Sequence(node.where, items)
    return translate_dataset(node, f"{key}.", note)


def translate_dataset(node: Node, prefix: str, note: Note) -> Node:
    """One entry of a list of data sets in our vocabulary; a path alone stays as it is. `prefix`: for messages."""
    if not isinstance(node, Mapping):
        return node
    result = Mapping(node.where)
    columns = Mapping(node.where)
    for entry in node.entries.values():
        spelled = entry.spelled
        key = DATASET_RENAMED.get(spelled, spelled)
        column = dataset_column(spelled)
        if column is not None:
            note(f"read `{prefix}{spelled}` as {prefix}columns.{column}")
            columns.entries[column] = Entry(column, entry.where, entry.node)
            continue
        if key not in DatasetConfig.model_fields:
            raise unknown_key(entry.where, spelled, [*DatasetConfig.model_fields, *DATASET_RENAMED], prefix)
        if key != spelled:
            note(f"read `{prefix}{spelled}` as {prefix}{key}")
        if key in result.entries:
            raise ConfigError(f"{entry.where}: `{prefix}{key}` is set twice; first at {result.entries[key].where}")
        result.entries[key] = Entry(spelled, entry.where, entry.node)
    if columns.entries:
        given = result.entries.get("columns")
        if given is not None and isinstance(given.node, Mapping):
            columns.entries.update(given.node.entries)
        result.entries["columns"] = Entry("columns", columns.where, columns)
    return result


def dataset_column(spelled: str) -> str | None:
    """The column that `text_field` or `field_text` speaks of; None for other keys."""
    name = spelled.removesuffix("_field") if spelled.endswith("_field") else spelled.removeprefix("field_")
    return name if name != spelled and name in DATASET_COLUMNS else None
