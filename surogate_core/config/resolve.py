"""From a YAML file and overrides to a `TrainConfig`, and from that to the file of every value in force."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from ..errors import ConfigError
from ..files import write_text
from .dataset import DatasetConfig
from .explain_errors import config_error
from .overrides import apply_override
from .paths import Places
from .train import SECTIONS, TrainConfig
from .tree import Entry, Mapping, Scalar, Where, place_of, settle_model
from .vocabulary import Note, translate
from .yaml_file import process_environment, read_yaml

Mode = Literal["sft", "pt"]

# Where pre-training differs: a text is longer than a sequence as a rule, not by accident.
MODE_DEFAULTS: dict[str, dict[str, str]] = {"sft": {}, "pt": {"overlong": "split"}}


def ignore(message: str) -> None:
    """Takes a note and drops it."""


def resolve(
    config_path: str | Path,
    overrides: Iterable[str] = (),
    *,
    mode: Mode = "sft",
    note: Note = ignore,
    environ: MappingABC[str, str] | None = None,
) -> TrainConfig:
    """Reads a configuration file, applies `key=value` overrides in order, and validates the whole.

    `note` is told about every spelling that was read as another. `environ` fills in `${NAME}`; default: the process's.
    Relative paths of the file are looked up beside the file and then in the working directory; those of overrides the
    other way round. Raises `ConfigError` with file, line and key of everything that is wrong.
    """
    path = Path(config_path)
    variables = process_environment() if environ is None else environ
    tell = _once(note)
    document = translate(read_yaml(path, variables), tell)
    for override in overrides:
        apply_override(document, override, variables, tell)
    for key, value in MODE_DEFAULTS[mode].items():
        place = Where(f"the defaults of `surogate {mode}`")
        document.entries.setdefault(key, Entry(key, place, Scalar(value, True, place)))
    try:
        config = TrainConfig.model_validate(settle_model(document, TrainConfig))
    except ValidationError as error:
        raise config_error(error, TrainConfig, document) from None
    return _with_paths(config, document, path)


def _once(note: Note) -> Note:
    told: set[str] = set()

    def tell(message: str) -> None:
        if message not in told:
            told.add(message)
            note(message)

    return tell


def _with_paths(config: TrainConfig, document: Mapping, path: Path) -> TrainConfig:
    """The same configuration with absolute paths of everything it reads."""
    places = Places(path.resolve().parent)

    def at(*steps: str | int) -> Where:
        return place_of(document, steps) or document.where

    def datasets(key: str) -> list[DatasetConfig]:
        return [
            each.model_copy(update={"path": places.find_dataset(each.path, at(key, index, "path"), f"{key}.{index}")})
            for index, each in enumerate(getattr(config, key))
        ]

    found: dict[str, Any] = {key: datasets(key) for key in ("datasets", "validation_datasets")}
    if config.model is not None:
        found["model"] = places.find_model(config.model, at("model"))
    if config.tokenizer is not None:
        found["tokenizer"] = places.find_model(config.tokenizer, at("tokenizer"), "tokenizer")
    if config.chat_template is not None:
        found["chat_template"] = places.find_template(config.chat_template, at("chat_template"))
    if config.resume_from_checkpoint not in (False, "auto"):
        key = "resume_from_checkpoint"
        found[key] = places.find(str(config.resume_from_checkpoint), at(key), key)
    found["output_dir"] = os.path.expanduser(config.output_dir)
    return config.model_copy(update=found)


class _Dumper(yaml.SafeDumper):
    """Writes text so that it is read as text: quoted, unless it is a plain word."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    escaped = text.replace("${", "$${")
    looks_like_text = Scalar(escaped, True, Where("")).value == escaped
    plain = escaped.isascii() and escaped.replace("_", "").replace(".", "").isalnum() and looks_like_text
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def resolved_text(config: TrainConfig) -> str:
    """The configuration as YAML that `resolve` reads back to an equal one: every key, in sections."""
    values = config.model_dump(mode="json")
    parts = ["# Every value in force. Written by Surogate; can be run again as it is.\n"]
    for section in SECTIONS:
        keys = {key: values[key] for key in section.__annotations__}
        text = yaml.dump(keys, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)
        parts.append(f"\n# {section.__doc__}\n{text}")
    return "".join(parts)


def dump_resolved(config: TrainConfig, path: str | Path) -> None:
    """Writes `resolved_text` to `path`, whole or not at all. Raises `ConfigError` where it cannot be written."""
    write_text(path, resolved_text(config), ConfigError)
