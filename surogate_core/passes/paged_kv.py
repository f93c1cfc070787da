"""paged_kv: turns attention over a packed batch into attention over a cache of earlier tokens.

Every `attention` becomes `kv_write` + `paged_attention` on a key and a value cache of its layer. The rest of the graph,
and with it every weight and kernel, stays the one that trains.
"""

from __future__ import annotations

from ..ir.builder import Builder
from ..ir.graph import STATE, Graph, Node, Region
from ..ir.spec import check

BLOCK_SIZE = 16
"""Tokens of one cache block."""


def paged_kv(graph: Graph) -> Graph:
    """Adds inputs sequence_ids [T], slots [T] and block_tables ["B", "M"]; caches have ["S", kv heads, head dim] rows."""
    for region in graph.layer_regions():
        nodes, region.forward = region.forward, []
        for node in nodes:
            if node.op == "attention":
                _page(graph, region, node)
            else:
                region.forward.append(node)
    graph.inputs.pop("doc_starts", None)
    return check(graph.record("paged_kv"))


def _page(graph: Graph, region: Region, node: Node) -> None:
    q, k, v = node.inputs[:3]
    if not node.attrs["causal"]:
        raise ValueError("paged_kv: attention that looks ahead cannot decode token by token")
    suffix = "" if not region.states else str(len(region.states) // 2)
    caches = []
    for name, value in (("key_cache", k), ("value_cache", v)):
        cache = graph.value(name + suffix, ("S", *value.shape[1:]), value.dtype, STATE, role=name)
        region.states[cache.name] = cache
        caches.append(cache)
    b = Builder(graph, region, region.forward)
    slots = graph.input("slots", ("T",), "i32")
    b.op("kv_write", k, v, slots, inout={"key_cache": caches[0], "value_cache": caches[1]})
    b.op(
        "paged_attention", q, *caches, graph.input("sequence_ids", ("T",), "i32"),
        graph.input("positions", ("T",), "i32"), graph.input("block_tables", ("B", "M"), "i32"),
        scale=node.attrs["scale"], window=node.attrs["window"], softcap=node.attrs["softcap"], block_size=BLOCK_SIZE,
    )
    region.forward[-1].outputs = (node.outputs[0],)
