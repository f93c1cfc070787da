"""lora: adds a trainable low-rank branch to the linear layers of the chosen roles and freezes everything else.

    y = x W^T   becomes   y = x W^T + scale * (dropout(x) A^T) B^T        (Hu et al., 2021, arXiv:2106.09685)

with A [rank, in] and B [out, rank]. The rewrite only states the meaning; `fuse` lets the second product add in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir.builder import Builder
from ..ir.graph import Graph, Node, Region
from ..ir.spec import check
from ..ops.record import PerLayer

DROPOUT_STREAMS_PER_LAYER = 64
"""Dropout streams reserved for one layer; stream ids are position in the body + this * layer."""


@dataclass(frozen=True)
class LoraSpec:
    """rank and alpha of the adapters; ``roles`` are the roles of the weights they are added to (None: every linear layer
    of the stack); scale is alpha / rank, or alpha / sqrt(rank) with rank-stabilised scaling (arXiv:2312.03732)."""

    rank: int
    alpha: float
    roles: frozenset[str] | None = None
    dropout: float = 0.0
    rank_stabilised: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def adapter_names(weight_name: str) -> tuple[str, str]:
    """Names of the A and B parameters beside a weight: "attn.q.weight" -> "attn.q.lora_a", "attn.q.lora_b"."""
    stem = weight_name.removesuffix(".weight")
    return f"{stem}.lora_a", f"{stem}.lora_b"


def lora(graph: Graph, spec: LoraSpec, trainable: bool = True) -> Graph:
    """Raises ValueError when a role names no linear layer of the stack."""
    for region in graph.ordered_regions():
        for value in region.params.values():
            value.trainable = False
    found: set[str] = set()
    for region in graph.layer_regions():
        found |= _adapt_region(graph, region, spec, trainable)
    missing = (spec.roles or frozenset()) - found
    if missing or not found:
        roles = sorted({v.role for r in graph.layer_regions() for v in r.params.values() if v.role and len(v.shape) == 2})
        raise ValueError(f"lora: no linear layer has the role {sorted(missing) or spec.roles}; this model has {roles}")
    return check(graph.record("lora"))


def _adapt_region(graph: Graph, region: Region, spec: LoraSpec, trainable: bool) -> set[str]:
    nodes, region.forward = region.forward, []
    found: set[str] = set()
    adapted = 0
    for node in nodes:
        weight = node.inputs[1] if node.op == "linear" else None
        own = weight is not None and region.params.get(weight.name) is weight and weight.role is not None
        if not own or (spec.roles is not None and weight.role not in spec.roles):
            region.forward.append(node)
            continue
        found.add(weight.role)
        _adapt(graph, region, node, spec, trainable, stream=adapted)
        adapted += 1
    return found


def _adapt(graph: Graph, region: Region, node: Node, spec: LoraSpec, trainable: bool, stream: int) -> None:
    b = Builder(graph, region, region.forward)
    x, weight = node.inputs[0], node.inputs[1]
    result = node.outputs[0]
    name_a, name_b = adapter_names(weight.name)
    a = graph.param(region, name_a, (spec.rank, weight.shape[1]), "lora_a")
    lora_b = graph.param(region, name_b, (weight.shape[0], spec.rank), "lora_b")
    a.trainable = lora_b.trainable = trainable

    base = graph.value(result.name, result.shape, result.dtype, role=result.role)
    region.forward.append(Node(node.op, node.inputs, (base,), node.attrs))
    if trainable and spec.dropout > 0:
        seed = graph.input("dropout_seed", (2,), "i32")
        x = b.op("dropout", x, seed, p=spec.dropout, stream_id=PerLayer(stream, DROPOUT_STREAMS_PER_LAYER))
    low = b.op("linear", x, a, label=name_a)
    b.op("linear", low, lora_b, None, base, alpha=spec.scale, label=result.name)
    # The result keeps its identity, so that everything downstream stays as it is.
    region.forward[-1].outputs = (result,)
