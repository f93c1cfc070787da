"""paged_kv: turns attention over a packed batch into attention over a cache of earlier tokens.

Every `attention` becomes `kv_write` + `paged_attention` on a key and a value cache of its layer. The rest of the graph,
and with it every weight and kernel, stays the one that trains. A layer that attends to keys and values of one before it is
handed that layer's caches in their place: it reads them, and has none of its own.
"""

from __future__ import annotations

from ..ir.builder import Builder
from ..ir.graph import STATE, Graph, Node, Region, Value
from ..ir.spec import check

BLOCK_SIZE = 16
"""Tokens of one cache block."""


def paged_kv(graph: Graph) -> Graph:
    """Adds inputs sequence_ids [T], slots [T] and block_tables ["B", "M"]; caches have ["S", kv heads, head dim] rows.
    ValueError for attention that cannot read a cache."""
    caches = {region: _own_caches(graph, region) for region in graph.layer_regions()}
    before = graph.prologue
    for region in (graph.regions[name] for name in graph.layers):
        for value, source in zip(region.carry_in, before.carry_out):
            cache = caches.get(before, {}).get(source)
            if cache is not None:
                value.shape, value.dtype = cache.shape, cache.dtype
                caches[region][value] = value
        before = region
    for region in graph.layer_regions():
        _page(graph, region, caches[region])
    graph.inputs.pop("doc_starts", None)
    return check(graph.record("paged_kv"))


def _own_caches(graph: Graph, region: Region) -> dict[Value, Value]:
    """Caches for the keys and values that the region makes and attends to."""
    caches: dict[Value, Value] = {}
    for node in region.forward:
        if node.op != "attention":
            continue
        if not node.attrs["causal"]:
            raise ValueError("paged_kv: attention that looks ahead cannot decode token by token")
        suffix = "" if not region.states else str(len(region.states) // 2)
        k, v = node.inputs[1:3]
        if k in region.carry_in or v in region.carry_in:
            continue
        for name, value in (("key_cache", k), ("value_cache", v)):
            cache = graph.value(name + suffix, ("S", *value.shape[1:]), value.dtype, STATE, role=name)
            region.states[cache.name] = caches[value] = cache
    return caches


def _page(graph: Graph, region: Region, caches: dict[Value, Value]) -> None:
    nodes, region.forward = region.forward, []
    handed = set(region.carry_in) & set(caches)
    for node in nodes:
        if node.op == "attention":
            _attend(graph, region, node, caches)
        elif handed & set(node.inputs):
            raise ValueError(f"paged_kv: keys and values of another layer can only be attended to; {node!r} reads them")
        else:
            region.forward.append(node)
    region.carry_out = tuple(caches.get(value, value) for value in region.carry_out)


def _attend(graph: Graph, region: Region, node: Node, caches: dict[Value, Value]) -> None:
    q, k, v = node.inputs[:3]
    if k not in caches or v not in caches:
        raise ValueError(f"paged_kv: the keys and values of {node!r} are not both a layer's, as its attention reads them")
    b = Builder(graph, region, region.forward)
    if k not in region.carry_in:
        slots = graph.input("slots", ("T",), "i32")
        b.op("kv_write", k, v, slots, inout={"key_cache": caches[k], "value_cache": caches[v]})
    b.op(
        "paged_attention", q, caches[k], caches[v], graph.input("sequence_ids", ("T",), "i32"),
        graph.input("positions", ("T",), "i32"), graph.input("block_tables", ("B", "M"), "i32"),
        scale=node.attrs["scale"], window=node.attrs["window"], softcap=node.attrs["softcap"], block_size=BLOCK_SIZE,
    )
    region.forward[-1].outputs = (node.outputs[0],)
