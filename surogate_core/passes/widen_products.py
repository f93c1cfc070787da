"""widen_products: the low-rank branch of a frozen product becomes a few more terms of its sums.

    y = x W^T + low (sB)^T        becomes    y = [x | low] [W | sB]^T        with low = x A^T
    dx = dy W + dlow A            becomes    dx = [dy | dlow] [W ; A]        with dlow = dy sB

Where the branch is a product of its own it reads and writes all of y, and dx, once more; a longer sum costs nothing but its
terms. A product whose columns go several ways (q, k and v) has a B for each that is adapted, zero beside it, and the A's one
below the other. low is made in the last columns of x's own memory and dlow in those of dy's: `join` nodes say so. W, A and sB
lie in one matrix (`Widened`), whose copies of A and sB the program makes anew after every update.

It runs after `precision`, on both lists of a body. Products stay as they are where W is quantised, or stored in another
dtype than products read; where the branch has dropout, which x does not; where an op that makes or reads x or dy cannot take
rows that lie apart; and where rows would not begin at multiples of 8 elements, the 16 bytes that fast kernels read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..ir.builder import JOIN, SLICE, VIEW, Builder
from ..ir.graph import PARAM, Graph, Node, Region, Value, Widened
from ..ir.spec import check
from .uses import readers_take_rows_apart, takes_rows_apart

ALIGNMENT = 8
"""Elements."""
_WEIGHT, _ADDEND, _GRAD_ADDEND = 1, 3, 2
"""Indices of inputs: of linear, and the addend of linear_input_grad."""


def widen_products(graph: Graph, dtypes: Mapping[str, str], compute: str, only: Collection[str] | None = None) -> Graph:
    """``dtypes``: stored dtype of every frozen parameter by full name. ``compute``: what products read matrices as. ``only``:
    names of widened weights (`widened_names`) that there may be; None for all that can be."""
    count = 0
    for region in graph.layer_regions():
        layers = [i for i, name in enumerate(graph.layers) if name == region.name]
        stored = _Stored(layers, dtypes, compute)
        for product in [n for n in region.forward if n.op == "linear"]:
            group = _Finder(graph, region, stored).group(product)
            if group is not None and (only is None or group.name in only):
                _widen(graph, region, group)
                count += 1
    return check(graph.record(f"widen_products({count} products)"))


def widened_names(graph: Graph) -> frozenset[str]:
    """Of the weights that have their adapters beside them."""
    return frozenset(name for region in graph.layer_regions() for name in region.widened)


@dataclass(frozen=True)
class _Stored:
    layers: list[int]
    dtypes: Mapping[str, str]
    compute: str

    def as_computed_with(self, weight: Value) -> bool:
        """Whether a weight, or all that is joined in it, is stored in the compute dtype in every layer."""
        parts = weight.parts or (weight,)
        return all(self.dtypes.get(f"layers.{i}.{p.name}") == self.compute for i in self.layers for p in parts)


@dataclass
class _Branch:
    """second: y += s low B^T, for the columns of the product that begin at ``column``; ``part`` is what it adds to."""

    second: Node
    part: Value
    column: int
    first: Node
    rank_start: int
    """Where its columns begin among those that ``first`` makes."""


@dataclass
class _Gradient:
    """dx = dy W + what ``products`` give, one for each first half."""

    node: Node
    products: list[Node]

    @property
    def addend(self) -> Value | None:
        return self.products[-1].inputs[_GRAD_ADDEND]


@dataclass
class _Group:
    """A frozen product with its branches. ``firsts`` make low, each for one branch or, joined, for several."""

    name: str
    product: Node
    slices: list[Node]
    branches: list[_Branch]
    firsts: list[Node]
    gradient: _Gradient | None


class _Finder:
    """Finds groups in one body."""

    def __init__(self, graph: Graph, region: Region, stored: _Stored) -> None:
        self.graph, self.region, self.stored = graph, region, stored
        self.forward, self.backward = _readers(region.forward), _readers(region.backward)
        self.maker = {v: n for n in region.nodes() for v in n.outputs if v is not None}
        self.kept = {*region.carry_in, *region.carry_out, *region.grad_out, *graph.outputs.values()}

    def group(self, product: Node) -> _Group | None:
        x, weight, _, _ = product.inputs
        if not self._is_frozen(weight) or product.attrs["alpha"] != 1.0 or x.dtype != self.stored.compute:
            return None
        slices = [n for n in self.forward.get(product.outputs[0], []) if n.op == SLICE]
        branches = list(self._branches(product, slices))
        firsts = list(dict.fromkeys(b.first for b in branches))
        if not branches or not self._belong_together(branches, firsts):
            return None
        ranks = sum(f.outputs[0].shape[1] for f in firsts)
        if any(size % ALIGNMENT for size in (*weight.shape, ranks)):
            return None
        if not all(_may_lie_apart(self.graph, self.region, v) for v in (x, *(f.outputs[0] for f in firsts))):
            return None
        gradient = None
        if weight in self.backward:
            gradient = self._gradient(weight, firsts)
            if gradient is None:
                return None
        return _Group(weight.name.removesuffix(".weight") + ".wide", product, slices, branches, firsts, gradient)

    def _is_frozen(self, weight: Value) -> bool:
        known = weight in (*self.region.params.values(), *self.region.joined.values())
        known = known and weight.kind == PARAM and not weight.trainable and len(self.forward.get(weight, ())) == 1
        return known and self.stored.as_computed_with(weight)

    def _branches(self, product: Node, slices: list[Node]) -> Iterator[_Branch]:
        result = product.outputs[0]
        parts = [(n.outputs[0], n.attrs["start"]) for n in slices] or [(result, 0)]
        if slices and len(slices) != len(self.forward[result]):
            return
        for part, column in parts:
            readers = self.forward.get(part, [])
            if len(readers) != 1 or part in self.backward or part in self.kept:
                continue
            second = readers[0]
            if second.op != "linear" or second.inputs[_ADDEND] is not part or second.inputs[2] is not None:
                continue
            if second.inputs[_WEIGHT].role != "lora_b" or second.outputs[0].dtype != part.dtype:
                continue
            found = self._first(second.inputs[0], product.inputs[0])
            if found is not None:
                yield _Branch(second, part, column, *found)

    def _first(self, low: Value, x: Value) -> tuple[Node, int] | None:
        """What makes ``low`` from x, and the column of its result that ``low`` begins at."""
        node, start = self.maker.get(low), 0
        if node is not None and node.op == SLICE:
            node, start = self.maker.get(node.inputs[0]), node.attrs["start"]
        if node is None or node.op != "linear" or node.inputs[0] is not x or node.attrs["alpha"] != 1.0:
            return None
        plain = node.inputs[_WEIGHT].role == "lora_a" and node.inputs[2] is None and node.inputs[_ADDEND] is None
        return (node, start) if plain and node.outputs[0].dtype == x.dtype else None

    def _belong_together(self, branches: list[_Branch], firsts: list[Node]) -> bool:
        """Whether nobody else reads what the first halves make, forwards."""
        seconds = {b.second for b in branches}
        for first in firsts:
            readers = self.forward[first.outputs[0]]
            inner = [n for node in readers if node.op == SLICE for n in self.forward.get(node.outputs[0], [])]
            if first.outputs[0] in self.kept or {n for n in (*readers, *inner) if n.op != SLICE} - seconds:
                return False
        return True

    def _gradient(self, weight: Value, firsts: list[Node]) -> _Gradient | None:
        """The gradient to x, where it is the weight's product with those of all first halves as addends, one of another."""
        nodes = self.backward[weight]
        if len(nodes) != 1 or nodes[0].op != "linear_input_grad":
            return None
        missing = {f.inputs[_WEIGHT]: f for f in firsts}
        products: list[Node] = []
        node = nodes[0]
        while missing:
            addend = node.inputs[_GRAD_ADDEND]
            made = None if addend is None else self.maker.get(addend)
            if made is None or made.op != "linear_input_grad" or missing.pop(made.inputs[_WEIGHT], None) is None:
                return None
            if len(self.backward[addend]) != 1 or addend in self.kept or made.attrs["alpha"] != 1.0:
                return None
            products.append(made)
            node = made
        sources = [nodes[0].inputs[0], *(p.inputs[0] for p in products)]
        fits = nodes[0].attrs["alpha"] == 1.0 and all(v.dtype == self.stored.compute for v in sources)
        fits = fits and all(_may_lie_apart(self.graph, self.region, v) for v in sources)
        return _Gradient(nodes[0], products) if fits else None


