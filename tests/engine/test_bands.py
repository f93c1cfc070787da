"""Tensors that are columns of one matrix: what the engine accepts side by side, and what it still refuses."""

from __future__ import annotations

import pytest

from surogate_core import engine
from surogate_core.engine import EngineError

from .programs import ABSENT, INPUT, Draft


def matrix(rows: int = 3, columns: int = 8) -> tuple[Draft, int, int, int]:
    """A draft, an input [rows, 4] of it, its storage of [rows, columns] floats that nothing wrote yet, and that as a tensor."""
    draft = Draft()
    arena = draft.arena("main", 4096)
    source = draft.tensor("x", draft.storage("x", arena, 0, 4 * rows * 4, INPUT), [rows, 4])
    storage = draft.storage("wide", arena, 1024, 4 * rows * columns)
    return draft, source, storage, draft.tensor("whole", storage, [rows, columns])


def band(draft: Draft, name: str, storage: int, first: int, rows: int = 3, width: int = 4, row: int = 8) -> int:
    return draft.tensor(name, storage, [rows, width], offset=4 * first, strides=[row, 1])


def accepted(draft: Draft) -> None:
    draft.entry("step")
    engine.plan(draft.to_bytes(), threads=1)


def refused(draft: Draft, reason: str) -> None:
    draft.entry("step")
    with pytest.raises(EngineError, match=reason):
        engine.plan(draft.to_bytes(), threads=1)


def test_columns_side_by_side_do_not_overlap(fake):
    draft, x, storage, _ = matrix()
    left, right = band(draft, "left", storage, 0), band(draft, "right", storage, 4)
    draft.instruction("fake_fail", [x], [left, right])
    draft.instruction("fake_fail", [left], [right])
    accepted(draft)


@pytest.mark.parametrize(
    "other",
    [
        {"first": 3}, {"first": 2, "width": 2}, {"first": 0}, {"first": 4, "row": 10, "rows": 2},
        {"first": 6},  # its rows run on into the next row of the matrix
    ],
    ids=str,
)
def test_columns_that_meet_overlap(fake, other):
    draft, x, storage, _ = matrix()
    left, second = band(draft, "left", storage, 0), band(draft, "second", storage, **{"rows": 2, **other})
    draft.instruction("fake_fail", [x], [left, second])
    refused(draft, "outputs 'left' and 'second' overlap")


def test_heads_of_columns(fake):
    draft, x, storage, _ = matrix()
    left = draft.tensor("left", storage, [3, 2, 2], strides=[8, 2, 1])
    right = draft.tensor("right", storage, [3, 2, 2], offset=16, strides=[8, 2, 1])
    every_other = draft.tensor("every_other", storage, [3, 2, 2], offset=8, strides=[8, 4, 1])
    draft.instruction("fake_fail", [x], [left, right])
    accepted(draft)
    draft.entries = []
    draft.instruction("fake_fail", [x], [right, every_other])
    refused(draft, "outputs 'right' and 'every_other' overlap")


def test_the_whole_is_written_when_all_its_columns_are(fake):
    draft, x, storage, whole = matrix()
    draft.instruction("fake_fail", [x], [band(draft, "left", storage, 0)])
    middle = band(draft, "middle", storage, 4, width=2)
    draft.instruction("fake_fail", [x], [band(draft, "right", storage, 6, width=2)])
    result = draft.tensor("result", draft.storage("result", 0, 2048, 96), [3, 8])
    instructions = list(draft.instructions)
    draft.instruction("fake_fail", [whole], [result])
    refused(draft, r"instruction 2 \(fake_fail\): entry 'step' reads 'whole' before anything wrote it")
    draft.instructions, draft.entries = list(instructions), []
    draft.instruction("fake_fail", [middle], [result])
    refused(draft, "entry 'step' reads 'middle' before anything wrote it")
    draft.instructions, draft.entries = list(instructions), []
    draft.instruction("fake_fail", [x], [middle])
    draft.instruction("fake_fail", [whole], [result])
    draft.instruction("fake_fail", [band(draft, "inner", storage, 3)], [result])
    accepted(draft)


def test_a_band_of_a_matrix_that_was_written_whole(fake):
    draft, x, storage, whole = matrix()
    draft.instruction("fake_fail", [x], [whole])
    draft.instruction("fake_fail", [band(draft, "left", storage, 0), ABSENT], [band(draft, "right", storage, 4)])
    accepted(draft)
