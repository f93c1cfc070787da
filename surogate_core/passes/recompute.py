"""recompute: trades time for memory, layer body by layer body, until the saved activations fit a budget in bytes.

Every saved activation is either kept from the forward pass or computed again at the start of the layer's backward pass by
clones of the nodes that made it. Clones run the same kernels on the same bits, so results do not change by a bit. The
choice is greedy: at each step, the value whose recomputation frees the most bytes for each estimated microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .. import ops
from ..ir.builder import VIEW
from ..ir.graph import ACTIVATION, Graph, Node, Region, Value
from ..ir.spec import check
from .dead_code import writes_storage

BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i32": 4, "i64": 8, "u8": 1, "i8": 1}

# The ratio of the two decides, not their size: about what a core or a device sustains per microsecond.
FLOPS_PER_MICROSECOND = 300e3
BYTES_PER_MICROSECOND = 20e3


def value_bytes(value: Value, bindings: Mapping[str, int]) -> int:
    """Bytes of a plain value once symbolic dimensions are bound."""
    size = BYTES[value.dtype]
    for dim in value.shape:
        size *= bindings[dim] if isinstance(dim, str) else dim
    return size


@dataclass
class _Body:
    """One layer body, with what the choice needs to know about it."""

    region: Region
    layers: int
    maker: dict[Value, Node]
    chosen: set[Node]

    def root(self, value: Value) -> Value:
        """The value whose storage a chain of views shares."""
        while value in self.maker and self.maker[value].op == VIEW:
            value = self.maker[value].inputs[0]
        return value

    def kept(self, chosen: set[Node]) -> set[Value]:
        """Forward values that must stay in memory when the nodes in ``chosen`` are computed again."""
        forward = set(self.maker) | set(self.region.carry_in)
        pending = [v for n in self.region.backward for v in n.inputs if v in forward]
        kept: set[Value] = set()
        seen: set[Value] = set()
        while pending:
            value = self.root(pending.pop())
            if value in seen or value.kind != ACTIVATION or value not in forward:
                continue
            seen.add(value)
            node = self.maker.get(value)
            if node in chosen:
                pending += [v for v in node.inputs if v is not None]
            else:
                kept.add(value)
        return kept


def recompute(graph: Graph, saved_budget: int, bindings: Mapping[str, int]) -> Graph:
    """Recomputes until what all layers save takes at most ``saved_budget`` bytes, or nothing more can be freed."""
    bodies = [
        _Body(r, graph.layers.count(r.name), {v: n for n in r.forward for v in n.outputs if v is not None}, set())
        for r in graph.layer_regions()
    ]

    def saved(body: _Body, chosen: set[Node]) -> int:
        return body.layers * sum(value_bytes(v, bindings) for v in body.kept(chosen))

    while sum(saved(b, b.chosen) for b in bodies) > saved_budget:
        best = max(
            ((_gain(body, extra, saved, bindings), i, extra)
             for i, body in enumerate(bodies) for extra in _candidates(body)),
            key=lambda entry: entry[0], default=(0.0, 0, None),
        )
        if best[0] <= 0:
            break
        bodies[best[1]].chosen |= best[2]
    count = 0
    for body in bodies:
        count += _clone(graph, body)
    return check(graph.record(f"recompute({count} nodes)"))


def saved_bytes(graph: Graph, bindings: Mapping[str, int]) -> int:
    """Bytes that all layers keep from the forward for the backward pass."""
    total = 0
    for region in graph.layer_regions():
        body = _Body(region, 1, {v: n for n in region.forward for v in n.outputs if v is not None}, set())
        total += graph.layers.count(region.name) * sum(value_bytes(v, bindings) for v in body.kept(set()))
    return total


def _candidates(body: _Body) -> Iterable[set[Node]]:
    """For each kept value, the nodes that make it again from the other kept values."""
    kept = body.kept(body.chosen)
    for value in kept:
        extra: set[Node] = set()
        pending = [value]
        while pending:
            node = body.maker.get(body.root(pending.pop()))
            if node is None or node in extra or node in body.chosen or writes_storage(node):
                continue
            extra.add(node)
            pending += [v for v in node.inputs if v is not None and body.root(v) not in kept]
        if extra:
            yield extra


def _gain(body: _Body, extra: set[Node], saved, bindings) -> float:
    """Bytes freed for each microsecond of extra work."""
    freed = saved(body, body.chosen) - saved(body, body.chosen | extra)
    cost = body.layers * sum(_microseconds(n, bindings) for n in extra)
    return freed / (cost + 1e-3)


def _microseconds(node: Node, bindings: Mapping[str, int]) -> float:
    traffic = sum(
        value_bytes(v, bindings) for v in (*node.inputs, *node.outputs) if v is not None and v.kind == ACTIVATION
    )
    flops = 0.0
    rule = ops.get(node.op).flops
    if rule is not None:
        bound = [
            None if v is None else type(v.type)(tuple(bindings.get(d, d) for d in v.shape), v.dtype)
            for v in node.inputs
        ]
        flops = rule(bound, node.attrs)
    return traffic / BYTES_PER_MICROSECOND + flops / FLOPS_PER_MICROSECOND


def _clone(graph: Graph, body: _Body) -> int:
    """Puts clones of the chosen nodes that the backward list needs before it, and makes it read them."""
    region = body.region
    if not body.chosen:
        return 0
    kept = body.kept(body.chosen)
    needed: set[Value] = {v for n in region.backward for v in n.inputs if v is not None}
    clones: list[Node] = []
    for node in reversed(region.forward):
        makes_kept = any(body.root(v) in kept for v in node.outputs if v is not None)
        again = node in body.chosen or (node.op == VIEW and not makes_kept)
        if again and any(v in needed for v in node.outputs):
            clones.append(node)
            needed |= {v for v in node.inputs if v is not None}
    renamed: dict[Value, Value] = {}
    result: list[Node] = []
    for node in reversed(clones):
        outputs = []
        for value in node.outputs:
            if value is not None:
                renamed[value] = graph.value(f"{value.name}.again", value.shape, value.dtype, role=value.role)
            outputs.append(renamed.get(value))
        inputs = tuple(renamed.get(v, v) for v in node.inputs)
        result.append(Node(node.op, inputs, tuple(outputs), dict(node.attrs)))
    for node in region.backward:
        node.inputs = tuple(renamed.get(v, v) for v in node.inputs)
    region.backward[:] = result + region.backward
    return len(result)