def _readers(nodes: list[Node]) -> dict[Value, list[Node]]:
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in dict.fromkeys(v for v in node.inputs if v is not None):
            readers.setdefault(value, []).append(node)
    return readers


def _may_lie_apart(graph: Graph, region: Region, value: Value, handed_on: bool = False) -> bool:
    """Whether whatever makes and reads ``value`` takes rows that lie apart, and it lies nowhere else yet. ``handed_on``: it is
    a gradient that another region joins."""
    maker = {v: n for n in region.nodes() for v in n.outputs if v is not None}
    while value in maker and maker[value].op == VIEW:
        value = maker[value].inputs[0]
    node = maker.get(value)
    if node is None:
        return value in region.grad_in and all(
            made is not None and made not in maker_region.grad_in and _may_lie_apart(graph, maker_region, made, True)
            for maker_region, made in _makers(graph, region, value)
        )
    if node.op == SLICE or (node.op != JOIN and not takes_rows_apart(node.op, node.outputs.index(value), of_output=True)):
        return False
    kept = {*region.carry_out, *graph.outputs.values(), *(() if handed_on else region.grad_out)}
    return readers_take_rows_apart(region, value, kept)


def _makers(graph: Graph, region: Region, value: Value) -> Iterator[tuple[Region, Value | None]]:
    """Where a gradient that ``region`` is handed comes from: each region that follows it, and its name there."""
    index = region.grad_in.index(value)
    order = [*graph.layers, graph.epilogue.name]
    for name, following in dict.fromkeys(zip(order, order[1:])):
        if name == region.name:
            yield graph.regions[following], graph.regions[following].grad_out[index]


