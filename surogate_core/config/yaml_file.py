"""Reads YAML strictly: every key once, every value with its line, environment variables filled in.

Only the plain data of YAML is taken (mappings, lists, scalars, anchors and `<<` merges); a tag such as `!!python/name`
is refused. What a scalar means is decided by the schema, see `tree`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping as MappingABC
from pathlib import Path

import yaml

from ..errors import ConfigError
from .tree import Entry, Mapping, Node, Scalar, Sequence, Where

_MAX_NODES = 20_000  # a few lines of nested aliases can stand for more values than memory holds
_PLAIN_TAGS = re.compile(r"tag:yaml\.org,2002:(str|int|float|bool|null|timestamp|merge|value|seq|map)")
_VARIABLE = re.compile(
    r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^}]*))?\}|(?P<bad>\$\{)"
)


def process_environment() -> MappingABC[str, str]:
    """What `${NAME}` is filled in from."""
    return os.environ


def read_yaml(path: Path, environ: MappingABC[str, str]) -> Mapping:
    """Reads a YAML file whose top level is a mapping. Raises `ConfigError` naming file and line."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})", "Save the file as UTF-8.") from None
    node = parse_yaml(text, str(path), environ)
    if node is None:
        raise ConfigError(f"{path}: the file is empty", "A configuration needs at least `model:` and `datasets:`.")
    if not isinstance(node, Mapping):
        raise ConfigError(f"{node.where}: expected `key: value` lines at the top of the file")
    return node


def parse_yaml(text: str, name: str, environ: MappingABC[str, str], lines: bool = True) -> Node | None:
    """Parses one YAML document into a tree; None where there is none. `lines`: whether places have line numbers."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Where(name, mark.line + 1 if lines and mark else 0)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}", _yaml_hint(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    return None if root is None else _Reader(name, environ, lines).convert(root)


def _yaml_hint(error: yaml.MarkedYAMLError) -> str | None:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "Indent with spaces: YAML takes no tabs."
    if "mapping values are not allowed" in problem:
        return "Put quotes around text that holds a colon and a space, and check the indentation."
    return None


class _Reader:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, name: str, environ: MappingABC[str, str], lines: bool) -> None:
        self._name = name
        self._environ = environ
        self._lines = lines
        self._open: set[int] = set()
        self._count = 0

    def convert(self, node: yaml.Node) -> Node:
        where = self._where(node)
        self._count += 1
        if self._count > _MAX_NODES:
            raise ConfigError(f"{where}: more than {_MAX_NODES} values in one file")
        if id(node) in self._open:
            raise ConfigError(f"{where}: an anchor contains itself")
        if not _PLAIN_TAGS.fullmatch(node.tag):
            raise ConfigError(f"{where}: the tag {node.tag} is not taken", "Remove it: the schema decides the type.")
        self._open.add(id(node))
        try:
            return self._convert(node, where)
        except RecursionError:
            raise ConfigError(f"{where}: nested too deeply") from None
        finally:
            self._open.discard(id(node))

    def _convert(self, node: yaml.Node, where: Where) -> Node:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, where)
        if isinstance(node, yaml.SequenceNode):
            return Sequence(where, [self.convert(item) for item in node.value])
        return self._mapping(node, where)

    def _scalar(self, node: yaml.ScalarNode, where: Where) -> Scalar:
        return Scalar(expand(node.value, where, self._environ), node.style is None, where)

    def _mapping(self, node: yaml.MappingNode, where: Where) -> Mapping:
        result = Mapping(where)
        merged: list[Mapping] = []
        for key_node, value_node in node.value:
            key_where = self._where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{key_where}: a key must be a word")
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += self._merged(value_node)
                continue
            key = expand(key_node.value, key_where, self._environ)
            if key in result.entries:
                first = result.entries[key].where
                raise ConfigError(f"{key_where}: `{key}` is given twice; first at {first}", "Keep one of the lines.")
            try:
                result.entries[key] = Entry(key, key_where, self.convert(value_node))
            except MissingVariable as error:
                raise ConfigError(f"{error.where}: `{key}`: {error.message}", error.hint) from None
        for other in merged:
            for key, entry in other.entries.items():
                result.entries.setdefault(key, entry)
        return result

    def _merged(self, node: yaml.Node) -> list[Mapping]:
        converted = self.convert(node)
        found = converted.items if isinstance(converted, Sequence) else [converted]
        for each in found:
            if not isinstance(each, Mapping):
                raise ConfigError(f"{each.where}: `<<` merges mappings only")
        return found

    def _where(self, node: yaml.Node) -> Where:
        return Where(self._name, node.start_mark.line + 1 if self._lines else 0)


class MissingVariable(ConfigError):
    """A `${NAME}` that the environment does not have. The key is added where it is known."""

    def __init__(self, where: Where, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.message}\n{self.hint}"


def expand(text: str, where: Where, environ: MappingABC[str, str]) -> str:
    """Fills in `${NAME}` and `${NAME:-default}`; `$${` stands for `${`. The result is not expanded again."""

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "${"
        if match["bad"]:
            raise MissingVariable(
                where, "`${` begins no variable", "Write ${NAME}, ${NAME:-default}, or $${ for the characters."
            )
        found = environ.get(match["name"])
        if found is not None and not (found == "" and match["default"] is not None):
            return found
        if match["default"] is not None:
            return match["default"]
        raise MissingVariable(
            where,
            f"the environment variable {match['name']} is not set",
            f"Set it, or give a default: ${{{match['name']}:-value}}.",
        )

    return _VARIABLE.sub(value, text)
