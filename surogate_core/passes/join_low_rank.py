"""join_low_rank: gradients of low-rank branches whose results lie side by side in one matrix become one op.

    dlow_q, dB_q = low_rank_grad(dq, low_q, B_q)          becomes    dlow, dB_q, dB_k, dB_v =
    dlow_k, dB_k = low_rank_grad(dk, low_k, B_k)                         low_rank_grad(dq|dk|dv, low, B_q, B_k, B_v)
    dlow_v, dB_v = low_rank_grad(dv, low_v, B_v)
    dlow = dlow_q|dlow_k|dlow_v

On a device a call over the columns of keys ends before memory is at its rate. Nothing is computed otherwise, and nothing is
copied: joins and slices say where elements lie already. It runs after `fuse_low_rank`, and ahead of `join_ropes`, which finds
q's and k's gradients read by the join alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ..ir.builder import JOIN, SLICE, Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from ..ops.low_rank_grad import MOST
from .uses import uses

DY, LOW, B = 0, 1, 2
"""Indices of inputs. Of outputs 0 is dlow, 1 db."""


def join_low_rank(graph: Graph) -> Graph:
    """Branches stay apart where their first halves are no columns of one product or stand in another order there, where an
    unadapted projection lies between them, and where their ranks, factors or dtypes differ. More than four are several."""
    count = 0
    for region in graph.layer_regions():
        for run in list(_runs(region, _branches(graph, region))):
            _join(graph, region, run)
            count += 1
    return check(graph.record(f"join_low_rank({count} joined)"))


@dataclass
class _Place:
    """Columns [start, stop) of ``whole``, which ``node`` says: a slice of it, or the join that makes it."""

    node: Node
    whole: Value
    start: int
    stop: int

    def precedes(self, other: _Place) -> bool:
        return self.whole is other.whole and self.stop == other.start


@dataclass
class _Branch:
    node: Node
    dy: _Place
    low: _Place
    dlow: _Place

    def precedes(self, other: _Branch) -> bool:
        """Whether the columns of ``other`` follow in all three, and what is done with them is the same."""
        beside = self.dy.precedes(other.dy) and self.low.precedes(other.low) and self.dlow.precedes(other.dlow)
        return beside and self._kind == other._kind

    @property
    def _kind(self) -> Hashable:
        b = self.node.inputs[B]
        return tuple(self.node.attrs.items()), b.shape[1], b.dtype


def _branches(graph: Graph, region: Region) -> list[_Branch]:
    """Those that lie in something wider; what else reads a dlow would find it made too late."""
    joined = {v: place for node in region.backward if node.op == JOIN for v, place in _places(node)}
    sliced = {n.outputs[0]: _Place(n, n.inputs[0], **n.attrs) for n in region.nodes() if n.op == SLICE}
    reads = uses(graph, region)
    found = []
    for node in region.backward:
        if node.op == "low_rank_grad" and reads[node.outputs[0]] == 1:
            dy, low, dlow = joined.get(node.inputs[DY]), sliced.get(node.inputs[LOW]), joined.get(node.outputs[0])
            if dy is not None and low is not None and dlow is not None:
                found.append(_Branch(node, dy, low, dlow))
    return found


def _places(join: Node) -> Iterator[tuple[Value, _Place]]:
    stop = 0
    for value in join.inputs:
        start, stop = stop, stop + value.shape[1]
        yield value, _Place(join, join.outputs[0], start, stop)


def _runs(region: Region, branches: list[_Branch]) -> Iterator[list[_Branch]]:
    """Two and more, each of the columns behind those of the one before."""
    run: list[_Branch] = []
    for branch in sorted(branches, key=lambda branch: (branch.dy.whole.id, branch.dy.start)):
        if run and (len(run) == MOST or not run[-1].precedes(branch) or not _may_move(region, [*run, branch])):
            if len(run) > 1:
                yield run
            run = []
        run.append(branch)
    if len(run) > 1:
        yield run


def _may_move(region: Region, run: list[_Branch]) -> bool:
    """Whether nothing between them adds to the same gradients of B: sums keep their order."""
    at = [region.backward.index(branch.node) for branch in run]
    members = [branch.node for branch in run]
    gradients = {node.outputs[1] for node in members}
    between = region.backward[min(at) : max(at)]
    return not any(gradients.intersection(node.outputs) for node in between if node not in members)


def _join(graph: Graph, region: Region, run: list[_Branch]) -> None:
    """Where the last of them stood: what any of them reads is there by then."""
    members = [branch.node for branch in run]
    last = max(members, key=region.backward.index)
    dy = _joined_dy(graph, region, run, last)
    nodes: list[Node] = []
    low = _columns(Builder(graph, region, nodes), run)
    rest = (None,) * (MOST - len(run))
    inputs = (dy, low, *(node.inputs[B] for node in members), *rest)
    outputs = (_joined_dlow(graph, region, run), *(node.outputs[1] for node in members), *rest)
    nodes.append(Node("low_rank_grad", inputs, outputs, last.attrs))
    at = region.backward.index(last)
    region.backward[at : at + 1] = nodes
    region.backward[:] = [node for node in region.backward if node not in members]


def _joined_dy(graph: Graph, region: Region, run: list[_Branch], last: Node) -> Value:
    """The columns of all of them: what they are joined in, moved ahead of ``last``, or else something that lies in it."""
    join, parts = run[0].dy.node, tuple(branch.node.inputs[DY] for branch in run)
    at = min(region.backward.index(join), region.backward.index(last))
    if parts == join.inputs:
        region.backward.remove(join)
        region.backward.insert(at, join)
        return join.outputs[0]
    nodes: list[Node] = []
    inner = Builder(graph, region, nodes).join(parts, join.outputs[0].name)
    region.backward[at:at] = nodes
    _replace(join, parts, inner)
    return inner


def _joined_dlow(graph: Graph, region: Region, run: list[_Branch]) -> Value:
    """What the op makes: the whole that they are joined in, which needs no join then, or a part of it."""
    join, parts = run[0].dlow.node, tuple(branch.node.outputs[0] for branch in run)
    whole = join.outputs[0]
    if parts == join.inputs:
        region.backward.remove(join)
        return whole
    inner = graph.value(whole.name, (whole.shape[0], sum(v.shape[1] for v in parts)), whole.dtype)
    _replace(join, parts, inner)
    return inner


def _replace(join: Node, parts: tuple[Value, ...], inner: Value) -> None:
    first = join.inputs.index(parts[0])
    join.inputs = (*join.inputs[:first], inner, *join.inputs[first + len(parts):])


def _columns(builder: Builder, run: list[_Branch]) -> Value:
    whole, start, stop = run[0].low.whole, run[0].low.start, run[-1].low.stop
    return whole if (start, stop) == (0, whole.shape[1]) else builder.slice(whole, start, stop)
