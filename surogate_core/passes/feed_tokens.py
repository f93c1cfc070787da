"""feed_tokens: lets a program take ids that the step before it sampled, which only the device knows yet.

A negative token stands for the last id of its sequence; whatever reads input tokens then reads the result of op feed_tokens.
"""

from __future__ import annotations

from ..ir.builder import Builder
from ..ir.graph import Graph
from ..ir.spec import check


def feed_tokens(graph: Graph) -> Graph:
    """Adds inputs sequence_ids [T] (shared with `paged_kv`) and last_ids ["B"]."""
    tokens = graph.input("tokens", ("T",), "i32")
    sequence_ids, last_ids = graph.input("sequence_ids", ("T",), "i32"), graph.input("last_ids", ("B",), "i32")
    for region in graph.ordered_regions():
        if tokens not in region.carry_out and not any(tokens in node.inputs for node in region.forward):
            continue
        nodes, region.forward = region.forward, []
        ids = Builder(graph, region, region.forward).op("feed_tokens", tokens, sequence_ids, last_ids, label="ids")
        for node in nodes:
            node.inputs = tuple(ids if value is tokens else value for value in node.inputs)
        region.forward += nodes
        region.carry_out = tuple(ids if value is tokens else value for value in region.carry_out)
    return check(graph.record("feed_tokens"))
