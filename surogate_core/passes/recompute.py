"""recompute: trades time for memory, layer body by layer body, until the saved activations fit a budget in bytes.

Every saved activation is either kept from the forward pass or computed again at the start of the layer's backward pass by
clones of the nodes that made it. Clones run the same kernels on the same bits, so results do not change by a bit. The
choice is greedy: at each step, the value whose recomputation frees the most bytes for each estimated microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .. import ops
from ..ir.builder import PLACEMENTS, SLICE, VIEW
from ..ir.graph import ACTIVATION, Graph, Node, Region, Value
from ..ir.spec import check
from ..ops.record import TensorType
from ..weights.formats import byte_count
from .dead_code import writes_storage

# The ratio of the two decides, not their size: about what a core or a device sustains per microsecond.
FLOPS_PER_MICROSECOND = 300e3
BYTES_PER_MICROSECOND = 20e3


def value_bytes(value: Value, bindings: Mapping[str, int]) -> int:
    """Bytes of a value once symbolic dimensions are bound."""
    return byte_count(value.dtype, [bindings[dim] if isinstance(dim, str) else dim for dim in value.shape])


@dataclass
class _Body:
    """One layer body, with what the choice needs to know about it."""

    region: Region
    layers: int
    maker: dict[Value, Node]
    chosen: set[Node] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph, region: Region) -> _Body:
        maker = {v: n for n in region.forward for v in n.outputs if v is not None}
        return cls(region, graph.layers.count(region.name), maker)

    def root(self, value: Value) -> Value:
        """The value whose storage a chain of views shares."""
        while value in self.maker and self.maker[value].op == VIEW:
            value = self.maker[value].inputs[0]
        return value

    def is_again(self, value: Value, chosen: set[Node]) -> bool:
        """Whether ``value`` is made again when the nodes in ``chosen`` are: a slice is when its source is."""
        node = self.maker.get(value)
        if node is not None and node.op == SLICE:
            return self.is_again(self.root(node.inputs[0]), chosen)
        return node in chosen

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
            if self.is_again(value, chosen):
                pending += [v for v in self.maker[value].inputs if v is not None]
            else:
                kept.add(value)
        return kept

    def saved(self, chosen: set[Node], bindings: Mapping[str, int]) -> int:
        """Bytes of those values in all layers of this body."""
        return self.layers * sum(value_bytes(v, bindings) for v in self.kept(chosen))


def recompute(graph: Graph, saved_budget: int, bindings: Mapping[str, int]) -> Graph:
    """Recomputes until what all layers save takes at most ``saved_budget`` bytes, or nothing more can be freed."""
    bodies = [_Body.of(graph, region) for region in graph.layer_regions()]
    while sum(b.saved(b.chosen, bindings) for b in bodies) > saved_budget:
        best = max(
            ((_gain(body, extra, bindings), i, extra)
             for i, body in enumerate(bodies) for extra in _candidates(body)),
            key=lambda entry: entry[0], default=(0.0, 0, None),
        )
        if best[0] <= 0:
            break
        bodies[best[1]].chosen |= best[2]
    count = sum(_clone(graph, body) for body in bodies)
    return check(graph.record(f"recompute({count} nodes)"))


def saved_bytes(graph: Graph, bindings: Mapping[str, int]) -> int:
    """Bytes that all layers keep from the forward for the backward pass."""
    return sum(_Body.of(graph, region).saved(set(), bindings) for region in graph.layer_regions())


def _candidates(body: _Body) -> Iterable[set[Node]]:
    """For each kept value, the nodes that make it again from the other kept values. In the order in which values were made:
    a set's own order follows addresses, and of equal gains the first is taken."""
    kept = body.kept(body.chosen)
    for value in sorted(kept, key=lambda v: v.id):
        extra: set[Node] = set()
        pending = [value]
        while pending:
            node = body.maker.get(body.root(pending.pop()))
            if node is not None and node.op == SLICE:
                pending.append(node.inputs[0])
                continue
            if node is None or node in extra or node in body.chosen or writes_storage(node):
                continue
            extra.add(node)
            pending += [v for v in node.inputs if v is not None and body.root(v) not in kept]
        if extra:
            yield extra


def _gain(body: _Body, extra: set[Node], bindings: Mapping[str, int]) -> float:
    """Bytes freed for each microsecond of extra work."""
    freed = body.saved(body.chosen, bindings) - body.saved(body.chosen | extra, bindings)
    cost = body.layers * math.fsum(_microseconds(n, bindings) for n in extra)  # of a set: exact, so in any order
    return freed / (cost + 1e-3)


def _microseconds(node: Node, bindings: Mapping[str, int]) -> float:
    traffic = sum(
        value_bytes(v, bindings) for v in (*node.inputs, *node.outputs) if v is not None and v.kind == ACTIVATION
    )
    flops = 0.0
    rule = ops.get(node.op).flops
    if rule is not None:
        bound = [
            None if v is None else TensorType(tuple(bindings.get(d, d) for d in v.shape), v.dtype)
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
        again = node in body.chosen or (node.op in PLACEMENTS and not makes_kept)
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
