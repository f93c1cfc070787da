"""Writes the table of ops into docs/ops.md from the records: ``python -m surogate_core.ops.document docs/ops.md``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from . import FILES
from .record import Attr, Op, Operand

BEGIN = "<!-- table of ops: written by `python -m surogate_core.ops.document docs/ops.md` -->"
END = "<!-- end of the table of ops -->"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _operands(operands: tuple[Operand, ...]) -> str:
    parts = []
    for operand in operands:
        notes = [note for note, holds in (("optional", operand.optional), ("read and written", operand.inout)) if holds]
        mark = f" ({', '.join(notes)})" if notes else ""
        parts.append(f"`{operand.name}`{mark}: {_cell(operand.doc)}")
    return "<br>".join(parts) or "none"


def _attrs(attrs: Mapping[str, Attr]) -> str:
    parts = []
    for name, attr in attrs.items():
        default = "" if attr.default is None else f" = {attr.default!r}"
        parts.append(f"`{name}: {attr.kind.__name__}{default}`: {_cell(attr.doc)}")
    return "<br>".join(parts) or "none"


def _notes(op: Op) -> str:
    notes = []
    if op.vjp is not None:
        checked = f", checked on {', '.join(op.differentiable)}" if op.differentiable else ""
        notes.append("has a gradient rule" + checked)
    if op.in_place is not None:
        notes.append(f"may overwrite `{op.inputs[op.in_place].name}`")
    if op.rows_apart:
        notes.append(f"rows of {', '.join(f'`{name}`' for name in op.rows_apart)} may be apart")
    tolerances = ", ".join(f"{dtype} {value:g}" for dtype, value in op.tolerance.relative.items())
    notes.append(f"tolerance {tolerances}")
    return "; ".join(notes)


def table() -> str:
    """The table in Markdown, a row for each core op, in the order of the files."""
    lines = ["| op | inputs | outputs | attributes | what it computes |", "| --- | --- | --- | --- | --- |"]
    for file in FILES:
        for op in import_module(f".{file}", __package__).OPS:
            meaning = f"{_cell(op.doc)}<br>*{_notes(op)}*"
            lines.append(
                f"| [`{op.name}`](../surogate_core/ops/{file}.py) | {_operands(op.inputs)} | {_operands(op.outputs)} "
                f"| {_attrs(op.attrs)} | {meaning} |"
            )
    return "\n".join(lines)


def with_table(page: str) -> str:
    """``page`` with what stands between the two markers replaced. Raises ValueError when a marker is missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
