"""A table of named things of one kind, each with the distribution that brought it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ..errors import PluginError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def nearest(name: str, known: list[str]) -> list[str]:
    """The few of `known` that `name` was probably meant to be, best first; compared without regard to case."""
    lowered = {other.lower(): other for other in known}
    return [lowered[match] for match in difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.6)]


class Registry(Generic[T]):
    """Names -> items of one kind.

    `noun` is what messages call one ("model family"). `check(name, item)` raises `PluginError` for an unfit item.
    `failures()` gives one line for each plugin that did not load: whoever misses a name should see them.
    """

    def __init__(
        self,
        noun: str,
        check: Callable[[str, object], None] | None = None,
        failures: Callable[[], list[str]] = list,
    ) -> None:
        self.noun = noun
        self._check = check
        self._failures = failures
        self._items: dict[str, T] = {}
        self._sources: dict[str, str] = {}

    def register(self, name: str, item: T, source: str) -> None:
        """Adds `item`. `source` names the distribution, as in "surogate-llama 0.1.0".

        Raises `PluginError` for a malformed name, a name already taken, or an item that the check refuses.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(
                f"{source} registers a {self.noun} under the name {name!r}",
                "A name is letters, digits and any of '_', '.', '-', and begins with a letter or digit.",
            )
        if name in self._items:
            raise PluginError(
                f"{self.noun} {name!r} is registered by {self._sources[name]} and again by {source}",
                "Uninstall one of them, or list only the plugins you want under `plugins:` in the config.",
            )
        if self._check is not None:
            self._check(name, item)
        self._items[name] = item
        self._sources[name] = source

    def withdraw(self, names: Iterable[str]) -> None:
        """Removes these names, which must be there."""
        for name in names:
            del self._items[name], self._sources[name]

    def __getitem__(self, name: str) -> T:
        """The item of that name. Raises `PluginError` with the nearest names and what is installed."""
        if name in self._items:
            return self._items[name]
        hint = []
        if close := nearest(name, self.names()):
            hint.append(f"Did you mean {' or '.join(repr(other) for other in close)}?")
        installed = ", ".join(f"{other} ({self._sources[other]})" for other in self.names())
        hint.append(f"Installed: {installed}." if installed else "No installed plugin brings one.")
        hint.extend(f"Did not load: {failure}" for failure in self._failures())
        raise PluginError(f"no {self.noun} is named {name!r}", "\n".join(hint))

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._items)

    def items(self) -> list[tuple[str, T]]:
        """All (name, item), sorted by name."""
        return sorted(self._items.items(), key=lambda pair: pair[0])

    def values(self) -> list[T]:
        """All items, sorted by name."""
        return [item for _, item in self.items()]

    def source(self, name: str) -> str:
        """The distribution that registered `name`, which must be there."""
        self[name]
        return self._sources[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._items)
