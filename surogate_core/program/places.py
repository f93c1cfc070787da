"""Where activations lie: which of them share memory, and how long each piece of it is in use.

An activation has a storage of its own, or lies in that of another: as columns of a wider matrix (a slice of it, or one of
the matrices joined in it), or in place of an input that its op overwrites. Either way it occupies an interval of the
columns of one *root*; a root is what gets memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import ops
from ..ir.graph import ACTIVATION, Value
from ..weights.formats import byte_count
from .memory import Life

if TYPE_CHECKING:
    from .call import Call, Key

LINGER = 8
"""Instructions for which an activation may hold memory that is mostly unused."""


class Places:
    """``inside`` maps what lies in another activation to it and to the first of its columns there; emission fills it with
    slices and joins, `settle` adds what is written in place."""

    def __init__(self, shape: Callable[[Value], tuple[int, ...]]) -> None:
        self._shape = shape
        self.inside: dict[Key, tuple[Key, int]] = {}
        self.holds: dict[Key, list[Key]] = {}
        self._settled: dict[Key, tuple[Key, int]] = {}

    def put(self, key: Key, wider: Key, column: int) -> None:
        """Lays ``key`` into columns of ``wider``. ValueError when it already lies somewhere else."""
        if key in self.inside:
            raise ValueError(f"{key[0]!r} cannot lie in {wider[0]!r}: it already lies in {self.inside[key][0][0]!r}")
        self.inside[key] = (wider, column)
        self.holds.setdefault(wider, []).append(key)

    def at(self, key: Key) -> tuple[Key, int]:
        """Root and first column."""
        if key in self._settled:
            return self._settled[key]
        column = 0
        while key in self.inside:
            key, offset = self.inside[key]
            column += offset
        return key, column

    def around(self, key: Key) -> list[Key]:
        """``key``, what it lies in, and what lies in it: what is needed where ``key`` is read."""
        found = self._held(key)
        while key in self.inside:
            key = self.inside[key][0]
            found.append(key)
        return found

    def _held(self, key: Key) -> list[Key]:
        """``key``, and what lies in it."""
        found, pending = [], [key]
        while pending:
            found.append(pending.pop())
            pending += self.holds.get(found[-1], ())
        return found

    def width(self, key: Key) -> int:
        """Elements of a row."""
        return math.prod(self._shape(key[0])[1:])

    def lies_apart(self, key: Key) -> bool:
        """Whether rows of ``key`` do not follow one another."""
        return self.width(key) != self.width(self.at(key)[0])

    # -- in place ----------------------------------------------------------------------------------------------------

    def settle(self, calls: Sequence[Call], outputs: Sequence[Key]) -> None:
        """Decides what is written in place. ``outputs`` are read after the last call."""
        self._use = _uses(calls, outputs)
        self._any_rows = _take_rows_apart(calls)
        self._occupants: dict[Key, list[Key]] = {}
        for key in self._use:
            self._occupants.setdefault(self.at(key)[0], []).append(key)
        self._pull(calls, set(outputs))
        taken: list[Key] = []
        for index, call in enumerate(calls):
            donor = self._donor(call, index)
            if donor is not None and call.outputs[0] not in self.inside:
                self._take(call.outputs[0], donor)
                taken.append(call.outputs[0])
        for key in taken:
            self._give_back(key)
        self._settled = {key: self.at(key) for key in self._use}

    def _take(self, key: Key, donor: Key) -> None:
        """``key``, a root so far, goes into ``donor`` with all that lies in it."""
        self.put(key, donor, 0)
        self._occupants.setdefault(self.at(key)[0], []).extend(self._occupants.pop(key))

    def _candidate(self, call: Call) -> Key | None:
        """The input that output 0 could overwrite: an activation of the result's type, as the op sees it."""
        slot = ops.get(call.node.op).in_place
        key = call.inputs[slot] if slot is not None else None
        result = call.outputs[0]
        if key is None or result is None or key[0].kind != ACTIVATION or result[0].kind != ACTIVATION:
            return None
        return key if call.node.inputs[slot].type == result[0].type and call.inputs.count(key) == 1 else None

    def _pull(self, calls: Sequence[Call], outputs: set[Key]) -> None:
        """Backwards, as what is joined has its place before it is made: an input that would be overwritten goes to where
        the result has to be."""
        for index, call in reversed(list(enumerate(calls))):
            donor, result = self._candidate(call), call.outputs[0]
            if donor is None or result not in self.inside or donor in self.inside:
                continue
            within = self._occupants[donor]
            first, last = min(self._use[key][0] for key in within), max(self._use[key][1] for key in within)
            if last == index and index - first <= LINGER and self._any_rows.issuperset(within) and outputs.isdisjoint(within):
                self._take(donor, result)

    def _donor(self, call: Call, index: int) -> Key | None:
        """The candidate, if nobody reads its columns later and the rows of the result may lie as its rows do."""
        donor = self._candidate(call)
        if donor is None or self._last_touch(donor) != index:
            return None
        return donor if not self.lies_apart(donor) or call.outputs[0] in self._any_rows else None

    def _last_touch(self, key: Key) -> int:
        root, column = self.at(key)
        end = column + self.width(key)
        last = 0
        for other in self._occupants[root]:
            start = self.at(other)[1]
            if start < end and column < start + self.width(other):
                last = max(last, self._use[other][1])
        return last

    def _give_back(self, key: Key) -> None:
        """What outlives its neighbours would keep the memory of all of them: it gets its own."""
        root, _ = self.at(key)
        moved = [k for k in self._held(key) if k in self._use]
        if not self.lies_apart(key) or max(self._use[k][1] for k in moved) - self._crowded_until(root) <= LINGER:
            return
        donor, _ = self.inside.pop(key)
        self.holds[donor].remove(key)
        self._occupants[root] = [k for k in self._occupants[root] if k not in moved]
        self._occupants[key] = moved

    def _crowded_until(self, root: Key) -> int:
        """The last instruction at which more than half of the columns are in use."""
        columns: dict[tuple[int, int], int] = {}
        for key in self._occupants[root]:
            place = (self.at(key)[1], self.width(key))
            columns[place] = max(columns.get(place, 0), self._use[key][1])
        used, total = 0, self.width(root)
        for (_, width), last in sorted(columns.items(), key=lambda item: -item[1]):
            used += width
            if 2 * used > total:
                return last
        return 0

    # -- lives -------------------------------------------------------------------------------------------------------

    def lives(self, calls: Sequence[Call], shape: Callable[[Value], tuple[int, ...]]) -> dict[Key, Life]:
        """The life of every root, of the bytes that it has where values have that ``shape``. After `settle`."""
        lives: dict[Key, Life] = {}
        for index, call in enumerate(calls):
            for key in call.outputs:
                if key is None or key[0].kind != ACTIVATION:
                    continue
                root = self.at(key)[0]
                if root not in lives:
                    size = byte_count(root[0].dtype, shape(root[0]))
                    lives[root] = Life(f"a{len(lives)}", size, index, index)
                lives[root].end = max(lives[root].end, self._use[key][1])
        for key, (_, last) in self._use.items():
            root = self.at(key)[0]
            if root in lives:
                lives[root].end = max(lives[root].end, last)
        return lives


def _uses(calls: Sequence[Call], outputs: Sequence[Key]) -> dict[Key, tuple[int, int]]:
    """First and last call that touches each activation."""
    use: dict[Key, tuple[int, int]] = {}
    for index, call in enumerate(calls):
        for key in (*call.inputs, *call.outputs):
            if key is not None and key[0].kind == ACTIVATION:
                use[key] = (use.get(key, (index, index))[0], index)
    for key in outputs:
        if key in use:
            use[key] = (use[key][0], len(calls) - 1)
    return use


def _take_rows_apart(calls: Sequence[Call]) -> set[Key]:
    """What only such ops touch as take its rows apart from one another."""
    touched: set[Key] = set()
    dense: set[Key] = set()
    for call in calls:
        record = ops.get(call.node.op)
        for operand, key in zip((*record.inputs, *record.outputs), (*call.inputs, *call.outputs)):
            if key is not None:
                touched.add(key)
                if operand.name not in record.rows_apart:
                    dense.add(key)
    return touched - dense


__all__ = ["LINGER", "Places"]
