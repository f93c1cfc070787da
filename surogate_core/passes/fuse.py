"""fuse: rewrites that save memory traffic and never change a result beyond one rounding.

- add_into: ``add(a, p)`` where p is a product or norm gradient that nobody else reads becomes that op's addend. Through a
  chain of addends (a LoRA branch) the sum moves to the chain's first link.
- loss_with_gradient: the loss and its gradient need the same logits; one sweep over the vocabulary makes both.
"""

from __future__ import annotations

from .. import ops
from ..ir.builder import PLACEMENTS
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from .uses import uses


def fuse(graph: Graph) -> Graph:
    _loss_with_gradient(graph)
    for region in graph.ordered_regions():
        region.forward[:] = _add_into(graph, region, region.forward)
        region.backward[:] = _add_into(graph, region, region.backward)
    return check(graph.record("fuse"))


def _addend_index(node: Node) -> int | None:
    names = [operand.name for operand in ops.get(node.op).inputs] if node.op not in PLACEMENTS else []
    return names.index("addend") if "addend" in names else None


def _add_into(graph: Graph, region: Region, nodes: list[Node]) -> list[Node]:
    counts = uses(graph, region)
    maker = {v: n for n in nodes for v in n.outputs if v is not None}
    position = {n: i for i, n in enumerate(nodes)}
    removed: set[Node] = set()
    for node in nodes:
        if node.op != "add":
            continue
        a, b = node.inputs
        chain = _chain(b, counts, maker, a, position)
        if chain is None:
            a, b = b, a
            chain = _chain(b, counts, maker, a, position)
        result = node.outputs[0]
        if chain is None or a.dtype != result.dtype or node in removed:
            continue
        _push(chain, a, result)
        maker[result] = chain[0]
        removed.add(node)
    return [n for n in nodes if n not in removed]


def _chain(value, counts, maker, addend, position) -> list[Node] | None:
    """Nodes from the maker of ``value`` down its addends to one whose addend is free, if all are read only once and
    ``addend`` is made before the last of them runs."""
    chain: list[Node] = []
    while True:
        node = maker.get(value)
        index = None if node is None else _addend_index(node)
        if index is None or counts[value] != 1:
            return None
        chain.append(node)
        if node.inputs[index] is None:
            source = maker.get(addend)
            ready = source is None or position[source] < position[node]
            return chain if ready and source not in chain else None
        value = node.inputs[index]


def _push(chain: list[Node], addend: Value, result: Value) -> None:
    """Gives ``addend`` to the last node of the chain; the first node makes ``result``."""
    for node in chain:
        node.attrs = {**node.attrs, **({"out_dtype": result.dtype} if "out_dtype" in node.attrs else {})}
        node.outputs[0].dtype = result.dtype
    last = chain[-1]
    index = _addend_index(last)
    last.inputs = (*last.inputs[:index], addend, *last.inputs[index + 1:])
    chain[0].outputs = (result, *chain[0].outputs[1:])


def _loss_with_gradient(graph: Graph) -> None:
    region = graph.epilogue
    for forward in region.forward:
        if forward.op != "linear_cross_entropy":
            continue
        for node in region.backward:
            if node.op == "linear_cross_entropy_grad" and node.inputs[:3] == forward.inputs[:3]:
                region.backward.remove(node)
                node.outputs = (forward.outputs[0], *node.outputs[1:])
                region.forward[region.forward.index(forward)] = node
                break
