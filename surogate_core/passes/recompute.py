"""recompute: trades time for memory, until the saved activations fit a budget in bytes.

Every saved activation is either kept from the forward pass or computed again at the start of the layer's backward pass by
clones of the nodes that made it. Clones run the same kernels on the same bits, so results do not change by a bit.

All ways to drop some of a layer's large activations are priced in bytes freed and in estimated time. Layers go from one way
to the next along the convex hull of these, the cheapest bytes first; the last step is taken by only as many layers as it
needs, the earliest ones: when the memory is fullest, at the end of the forward pass, the last layers' turn has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import ops
from ..ir.builder import JOIN, PLACEMENTS, SLICE, VIEW
from ..ir.graph import ACTIVATION, Graph, Node, Region, Value
from ..ir.spec import check
from ..ops.record import TensorType
from ..weights.formats import byte_count
from .dead_code import writes_storage

CANDIDATES = 10
"""The most activations of a layer, the largest ones, of which all combinations are priced."""


@dataclass(frozen=True)
class Machine:
    """What is sustained, about, and what a call costs before it does anything. Only the ratios decide."""

    flops_per_microsecond: float
    bytes_per_microsecond: float
    microseconds_per_call: float


MACHINES = {"cpu": Machine(300e3, 20e3, 0.0), "cuda": Machine(650e6, 3.5e6, 2.0)}
"""A processor's core, and a Hopper GPU. Other backends are priced as a core."""


def value_bytes(value: Value, bindings: Mapping[str, int]) -> int:
    """Bytes of a value once symbolic dimensions are bound."""
    return byte_count(value.dtype, [bindings[dim] if isinstance(dim, str) else dim for dim in value.shape])


class _Body:
    """One layer body, with what the choice needs to know about it. ``chosen`` are nodes that are computed again."""

    def __init__(self, graph: Graph, region: Region, bindings: Mapping[str, int], machine: Machine) -> None:
        self.region, self.bindings = region, bindings
        self.layers = [i for i, name in enumerate(graph.layers) if name == region.name]
        self.maker = {v: n for n in region.forward for v in n.outputs if v is not None}
        self.cost = {n: _microseconds(n, bindings, machine) for n in region.forward if n.op not in PLACEMENTS}
        joins = [n for n in region.forward if n.op == JOIN]
        self.joined = {self._seen_through(v): n.outputs[0] for n in joins for v in n.inputs}
        self.handed_on = {self.root(v) for v in region.carry_out}

    def _seen_through(self, value: Value) -> Value:
        while value in self.maker and self.maker[value].op == VIEW:
            value = self.maker[value].inputs[0]
        return value

    def root(self, value: Value) -> Value:
        """The value whose storage ``value`` shares, and which is kept or made again as a whole: what a chain of views is of,
        or what it is joined in, or what a slice of such a value lies in."""
        value = self._seen_through(value)
        if value in self.joined:
            return self.root(self.joined[value])
        node = self.maker.get(value)
        if node is not None and node.op == SLICE:
            source = self.root(node.inputs[0])
            if self.is_joined(source):
                return source
        return value

    def is_joined(self, value: Value) -> bool:
        """Whether other values lie in this one."""
        return value in self.maker and self.maker[value].op == JOIN

    def makers(self, root: Value) -> list[Node]:
        """The nodes that write what lies in ``root``."""
        node = self.maker.get(root)
        if node is None or node.op != JOIN:
            return [] if node is None else [node]
        return [n for v in node.inputs for n in self.makers(self._seen_through(v))]

    def is_again(self, value: Value, chosen: set[Node]) -> bool:
        """Whether ``value`` is made again when the nodes in ``chosen`` are: a slice is when its source is, and what is joined
        when any part of it is: then all of it. What later layers may read is there anyway."""
        if value in self.handed_on:
            return False
        node = self.maker.get(value)
        if node is not None and node.op == SLICE:
            return self.is_again(self.root(node.inputs[0]), chosen)
        return any(n in chosen for n in self.makers(value))

    def kept(self, chosen: set[Node]) -> set[Value]:
        """Forward values that must stay in memory."""
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
                pending += self._read_to_make(value)
            else:
                kept.add(value)
        return kept

    def _read_to_make(self, root: Value) -> list[Value]:
        """What the nodes that make ``root`` read; but not what they made of it themselves."""
        node = self.maker[root]
        if node.op == SLICE:
            return [node.inputs[0]]
        read = [v for n in self.makers(root) for v in n.inputs if v is not None]
        return [v for v in read if self.root(v) is not root]

    def saved(self, chosen: set[Node]) -> int:
        """Bytes of those values in one layer. What layers hand on is counted once: where it is handed on no further."""
        return sum(value_bytes(v, self.bindings) for v in self.kept(chosen) - self.handed_on)

    def nodes_for(self, dropped: Iterable[Value], kept: set[Value]) -> set[Node]:
        """What makes ``dropped`` again from ``kept`` and from what enters the layer."""
        chosen: set[Node] = set()
        pending = list(dropped)
        while pending:
            for node in self.makers(self.root(pending.pop())):
                if node.op == SLICE:
                    pending.append(node.inputs[0])
                elif node not in chosen and not writes_storage(node):
                    chosen.add(node)
                    there = kept | self.handed_on
                    pending += [v for v in node.inputs if v is not None and self.root(v) not in there]
                    pending += [v for v in node.outputs if v is not None and self.is_joined(self.root(v))]
        return chosen


