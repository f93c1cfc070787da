"""docs/ops.md says what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_core import ops
from surogate_core.ops import document

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert document.with_table(page) == page, "run: python -m surogate_core.ops.document docs/ops.md"


def test_every_op_has_a_row():
    table = document.table()
    assert all(f"[`{name}`]" in table for name in ops.ALL)


def test_every_operand_and_attribute_is_described():
    for op in ops.registered().values():
        assert op.doc.strip(), op.name
        for part in (*op.inputs, *op.outputs, *op.attrs.values()):
            assert part.doc.strip(), f"{op.name}: {part}"


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="must hold the lines"):
        document.with_table("# Ops")
