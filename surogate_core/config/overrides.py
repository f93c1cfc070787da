"""Overrides of single keys: `learning_rate=1e-3`, `datasets.0.path=notes.jsonl`, `architecture.hidden_size=64`."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC

from ..errors import ConfigError
from .aliases import NESTED, RENAMED
from .dataset import parse_shorthand
from .tree import Entry, Mapping, Node, Scalar, Sequence, Where
from .vocabulary import DATASET_KEYS, KEYS, SPELLINGS, Note, translate, translate_dataset, unknown_key
from .yaml_file import parse_yaml

_OPEN_KEYS = ("architecture",)


def apply_override(document: Mapping, text: str, environ: MappingABC[str, str], note: Note) -> None:
    """Applies `key=value` to a translated document, in place. The value is YAML; any spelling of the key will do.

    Raises `ConfigError` where it is no `key=value`, the key does not exist, or an index is beyond the list.
    """
    where = Where(f"--set {text}")
    key, equals, value = text.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise ConfigError(f"{where}: expected key=value", "For example: --set learning_rate=1e-3.")
    node = parse_yaml(value, str(where), environ, lines=False) or Scalar("", True, where)
    first = RENAMED.get(steps[0], steps[0])
    if len(steps) == 1 or (steps[0] in NESTED and len(steps) == 2):
        document.entries.update(translate(_nest(steps, node, where), note).entries)
    elif first in DATASET_KEYS:
        _override_dataset(document, first, steps[1:], node, where, note)
    elif first in _OPEN_KEYS:
        _merge(document, _nest([first, *steps[1:]], node, where))
    elif first in KEYS:
        raise ConfigError(f"{where}: `{first}` has no parts", f"Set it whole: --set {first}=...")
    else:
        raise unknown_key(where, steps[0], SPELLINGS)


def _nest(steps: list[str], node: Node, where: Where) -> Mapping:
    for step in reversed(steps):
        node = Mapping(where, {step: Entry(step, where, node)})
    assert isinstance(node, Mapping)
    return node


def _merge(target: Mapping, source: Mapping) -> None:
    """Puts the entries of `source` into `target`, mapping into mapping."""
    for key, entry in source.entries.items():
        old = target.entries.get(key)
        if old is not None and isinstance(old.node, Mapping) and isinstance(entry.node, Mapping):
            _merge(old.node, entry.node)
        else:
            target.entries[key] = entry


def _override_dataset(document: Mapping, key: str, steps: list[str], node: Node, where: Where, note: Note) -> None:
    datasets = _dataset_list(document, key, where)
    index = int(steps[0]) if steps[0].isdecimal() else -1
    if not 0 <= index <= len(datasets.items):
        raise ConfigError(
            f"{where}: `{key}` has {len(datasets.items)} entries, and no {steps[0]!r}",
            f"Entries count from 0; {len(datasets.items)} would add one.",
        )
    if index == len(datasets.items):
        datasets.items.append(Mapping(where))
    if len(steps) == 1:
        datasets.items[index] = translate_dataset(node, f"{key}.{index}.", note)
        return
    item = datasets.items[index]
    if isinstance(item, Scalar):
        place = item.where
        parts = parse_shorthand(item.text).items()
        item = Mapping(place, {name: Entry(name, place, Scalar(part, True, place)) for name, part in parts})
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: `{key}.{index}` is a list ({item.where}); expected a data set")
    change = translate_dataset(_nest(steps[1:], node, where), f"{key}.{index}.", note)
    assert isinstance(change, Mapping)
    _merge(item, change)
    datasets.items[index] = item


def _dataset_list(document: Mapping, key: str, where: Where) -> Sequence:
    """The data sets as a list, which a single one becomes."""
    entry = document.entries.get(key)
    if entry is None or (isinstance(entry.node, Scalar) and entry.node.is_null):
        entry = Entry(key, where, Sequence(where))
    elif not isinstance(entry.node, Sequence):
        entry = Entry(entry.spelled, entry.where, Sequence(entry.node.where, [entry.node]))
    document.entries[key] = entry
    assert isinstance(entry.node, Sequence)
    return entry.node
