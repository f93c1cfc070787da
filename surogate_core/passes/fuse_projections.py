"""fuse_projections: matrices that multiply the same input become one product, whose columns are what each of them gave.

    q = x Wq^T, k = x Wk^T, v = x Wv^T    becomes    y = x [Wq; Wk; Wv]^T, and q, k, v are columns of y

So also for gate and up, and for the first halves of adapters (x [Aq; Ak; Av]^T). Nothing is copied: `slice` and `join` say
where elements lie. `autodiff` of the joined product is one product for the input and one for the weight, over the gradients
of all parts side by side.

It runs after `lora` and before `autodiff`. Products stay as they are where the parts are not stored alike, where a padded
layout would stand between them, or where an op that reads the result cannot take rows that lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from .. import ops
from ..ir.builder import VIEW, Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from ..program.trainable import PARAMETER_ALIGNMENT

ADDEND = 3
"""Index of a linear's addend."""


def fuse_projections(graph: Graph, dtypes: Mapping[str, str], adapters: bool = True) -> Graph:
    """``dtypes``: stored dtype of every frozen parameter by full name ("layers.0.attn.q.weight"). ``adapters``: whether
    adapters' first halves are joined too; not where they are trained with dropout, whose inputs differ from each other.

    Programs that share their parameters' memory are planned alike: what is joined does not depend on what is trained.
    """
    count = 0
    for region in graph.layer_regions():
        layers = [i for i, name in enumerate(graph.layers) if name == region.name]
        for members in _groups(_Body(graph, region, layers, dtypes, adapters)):
            _fuse(graph, region, members)
            count += 1
    return check(graph.record(f"fuse_projections({count} products)"))


def joined_name(names: list[str]) -> str:
    """"attn.q.weight", "attn.k.weight" -> "attn.q_k.weight": what differs is strung together."""
    if len({name.count(".") for name in names}) > 1:
        return "_".join(names)
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    return ".".join(words[0] if len(set(words)) == 1 else "_".join(words) for words in columns)


@dataclass
class _Body:
    graph: Graph
    region: Region
    layers: list[int]
    dtypes: Mapping[str, str]
    adapters: bool

    def __post_init__(self) -> None:
        self.readers: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.region.forward:
            for i, value in enumerate(node.inputs):
                if value is not None:
                    self.readers.setdefault(value, []).append((node, i))
        self.handed_on = {*self.region.carry_out, *self.graph.outputs.values()}

    def key(self, node: Node) -> Hashable:
        """What the members of a group share; None for a node that cannot be in one."""
        if node.op != "linear" or node.inputs[ADDEND] is not None:
            return None
        x, weight, bias = node.inputs[:3]
        if weight.role == "lora_a" and not self.adapters:
            return None
        params = [weight] if bias is None else [weight, bias]
        if any(self.region.params.get(p.name) is not p or len(self.readers[p]) != 1 for p in params):
            return None
        if not self.may_lie_apart(node.outputs[0]):
            return None
        stored = tuple((p.trainable, p.dtype, p.shape[1:], self.stored(p)) for p in params)
        return x, tuple(node.attrs.items()), weight.role == "lora_a", stored

    def stored(self, param: Value) -> tuple[str, ...]:
        """Its dtype in each layer; trained parameters have one layout."""
        return () if param.trainable else tuple(self.dtypes[f"layers.{i}.{param.name}"] for i in self.layers)

    def may_lie_apart(self, value: Value) -> bool:
        """Whether its one reader takes rows that lie apart, and hands back a gradient whose rows do."""
        readers = self.readers.get(value, [])
        if len(readers) != 1 or value in self.handed_on:
            return False
        node, index = readers[0]
        if node.op == VIEW:
            return self.may_lie_apart(node.outputs[0])
        if ops.get(node.op).inputs[index].name not in ops.get(node.op).rows_apart:
            return False
        # An addend's gradient is that of the sum, so what reads the sum makes it.
        return self.may_lie_apart(node.outputs[0]) if (node.op, index) == ("linear", ADDEND) else True


def _groups(body: _Body) -> list[list[Node]]:
    groups: dict[Hashable, list[Node]] = {}
    for node in body.region.forward:
        key = body.key(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    return [members for members in map(_without_padding, groups.values()) if len(members) > 1]


def _without_padding(members: list[Node]) -> list[Node]:
    """Trained parameters start at multiples of the layout's alignment: all but the last of a group must fill their place."""

    def fills(node: Node) -> bool:
        params = [v for v in node.inputs[1:3] if v is not None]
        return all(math.prod(p.shape) % PARAMETER_ALIGNMENT == 0 for p in params)

    return [*filter(fills, members), *[m for m in members if not fills(m)][:1]]


def _fuse(graph: Graph, region: Region, members: list[Node]) -> None:
    """Puts the joined product where the earliest member stood, its slices right after it."""
    first = members[0]
    params = [
        None if first.inputs[i] is None
        else graph.join_params(region, joined_name([m.inputs[i].name for m in members]), [m.inputs[i] for m in members])
        for i in (1, 2)
    ]
    nodes: list[Node] = []
    builder = Builder(graph, region, nodes)
    label = joined_name([m.outputs[0].name for m in members])
    product = builder.op("linear", first.inputs[0], *params, label=label, **first.attrs)
    start = 0
    for member in members:
        width = member.outputs[0].shape[1]
        builder.slice(product, start, start + width)
        nodes[-1].outputs = member.outputs  # everything downstream stays as it is
        start += width
    at = min(map(region.forward.index, members))
    gone = set(members)
    region.forward[:] = [*region.forward[:at], *nodes, *(n for n in region.forward[at:] if n not in gone)]
