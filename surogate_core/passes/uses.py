"""How often values are read: what passes ask before they take away the node that makes one."""

from __future__ import annotations

from collections import Counter

from ..ir.graph import Graph, Region, Value


def uses(graph: Graph, region: Region) -> Counter[Value]:
    """Reads of each value by the region's nodes, and by whoever it is handed on to. A value that is read once by a node is
    read by nothing else where this says 1."""
    counts = Counter(v for n in region.nodes() for v in n.inputs if v is not None)
    counts.update(v for v in (*region.carry_out, *region.grad_out, *graph.outputs.values()) if v is not None)
    return counts
