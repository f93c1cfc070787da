"""dead_code: removes nodes whose results nobody reads. Nodes that write storage (gradients, caches) always stay."""

from __future__ import annotations

from .. import ops
from ..ir.builder import PLACEMENTS
from ..ir.graph import Graph, Node, Value
from ..ir.spec import check


def writes_storage(node: Node) -> bool:
    """Whether the node changes something that outlives it."""
    if node.op in PLACEMENTS:
        return False
    return any(o.inout and v is not None for o, v in zip(ops.get(node.op).outputs, node.outputs))


def dead_code(graph: Graph) -> Graph:
    for region in graph.ordered_regions():
        live: set[Value] = {v for v in region.grad_out if v is not None}
        region.backward[:] = _sweep(region.backward, live)
        live |= set(region.carry_out)
        if region is graph.epilogue:
            live |= set(graph.outputs.values())
        region.forward[:] = _sweep(region.forward, live)
    return check(graph.record("dead_code"))


def _sweep(nodes: list[Node], live: set[Value]) -> list[Node]:
    kept: list[Node] = []
    for node in reversed(nodes):
        if writes_storage(node) or any(v in live for v in node.outputs):
            kept.append(node)
            live |= {v for v in node.inputs if v is not None}
            _drop_unread_outputs(node, live)
    return kept[::-1]


def _drop_unread_outputs(node: Node, live: set[Value]) -> None:
    """An optional output that nobody reads is not computed."""
    if node.op in PLACEMENTS:
        return
    node.outputs = tuple(
        None if operand.optional and not operand.inout and value is not None and value not in live else value
        for operand, value in zip(ops.get(node.op).outputs, node.outputs)
    )
