"""Buffer planning: gives every activation storage an offset in one arena, so that what lives at the same time never
overlaps and the arena is as small as a simple, fast rule makes it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64


@dataclass
class Life:
    """A storage of ``bytes`` that is written first by instruction ``start`` and touched last by ``end``."""

    name: str
    bytes: int
    start: int
    end: int
    offset: int = -1


def aligned(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def lower_bound(lives: Sequence[Life]) -> int:
    """The most bytes alive at once: no plan is smaller."""
    changes: dict[int, int] = {}
    for life in lives:
        changes[life.start] = changes.get(life.start, 0) + aligned(life.bytes)
        changes[life.end + 1] = changes.get(life.end + 1, 0) - aligned(life.bytes)
    peak = total = 0
    for time in sorted(changes):
        total += changes[time]
        peak = max(peak, total)
    return peak


def plan(lives: Sequence[Life]) -> int:
    """Sets the offsets; returns the arena's size.

    Tries three rules, until one needs no more than the lower bound, and takes the smallest: storages in order of their
    start, each in the best gap; the longest-lived first, each at the first place that is free for all of its life; the
    largest first, likewise.
    """
    floor = lower_bound(lives)
    best: tuple[int, list[int]] | None = None
    for rule in (_by_start, _by_length, _by_size):
        size = rule(lives)
        if best is None or size < best[0]:
            best = size, [life.offset for life in lives]
        if size == floor:
            break
    for life, offset in zip(lives, best[1]):
        life.offset = offset
    return best[0]


def _by_start(lives: Sequence[Life]) -> int:
    """In order of their start, each goes into the smallest gap between what is alive that holds it. Among those that start
    together the longest-lived come first, then the largest: what is saved for the backward pass comes and goes like a
    stack and gathers at the bottom."""
    placed: list[tuple[int, int, Life]] = []  # (offset, end offset, life) of everything alive, by offset
    ends: dict[int, list[Life]] = {}
    peak = 0
    time = -1
    for life in sorted(lives, key=lambda x: (x.start, x.start - x.end, -x.bytes)):
        if life.start != time:
            expired = [e for e in ends if e < life.start]
            if expired:
                for e in expired:
                    del ends[e]
                placed = [p for p in placed if p[2].end >= life.start]
            time = life.start
        size = aligned(life.bytes)
        life.offset = _best_fit(placed, size)
        insort(placed, (life.offset, life.offset + size, life), key=lambda p: p[0])
        ends.setdefault(life.end, []).append(life)
        peak = max(peak, life.offset + size)
    return peak


def _best_fit(placed: list[tuple[int, int, Life]], size: int) -> int:
    """The smallest gap between live storages that holds ``size`` bytes; the end of all of them when none does."""
    best, best_gap, cursor = -1, None, 0
    for offset, end, _ in placed:
        gap = offset - cursor
        if gap >= size and (best_gap is None or gap < best_gap):
            best, best_gap = cursor, gap
        cursor = max(cursor, end)
    return best if best_gap is not None else cursor


def _by_length(lives: Sequence[Life]) -> int:
    return _first_fit(sorted(lives, key=lambda life: (life.start - life.end, -life.bytes)))


def _by_size(lives: Sequence[Life]) -> int:
    return _first_fit(sorted(lives, key=lambda life: -life.bytes))


def _first_fit(lives: Sequence[Life]) -> int:
    """Places them in the order given, each in the lowest gap between those that live at the same time."""
    starts, ends = (np.array([getattr(life, name) for life in lives], np.int64) for name in ("start", "end"))
    low, high = np.zeros(len(lives), np.int64), np.zeros(len(lives), np.int64)
    for i, life in enumerate(lives):
        size = aligned(life.bytes)
        together = np.flatnonzero((starts[:i] <= life.end) & (life.start <= ends[:i]))
        together = together[np.argsort(low[together], kind="stable")]
        below = np.maximum.accumulate(np.concatenate(([0], high[together])))
        fits = np.flatnonzero(low[together] - below[:-1] >= size)
        life.offset = int(below[fits[0]] if len(fits) else below[-1])
        low[i], high[i] = life.offset, life.offset + size
    return int(high.max(initial=0))
