"""Where the files that a configuration names are looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .tree import Where

_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet", ".gz")


def named_model(name: str, where: object, key: str) -> Path | None:
    """The file of a model that is known by name, already fetched; None for another name. Raises `ConfigError` where it is not
    fetched."""
    from ..plugins.manager import get_manager

    models = get_manager().models
    if name not in models:
        return None
    found = models[name].find()
    if found is None:
        fetch = "fetch-default-model" if name == "default" else f"fetch-model {name}"
        raise ConfigError(f"{where}: `{key}`: the model {name!r} is not here yet", f"Run `surogate {fetch}`.")
    return found


@dataclass(frozen=True)
class Places:
    """`folder`: the configuration file's own."""

    folder: Path

    def candidates(self, name: str, where: Where) -> list[Path]:
        """The paths to try, in order: beside the file and then the working directory; for overrides the other way."""
        expanded = Path(os.path.expanduser(name))
        if expanded.is_absolute():
            return [expanded]
        roots = [self.folder, Path.cwd()] if where.line else [Path.cwd(), self.folder]
        return list(dict.fromkeys(root / expanded for root in roots))

    def existing(self, name: str, where: Where) -> str | None:
        """The first candidate that exists, as an absolute path."""
        return next((str(path.resolve()) for path in self.candidates(name, where) if path.exists()), None)

    def find(self, name: str, where: Where, key: str, hint: str | None = None) -> str:
        """The absolute path of an existing file or folder. Raises `ConfigError` with what was tried."""
        found = self.existing(name, where)
        if found is None:
            tried = " and ".join(str(path) for path in self.candidates(name, where))
            raise ConfigError(f"{where}: `{key}`: {name} does not exist (tried {tried})", hint)
        return found

    def find_model(self, name: str, where: Where, key: str = "model") -> str:
        """The absolute path of a model, or of what has its tokenizer: a path, or else the name of one that
        `surogate fetch-model` fetches, such as `default`."""
        named = named_model(name, where, key) if self.existing(name, where) is None else None
        if named is not None:
            return str(named)
        hint = ("No model is downloaded by name; `surogate fetch-default-model` fetches a small one and prints its path, and "
                "`surogate fetch-model` lists others.")
        return self.find(name, where, key, hint)

    def find_template(self, name: str, where: Where) -> str:
        """The absolute path of a template's file, or the name itself where it can be one of those that come along."""
        if "{{" in name or "{%" in name:
            return name
        local = "/" in name or Path(name).suffix[1:2].isalpha()  # qwen2.5 is a name
        return self.find(name, where, "chat_template") if local else self.existing(name, where) or name

    def find_dataset(self, name: str, where: Where, key: str) -> str:
        """The absolute path of a data set, or the name itself where it can be one of the hub's."""
        local = name.startswith((".", "/", "~")) or name.endswith(_FILE_SUFFIXES) or name.count("/") != 1
        return self.find(name, where, key) if local else self.existing(name, where) or name