@dataclass(frozen=True)
class _Way:
    """One way to run a layer: what it keeps, in bytes, and what it computes again, in microseconds."""

    bytes: int
    cost: float
    chosen: frozenset[Node]


def recompute(graph: Graph, saved_budget: int, bindings: Mapping[str, int], backend: str = "cpu") -> Graph:
    """Recomputes until what all layers save takes at most ``saved_budget`` bytes, or nothing more can be freed."""
    machine = MACHINES.get(backend, MACHINES["cpu"])
    bodies = [_Body(graph, region, bindings, machine) for region in graph.layer_regions()]
    count = 0
    for body, parts in zip(bodies, _choose(bodies, saved_budget)):
        for way, layers in parts[1:]:
            name = f"{body.region.name}.{len(layers)}"
            copy = graph.divide(body.region.name, set(layers), name)
            twin = dict(zip(body.region.forward, copy.forward))
            count += _clone(graph, _Body(graph, copy, bindings, machine), {twin[n] for n in way.chosen})
        count += _clone(graph, body, set(parts[0][0].chosen))
    return check(graph.record(f"recompute({count} nodes)"))


def saved_bytes(graph: Graph, bindings: Mapping[str, int]) -> int:
    """Bytes that all layers keep from the forward for the backward pass."""
    bodies = [_Body(graph, region, bindings, MACHINES["cpu"]) for region in graph.layer_regions()]
    return sum(len(body.layers) * body.saved(set()) for body in bodies)


def _choose(bodies: Sequence[_Body], budget: int) -> list[list[tuple[_Way, list[int]]]]:
    """For each body, its ways and the layers that go each; the first of them is of the region as it is."""
    hulls = [_hull(_ways(body)) for body in bodies]
    parts = [[(hull[0], body.layers)] for hull, body in zip(hulls, bodies)]
    total = sum(len(body.layers) * hull[0].bytes for hull, body in zip(hulls, bodies))
    steps = []
    for i, hull in enumerate(hulls):
        rate = math.inf
        for a, b in zip(hull, hull[1:]):
            rate = min(rate, _rate(a, b))  # along a hull rates fall; rounding must not swap two steps
            steps.append((rate, i, a, b))
    for _, i, a, b in sorted(steps, key=lambda step: -step[0]):
        if total <= budget:
            break
        layers = bodies[i].layers
        needed = min(-(-(total - budget) // (a.bytes - b.bytes)), len(layers))
        total -= needed * (a.bytes - b.bytes)
        parts[i] = [(b, layers)] if needed == len(layers) else [(a, layers[needed:]), (b, layers[:needed])]
    return parts


def _ways(body: _Body) -> list[_Way]:
    """Every way to drop some of the largest activations, and the one that drops all. In the order in which values were
    made: a set's own order follows addresses."""
    kept = body.kept(set())
    made = sorted((v for v in kept - body.handed_on if v in body.maker), key=lambda v: v.id)
    largest = sorted(made, key=lambda v: -value_bytes(v, body.bindings))[:CANDIDATES]
    ways: dict[frozenset[Node], _Way] = {}
    for dropped in (*_subsets([v for v in made if v in largest]), made):
        chosen = frozenset(body.nodes_for(dropped, kept - set(dropped)))
        if chosen not in ways:
            cost = math.fsum(body.cost[n] for n in chosen)  # of a set: exact, so in any order
            ways[chosen] = _Way(body.saved(set(chosen)), cost, chosen)
    return list(ways.values())


def _subsets(values: Sequence[Value]) -> Iterable[list[Value]]:
    for bits in range(1 << len(values)):
        yield [v for i, v in enumerate(values) if bits >> i & 1]


def _hull(ways: Sequence[_Way]) -> list[_Way]:
    """From nothing computed again to the fewest bytes, each time along the steepest way down."""
    hull = [ways[0]]
    while lower := [way for way in ways if way.bytes < hull[-1].bytes]:
        hull.append(max(lower, key=lambda way: (_rate(hull[-1], way), -way.bytes)))
    return hull


def _rate(a: _Way, b: _Way) -> float:
    """Bytes freed for each microsecond of extra work."""
    return (a.bytes - b.bytes) / (max(b.cost - a.cost, 0.0) + 1e-3)


def _microseconds(node: Node, bindings: Mapping[str, int], machine: Machine) -> float:
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
    return (traffic / machine.bytes_per_microsecond + flops / machine.flops_per_microsecond
            + machine.microseconds_per_call)


def _clone(graph: Graph, body: _Body, chosen: set[Node]) -> int:
    """Puts clones of the chosen nodes that the backward list needs before it, and makes it read them."""
    region = body.region
    if not chosen:
        return 0
    kept = body.kept(chosen)
    needed: set[Value] = {v for n in region.backward for v in n.inputs if v is not None}
    clones: list[Node] = []
    for node in reversed(region.forward):
        makes_kept = any(body.root(v) in kept for v in node.outputs if v is not None)
        again = node in chosen or (node.op in PLACEMENTS and not makes_kept)
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