# -- the rewrite -----------------------------------------------------------------------------------------------------


def _widen(graph: Graph, region: Region, group: _Group) -> None:
    widened = region.widened[group.name] = _weight(graph, group)
    _widen_forward(graph, region, group, widened.whole)
    if group.gradient is not None:
        _widen_backward(graph, region, group, widened.turned)


def _weight(graph: Graph, group: _Group) -> Widened:
    base = group.product.inputs[_WEIGHT]
    starts, ranks = {}, 0
    for first in group.firsts:
        starts[first] = ranks
        ranks += first.outputs[0].shape[1]
    rows, columns = base.shape
    seconds = tuple(
        (b.second.inputs[_WEIGHT], b.column, starts[b.first] + b.rank_start, b.second.attrs["alpha"]) for b in group.branches
    )
    whole = graph.value(group.name, (rows, columns + ranks), base.dtype, PARAM, base.role)
    turned = graph.value(f"{group.name}.turned", (rows + ranks, columns), base.dtype, PARAM, base.role)
    return Widened(base, tuple(f.inputs[_WEIGHT] for f in group.firsts), seconds, whole, turned)


def _widen_forward(graph: Graph, region: Region, group: _Group, weight: Value) -> None:
    """All where the product stood: the first halves need no more than x, and what follows finds its values made."""
    product, results = group.product, {b.part: b.second.outputs[0] for b in group.branches}
    lows = [f.outputs[0] for f in group.firsts]
    low_slices = [n for n in region.forward if n.op == SLICE and n.inputs[0] in lows]
    nodes = [*group.firsts, *low_slices]
    x = product.inputs[0]
    wide = Builder(graph, region, nodes).join([x, *lows], x.name)
    made = product.outputs[0]
    nodes.append(Node("linear", (wide, weight, *product.inputs[2:]), (results.get(made, made),), product.attrs))
    for node in group.slices:
        node.outputs = (results.get(node.outputs[0], node.outputs[0]),)
    gone = {product, *nodes, *group.slices, *(b.second for b in group.branches)}
    at = region.forward.index(product)
    before = [n for n in region.forward[:at] if n not in gone]
    after = [n for n in region.forward[at:] if n not in gone]
    region.forward[:] = [*before, *nodes, *group.slices, *after]


def _widen_backward(graph: Graph, region: Region, group: _Group, weight: Value) -> None:
    gradient = group.gradient
    low_gradients = {p.inputs[_WEIGHT]: p.inputs[0] for p in gradient.products}
    sources = [gradient.node.inputs[0], *(low_gradients[f.inputs[_WEIGHT]] for f in group.firsts)]
    nodes: list[Node] = []
    wide = Builder(graph, region, nodes).join(sources, f"d_{group.product.outputs[0].name}")
    node = gradient.node
    nodes.append(Node(node.op, (wide, weight, gradient.addend), node.outputs, node.attrs))
    at = region.backward.index(node)
    gone = {node, *gradient.products}
    region.backward[:] = [*(n for n in region.backward[:at] if n not in gone), *nodes, *region.backward[at + 1:]]
