"""Responses that are kept for a while, so that a later request can go on with one: bounded in number, bytes and age,
and seen by none but the holder of the key that made them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..types import Refused
from .limits import clip


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What is kept of one key, and of all. Seconds, counts and bytes."""

    seconds: float = 3600.0
    of_key: int = 1024
    bytes_of_key: int = 128 << 20
    bytes_of_all: int = 512 << 20


@dataclass(slots=True)
class Stored:
    """A response as it is answered, the items that were before it, and about how many bytes that is."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    size: int
    since: float = 0.0

    @property
    def items(self) -> list[dict[str, Any]]:
        """The whole conversation, the answer too."""
        return [*self.input, *self.response["output"]]


class ResponseStore:
    """By key and id. What was kept longest goes first; what one key keeps drives out nothing of another's, until all
    together are too much."""

    def __init__(self, limits: StoreLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits or StoreLimits(), clock
        self._keys: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, key: str | None, stored: Stored) -> None:
        """Keeps it, in the place of what has its id."""
        name, limits = key or "", self._limits
        self._drop(name, stored.response["id"])
        stored.since = self._clock()
        kept = self._keys.setdefault(name, OrderedDict())
        kept[stored.response["id"]] = stored
        self._sizes[name] = self._sizes.get(name, 0) + stored.size
        while len(kept) > limits.of_key or self._sizes.get(name, 0) > limits.bytes_of_key:
            self._drop(name, next(iter(kept)))
        while sum(self._sizes.values()) > limits.bytes_of_all:
            oldest = min(self._keys, key=lambda each: next(iter(self._keys[each].values())).since)
            self._drop(oldest, next(iter(self._keys[oldest])))
        self._expire()

    def get(self, key: str | None, number: str, param: str | None = None) -> Stored:
        """Raises `Refused` (404) for what is not there, or not this key's."""
        self._expire()
        stored = self._keys.get(key or "", {}).get(number)
        if stored is None:
            raise Refused(
                f"there is no response {clip(number)!r}: it was not stored, was deleted, or is older than what is kept",
                404,
                "response_not_found",
                param,
            )
        return stored

    def delete(self, key: str | None, number: str) -> None:
        """Raises `Refused` (404)."""
        self.get(key, number)
        self._drop(key or "", number)

    def _drop(self, name: str, number: str) -> None:
        kept = self._keys.get(name, {})
        stored = kept.pop(number, None)
        if stored is not None:
            self._sizes[name] -= stored.size
        if not kept:
            self._keys.pop(name, None)
            self._sizes.pop(name, None)

    def _expire(self) -> None:
        """They lie in the order of their times."""
        before = self._clock() - self._limits.seconds
        for name in list(self._keys):
            kept = self._keys[name]
            while kept and next(iter(kept.values())).since < before:
                self._drop(name, next(iter(kept)))
