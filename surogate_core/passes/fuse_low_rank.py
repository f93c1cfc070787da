"""fuse_low_rank: the two gradients that a low-rank branch takes from dy are made by one op, which reads dy once.

    dlow = alpha dy B, dB += alpha dy^T low    becomes    dlow, dB = low_rank_grad(dy, low, B)

dy is as wide as the layer and the rest is narrow, so on a device reading dy is nearly all that either product costs. It runs
after `precision`: the two must read the same dy, in the same dtype.
"""

from __future__ import annotations

from .. import ops
from ..ir.graph import Graph, Node, Region
from ..ir.spec import check
from ..ops.low_rank_grad import MOST

ADDEND = 2
"""Index of a linear_input_grad's addend."""


def fuse_low_rank(graph: Graph) -> Graph:
    """Of every region; pairs stay as they are where what stands between them must stay between them."""
    count = sum(_fuse_region(region) for region in graph.ordered_regions())
    return check(graph.record(f"fuse_low_rank({count} pairs)"))


def _fuse_region(region: Region) -> int:
    nodes = region.backward
    count = 0
    for to_input in [n for n in nodes if n.op == "linear_input_grad" and n.inputs[ADDEND] is None]:
        to_weight = next((n for n in nodes if _are_a_pair(to_input, n)), None)
        at = None if to_weight is None else _place(nodes, to_input, to_weight)
        if at is None:
            continue
        dy, b, _ = to_input.inputs
        others = (None,) * (MOST - 1)
        outputs = (to_input.outputs[0], to_weight.outputs[0], *others)
        nodes[at] = Node("low_rank_grad", (dy, to_weight.inputs[1], b, *others), outputs, _attrs(to_input))
        nodes[:] = [n for n in nodes if n is not to_input and n is not to_weight]
        count += 1
    return count


def _attrs(to_input: Node) -> dict[str, float]:
    return ops.get("low_rank_grad").complete_attrs({"alpha": to_input.attrs["alpha"]})


def _are_a_pair(to_input: Node, to_weight: Node) -> bool:
    dy, b, _ = to_input.inputs
    return (
        to_weight.op == "linear_weight_grad" and to_weight.inputs[0] is dy and to_weight.outputs[0].of is b
        and b.role == "lora_b" and to_weight.attrs["alpha"] == to_input.attrs["alpha"]
        and to_input.outputs[0].dtype == dy.dtype
    )


def _place(nodes: list[Node], to_input: Node, to_weight: Node) -> int | None:
    """The index that both may move to: the first one's, where low is made before it, else the other's, where nobody reads
    dlow before it. None where neither is, or where something between them adds to the same gradient of B: sums keep their
    order."""
    first, last = sorted((nodes.index(to_input), nodes.index(to_weight)))
    between = nodes[first + 1 : last]
    low, dlow, db = to_weight.inputs[1], to_input.outputs[0], to_weight.outputs[0]
    if any(db in n.outputs for n in between):
        return None
    if not any(low in n.outputs for n in between):
        return first
    return None if any(dlow in n.inputs for n in between) else last
