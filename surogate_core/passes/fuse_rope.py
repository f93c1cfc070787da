"""fuse_rope: rotating queries and keys and writing the cache become one op, `rope_kv_write`, with norms of their heads.

Where sequences go on by a token each, a kernel takes hardly longer than its launch, and three are three times as many as
one. It runs after `paged_kv`.
"""

from __future__ import annotations

from ..ir.builder import Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from .uses import uses


def fuse_rope(graph: Graph, norms: bool = False) -> Graph:
    """Layers whose queries or keys are not rotated, or not alike, stay as they are. ``norms``: where heads of q and of k
    go through `rms_norm` alike it becomes part of the op too, and its result is not rounded before it turns."""
    count = 0
    for region in graph.layer_regions():
        for node in [node for node in region.forward if node.op == "kv_write"]:
            count += _fuse(graph, region, node, norms)
    return check(graph.record(f"fuse_rope({count} layers)"))


def _fuse(graph: Graph, region: Region, write: Node, norms: bool) -> bool:
    k, v, slots = write.inputs
    caches = dict(zip(("key_cache", "value_cache"), write.outputs, strict=True))
    attention = next(n for n in region.forward if n.op == "paged_attention" and n.inputs[1] is write.outputs[0])
    q = attention.inputs[0]
    of_q, of_k = _only_maker(graph, region, q, "rope"), _only_maker(graph, region, k, "rope")
    if of_q is None or of_k is None or of_q.inputs[1:] != of_k.inputs[1:] or of_q.attrs != of_k.attrs:
        return False
    if of_q.attrs["inverse"] or not q.dtype == k.dtype == v.dtype:
        return False
    at = region.forward.index(write)
    if region.forward.index(of_q) > at:
        return False
    gone = [of_q, of_k]
    heads, weights, attrs = [of_q.inputs[0], of_k.inputs[0]], [], {"interleaved": of_q.attrs["interleaved"]}
    found = _norms(graph, region, heads) if norms else None
    if found is not None:
        gone += found
        heads, weights = ([norm.inputs[i] for norm in found] for i in (0, 1))
        attrs |= {name: found[0].attrs[name] for name in ("eps", "unit_offset")}
    nodes: list[Node] = []
    Builder(graph, region, nodes).op(
        "rope_kv_write", *heads, v, *of_q.inputs[1:], slots, *weights, inout=caches, label=q.name, **attrs)
    nodes[0].outputs = (q, *nodes[0].outputs[1:])  # what reads it stays as it is
    region.forward[at] = nodes[0]
    region.forward[:] = [node for node in region.forward if node not in gone]
    return True


def _norms(graph: Graph, region: Region, heads: list[Value]) -> list[Node] | None:
    """The `rms_norm` of each of ``heads``, where all have one, alike and between values of one dtype."""
    of_q, of_k = (_only_maker(graph, region, value, "rms_norm") for value in heads)
    if of_q is None or of_k is None or any(of_q.attrs[name] != of_k.attrs[name] for name in ("eps", "unit_offset")):
        return None
    rounded = any(norm.inputs[0].dtype != norm.outputs[0].dtype for norm in (of_q, of_k))
    return None if rounded else [of_q, of_k]


def _only_maker(graph: Graph, region: Region, value: Value, op: str) -> Node | None:
    """The ``op`` that makes ``value``, if nothing else reads what it makes than one op does this."""
    maker = next((node for node in region.forward if value in node.outputs), None)
    if maker is None or maker.op != op:
        return None
    counts = uses(graph, region)
    return maker if sum(counts[made] for made in maker.outputs if made is not None) == 1 else None
