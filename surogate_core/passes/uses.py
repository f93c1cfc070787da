"""How values are read: what passes ask before they take away the node that makes one, or lay it elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from .. import ops
from ..ir.builder import JOIN, SLICE, VIEW
from ..ir.graph import Graph, Region, Value


def uses(graph: Graph, region: Region) -> Counter[Value]:
    """Reads of each value by the region's nodes, and by whoever it is handed on to. A value that is read once by a node is
    read by nothing else where this says 1."""
    counts = Counter(v for n in region.nodes() for v in n.inputs if v is not None)
    counts.update(v for v in (*region.carry_out, *region.grad_out, *graph.outputs.values()) if v is not None)
    return counts


def readers_take_rows_apart(region: Region, value: Value, kept: Collection[Value]) -> bool:
    """Whether all that reads ``value``, and views of it, takes rows that lie apart. Not where it is joined already, nor where
    it is in ``kept``."""
    same = {value}
    for node in region.nodes():
        if not same.intersection(v for v in node.inputs if v is not None):
            continue
        if node.op == VIEW:
            same.add(node.outputs[0])
        elif node.op == JOIN:
            return False
        elif node.op != SLICE:
            if not all(takes_rows_apart(node.op, i) for i, v in enumerate(node.inputs) if v in same):
                return False
    return same.isdisjoint(kept)


def takes_rows_apart(op: str, index: int, of_output: bool = False) -> bool:
    record = ops.get(op)
    return (record.outputs if of_output else record.inputs)[index].name in record.rows_apart
