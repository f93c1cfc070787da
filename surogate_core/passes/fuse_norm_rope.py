"""fuse_norm_rope: the norm of heads and their rotation become one op, `norm_rope`, and so do the two gradients.

    y, rstd = rms_norm(x)   q = rope(y)                  become    q, rstd = norm_rope(x)
    dy = rope(dq, inverse)  dx = rms_norm_grad(dy, x)    become    dx = norm_rope_grad(dq, x)

On a device all of it is reading and writing: two tensors instead of four, and three instead of five. It runs after
`precision`, since what is between the two must be of the dtype of what goes in and comes out, and ahead of `recompute`:
what is computed again is then the same op.
"""

from __future__ import annotations

from .. import ops
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from .uses import uses


def fuse_norm_rope(graph: Graph) -> Graph:
    """Pairs stay as they are where something else reads what is between them, as the gradient of a norm's weight does."""
    regions = graph.ordered_regions()
    forward = sum(_fuse(graph, region, region.forward, _forward) for region in regions)
    backward = sum(_fuse(graph, region, region.backward, _backward) for region in regions)
    return check(graph.record(f"fuse_norm_rope({forward} forward, {backward} backward)"))


def _fuse(graph: Graph, region: Region, nodes: list[Node], join) -> int:
    """One node where the second of a pair stood: all that it reads is there by then."""
    maker = {v: n for n in nodes for v in n.outputs if v is not None}
    counts = uses(graph, region)
    count = 0
    for second in list(nodes):
        value = second.inputs[0] if second.inputs else None
        first = maker.get(value) if counts[value] == 1 else None
        fused = None if first is None else join(first, second)
        if fused is not None:
            nodes[nodes.index(second)] = fused
            nodes.remove(first)
            count += 1
    return count


def _forward(norm: Node, rope: Node) -> Node | None:
    if (norm.op, rope.op) != ("rms_norm", "rope") or rope.attrs["inverse"]:
        return None
    x, weight = norm.inputs
    if x.dtype != norm.outputs[0].dtype:
        return None
    attrs = {"interleaved": rope.attrs["interleaved"], **{name: norm.attrs[name] for name in ("eps", "unit_offset")}}
    return _node("norm_rope", (x, weight, *rope.inputs[1:]), (rope.outputs[0], norm.outputs[1]), attrs)


def _backward(rope: Node, norm_grad: Node) -> Node | None:
    if (rope.op, norm_grad.op) != ("rope", "rms_norm_grad") or not rope.attrs["inverse"]:
        return None
    dy, x, weight, rstd, addend = norm_grad.inputs
    if not dy.dtype == x.dtype == norm_grad.outputs[0].dtype:
        return None
    attrs = {"interleaved": rope.attrs["interleaved"], "unit_offset": norm_grad.attrs["unit_offset"]}
    inputs = (rope.inputs[0], x, weight, rstd, *rope.inputs[1:], addend)
    return _node("norm_rope_grad", inputs, norm_grad.outputs, attrs)


def _node(op: str, inputs: tuple[Value | None, ...], outputs: tuple[Value | None, ...], attrs: dict) -> Node:
    return Node(op, inputs, outputs, ops.get(op).complete_attrs(attrs))
