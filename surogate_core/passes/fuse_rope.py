"""fuse_rope: rotating queries and keys and writing the cache become one op, `rope_kv_write`.

Where sequences go on by a token each, a kernel takes hardly longer than its launch, and three are three times as many as
one. It runs after `paged_kv`.
"""

from __future__ import annotations

from ..ir.builder import Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check


def fuse_rope(graph: Graph) -> Graph:
    """Layers whose queries or keys are not rotated, or not alike, stay as they are."""
    count = 0
    for region in graph.layer_regions():
        for node in [node for node in region.forward if node.op == "kv_write"]:
            count += _fuse(graph, region, node)
    return check(graph.record(f"fuse_rope({count} layers)"))


def _fuse(graph: Graph, region: Region, write: Node) -> bool:
    k, v, slots = write.inputs
    caches = dict(zip(("key_cache", "value_cache"), write.outputs, strict=True))
    attention = next(n for n in region.forward if n.op == "paged_attention" and n.inputs[1] is write.outputs[0])
    q = attention.inputs[0]
    of_q, of_k = _rotation(graph, region, q), _rotation(graph, region, k)
    if of_q is None or of_k is None or of_q.inputs[1:] != of_k.inputs[1:] or of_q.attrs != of_k.attrs:
        return False
    if of_q.attrs["inverse"] or not q.dtype == k.dtype == v.dtype:
        return False
    at = region.forward.index(write)
    if region.forward.index(of_q) > at:
        return False
    nodes: list[Node] = []
    Builder(graph, region, nodes).op(
        "rope_kv_write", of_q.inputs[0], of_k.inputs[0], v, *of_q.inputs[1:], slots, inout=caches,
        interleaved=of_q.attrs["interleaved"], label=q.name,
    )
    nodes[0].outputs = (q, *nodes[0].outputs[1:])  # what reads it stays as it is
    region.forward[at] = nodes[0]
    region.forward[:] = [node for node in region.forward if node is not of_q and node is not of_k]
    return True


def _rotation(graph: Graph, region: Region, value: Value) -> Node | None:
    """The `rope` that makes ``value``, if nothing else reads it than the one op."""
    maker = next((node for node in region.forward if value in node.outputs), None)
    readers = sum(node.inputs.count(value) for node in region.forward)
    handed_on = value in region.carry_out or value in graph.outputs.values()
    return maker if maker is not None and maker.op == "rope" and readers == 1 and not handed_on else None
