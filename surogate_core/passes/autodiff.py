"""autodiff: walks each region backwards with the gradient rules of its ops.

The body of a layer is differentiated once. A region's backward list starts from the gradients of what it hands on
(``grad_in``) and ends with the gradients of what it was handed (``grad_out``). Gradients of parameters are accumulated in
place by the rules themselves; a rule that cannot do so returns a plain gradient, which is then added.
"""

from __future__ import annotations

import numpy as np

from .. import ops
from ..ir.builder import SLICE, VIEW, GradientBuilder
from ..ir.graph import PARAM, Graph, Node, Region, Value
from ..ir.spec import check


def autodiff(graph: Graph) -> Graph:
    """Fills every region's backward list with the gradient of output "loss" to all trainable parameters.

    Raises ValueError when nothing is trainable, or when the loss reaches a trainable parameter only through an op that
    has no gradient rule.
    """
    if not any(v.trainable for r in graph.ordered_regions() for v in r.params.values()):
        raise ValueError("autodiff: no parameter is trainable; choose LoRA target modules or full fine-tuning")
    learned = _learned(graph)
    loss = graph.outputs["loss"]
    seed = graph.constant("one", np.ones(1, np.float32))
    _differentiate(graph, graph.epilogue, learned[graph.epilogue], {loss: [seed]})
    for region in graph.layer_regions():
        _differentiate(graph, region, learned[region], _carry_seeds(graph, region))
    if any(v in learned[graph.prologue] for v in graph.prologue.carry_out):
        _differentiate(graph, graph.prologue, learned[graph.prologue], _carry_seeds(graph, graph.prologue))
    return check(graph.record("autodiff"))


def _learned(graph: Graph) -> dict[Region, set[Value]]:
    """By region, the values that something trainable lies upstream of, in one of its layers at least."""
    learned = {region: _needs(region, set()) for region in graph.ordered_regions()}
    order = [graph.prologue, *(graph.regions[name] for name in graph.layers), graph.epilogue]
    settled = False
    while not settled:
        settled = True
        for before, region in zip(order, order[1:]):
            handed = {v for v, source in zip(region.carry_in, before.carry_out) if source in learned[before]}
            if not handed <= learned[region]:
                learned[region] = _needs(region, learned[region] | handed)
                settled = False
    return learned


def _needs(region: Region, taken: set[Value]) -> set[Value]:
    """``taken``, and the values that it or something trainable lies upstream of."""
    needs = set(taken)
    for node in region.forward:
        if any(v is not None and (v.trainable or v in needs) for v in node.inputs):
            needs |= {v for v in node.inputs if v is not None and v.trainable}
            needs |= {v for v in node.outputs if v is not None and v.dtype != "i32"}
    return needs


def _carry_seeds(graph: Graph, region: Region) -> dict[Value, list[Value]]:
    region.grad_in = tuple(graph.value(f"d_{v.name}", v.shape, v.dtype, role=v.role) for v in region.carry_out)
    seeds: dict[Value, list[Value]] = {}
    for value, grad in zip(region.carry_out, region.grad_in):
        seeds.setdefault(value, []).append(grad)
    return seeds


def _differentiate(graph: Graph, region: Region, needs: set[Value], grads: dict[Value, list[Value]]) -> None:
    builder = GradientBuilder(graph, region, needs)
    slices: dict[Value, list[Node]] = {}
    for node in region.forward:
        if node.op == SLICE:
            slices.setdefault(node.inputs[0], []).append(node)
    for node in reversed(region.forward):
        if node.op == SLICE:
            continue  # its gradient is columns of its source's
        if not any(v in needs for v in node.inputs if v is not None):
            continue
        for value in node.outputs:
            if value in slices:
                _join_slices(builder, grads, value, slices[value])
        incoming = [_total(builder, grads, v) for v in node.outputs]
        if all(g is None for g in incoming):
            continue
        for value, grad in zip(node.inputs, _input_grads(builder, node, incoming)):
            if value is None or grad is None or value not in needs:
                continue
            if value.kind == PARAM:
                builder.accumulate(value, "accumulate", grad)
            else:
                grads.setdefault(value, []).append(grad)
    region.grad_out = tuple(_total(builder, grads, v) if v in needs else None for v in region.carry_in)


def _input_grads(builder: GradientBuilder, node, incoming):
    if node.op == VIEW:
        return [builder.view(incoming[0], node.inputs[0].shape)]
    rule = ops.get(node.op).vjp
    if rule is None:
        raise ValueError(f"op {node.op} has no gradient rule, and a trainable parameter lies behind it ({node!r})")
    return rule(builder, node, incoming)


def _join_slices(builder: GradientBuilder, grads: dict[Value, list[Value]], value: Value, nodes: list[Node]) -> None:
    """Adds the gradient of ``value`` that those of its slices are the columns of."""
    nodes = sorted(nodes, key=lambda n: n.attrs["start"])
    parts = [_total(builder, grads, n.outputs[0]) for n in nodes]
    if all(part is None for part in parts):
        return
    ends = [0, *(n.attrs["stop"] for n in nodes)]
    if None in parts or ends != [*(n.attrs["start"] for n in nodes), value.shape[1]]:
        raise ValueError(f"the slices of {value!r} that the loss depends on are not all of its columns, each once")
    grads.setdefault(value, []).append(builder.join(parts, f"d_{value.name}"))


def _total(builder: GradientBuilder, grads: dict[Value, list[Value]], value: Value | None) -> Value | None:
    if value is None or not grads.get(value):
        return None
    if len(grads[value]) > 1:
        grads[value] = [builder.sum(grads[value])]
    return grads[value][0]
