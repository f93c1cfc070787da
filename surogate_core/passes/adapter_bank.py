"""adapter_bank: adds to every linear layer of the stack the low-rank branch that each token chooses.

    y = x W^T   becomes   y = x W^T + (x A[slot]^T) B[slot]^T        with slot = adapter_slots[t], nothing where it is negative

Banks hold one pair a slot, written from outside; each adapter's scale is folded into its B. Run it after `fuse_projections`,
so that programs with banks and without read the same joined weights, and before `fuse`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.builder import SLICE, Builder
from ..ir.graph import STATE, Graph, Node, Region, Value
from ..ir.spec import check

WEIGHT = 1


@dataclass(frozen=True)
class BankSpec:
    """slots: adapters held at once. rank: of the widest; what an adapter lacks of it is zero."""

    slots: int
    rank: int


def bank_names(weight_name: str) -> tuple[str, str]:
    """Names of the banks beside a weight: "attn.q.weight" -> "attn.q.bank_a" [slots, rank, in], "attn.q.bank_b" [slots, out,
    rank]."""
    stem = weight_name.removesuffix(".weight")
    return f"{stem}.bank_a", f"{stem}.bank_b"


def adapter_bank(graph: Graph, spec: BankSpec) -> Graph:
    """Adds input adapter_slots i32 [T], and states of the layers named as `bank_names` says, in the compute dtype."""
    for region in graph.layer_regions():
        sliced: dict[Value, Node] = {}
        nodes, region.forward = region.forward, []
        for node in nodes:
            region.forward.append(node)
            if node.op == SLICE and node.inputs[0] in sliced:
                product = sliced[node.inputs[0]]
                _add(graph, region, node, product.inputs[0], _part_at(product, node.attrs["start"]), spec)
            elif node.op == "linear" and node.inputs[WEIGHT].role is not None:
                weight = node.inputs[WEIGHT]
                if weight.parts:
                    sliced[node.outputs[0]] = node
                elif region.params.get(weight.name) is weight:
                    _add(graph, region, node, node.inputs[0], weight, spec)
    return check(graph.record("adapter_bank"))


def _part_at(product: Node, column: int) -> Value:
    """The one of the joined weights that makes the columns from ``column`` on."""
    first = 0
    for part in product.inputs[WEIGHT].parts:
        if first == column:
            return part
        first += part.shape[0]
    raise ValueError(f"adapter_bank: no part of {product!r} begins at column {column}")


def _add(graph: Graph, region: Region, node: Node, x: Value, weight: Value, spec: BankSpec) -> None:
    """Puts the branch behind ``node``, whose result keeps its identity as the sum."""
    result = node.outputs[0]
    base = graph.value(result.name, result.shape, result.dtype, role=result.role)
    node.outputs = (base,)
    outputs, inputs = weight.shape
    banks = []
    for name, shape in zip(bank_names(weight.name), ((spec.slots, spec.rank, inputs), (spec.slots, outputs, spec.rank))):
        region.states[name] = graph.value(name, shape, "compute", STATE, role="bank")
        banks.append(region.states[name])
    slots = graph.input("adapter_slots", ("T",), "i32")
    Builder(graph, region, region.forward).op("banked_lora", x, *banks, slots, base, label=result.name)
    region.forward[-1].outputs = (result,)
