"""join_ropes: rotations of columns that lie side by side in one matrix become one, of all of their heads.

    q = rope(y[:, :a]), k = rope(y[:, a:b])                become    q | k = rope(y[:, :b])
    join(rope(dq, inverse), rope(dk, inverse), dv)         becomes   join(rope(join(dq, dk), inverse), dv)

A kernel over the keys of some thousand tokens ends before memory is at its rate; over queries and keys it takes what the bytes
take. Nothing is computed otherwise, and no bit changes. It runs after `fuse_projections`, whose products q and k are columns of,
and after `widen_products` and `fuse_norm_rope`: adapters and norms then stand between the two no longer, or for good.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from ..ir.builder import JOIN, PLACEMENTS, SLICE, VIEW, Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from .uses import readers_take_rows_apart, takes_rows_apart, uses


def join_ropes(graph: Graph) -> Graph:
    """Rotations stay as they are where something else reads what is between them and the matrix, where they turn by other
    angles or have heads of other sizes, and where what reads their results cannot take rows that lie apart."""
    counts = [0, 0]
    for region in graph.layer_regions():
        for run in list(_forward_runs(graph, region)):
            _join_forward(graph, region, run)
            counts[0] += 1
        for join, run in list(_backward_runs(graph, region)):
            _join_backward(graph, region, join, run)
            counts[1] += 1
    return check(graph.record(f"join_ropes({counts[0]} forward, {counts[1]} backward)"))


@dataclass
class _Turn:
    """A rotation of columns [start, stop) of a matrix. ``between``: the placements that lead there; ``columns``: what they
    lead to, a slice of the matrix or one of those joined in it."""

    rope: Node
    between: list[Node]
    columns: Value
    start: int
    stop: int

    @property
    def alike(self) -> Hashable:
        """What rotations that become one share: angles, how they turn, and the size of a head."""
        return self.rope.inputs[1:], tuple(self.rope.attrs.items()), self.rope.inputs[0].shape[2]


def _runs(turns: Iterable[_Turn]) -> Iterator[list[_Turn]]:
    """Two and more that are alike, each of the columns behind those of the one before."""
    run: list[_Turn] = []
    for turn in sorted(turns, key=lambda turn: turn.start):
        if run and (turn.start != run[-1].stop or turn.alike != run[-1].alike):
            if len(run) > 1:
                yield run
            run = []
        run.append(turn)
    if len(run) > 1:
        yield run


def _rotated(graph: Graph, region: Region, nodes: list[Node], columns: Value, run: list[_Turn]) -> Value:
    """``columns`` with the heads of all of ``run`` turned."""
    builder = Builder(graph, region, nodes)
    first = run[0].rope
    dim = first.inputs[0].shape[2]
    heads = builder.view(columns, (columns.shape[0], columns.shape[1] // dim, dim))
    label = "_".join(turn.rope.outputs[0].name for turn in run)
    return builder.view(builder.op("rope", heads, *first.inputs[1:], label=label, **first.attrs), columns.shape)


# -- forward: the matrix is sliced, then turned ------------------------------------------------------------------------


def _forward_runs(graph: Graph, region: Region) -> Iterator[list[_Turn]]:
    maker = {v: n for n in region.forward for v in n.outputs if v is not None}
    counts = uses(graph, region)
    kept = {*region.carry_out, *graph.outputs.values()}
    turns: dict[Value, list[_Turn]] = {}
    for rope in region.forward:
        if rope.op != "rope" or not readers_take_rows_apart(region, rope.outputs[0], kept):
            continue
        between, value = [], rope.inputs[0]
        while counts[value] == 1 and value in maker and maker[value].op in (VIEW, SLICE):
            node = maker[value]
            between.append(node)
            if node.op == SLICE:
                turns.setdefault(node.inputs[0], []).append(_Turn(rope, between, value, **node.attrs))
                break
            value = node.inputs[0]
    for of_one in turns.values():
        yield from _runs(of_one)


def _join_forward(graph: Graph, region: Region, run: list[_Turn]) -> None:
    whole, start = run[0].between[-1].inputs[0], run[0].start
    at = min(region.forward.index(turn.rope) for turn in run)
    nodes: list[Node] = []
    builder = Builder(graph, region, nodes)
    turned = _rotated(graph, region, nodes, builder.slice(whole, start, run[-1].stop), run)
    for turn in run:
        builder.view(builder.slice(turned, turn.start - start, turn.stop - start), turn.rope.outputs[0].shape)
        nodes[-1].outputs = turn.rope.outputs  # what reads it stays as it is
    gone = {node for turn in run for node in (turn.rope, *turn.between)}
    before, after = region.forward[:at], region.forward[at:]
    region.forward[:] = [*(n for n in before if n not in gone), *nodes, *(n for n in after if n not in gone)]


# -- backward: turned, then joined in the matrix -----------------------------------------------------------------------


def _backward_runs(graph: Graph, region: Region) -> Iterator[tuple[Node, list[_Turn]]]:
    maker = {v: n for n in region.backward for v in n.outputs if v is not None}
    counts = uses(graph, region)
    for join in [node for node in region.backward if node.op == JOIN]:
        turns, stop = [], 0
        for columns in join.inputs:
            start, stop = stop, stop + columns.shape[1]
            between, value = [], columns
            while value in maker and maker[value].op == VIEW and (value is columns or counts[value] == 1):
                between.append(maker[value])
                value = maker[value].inputs[0]
            rope = maker.get(value)
            if rope is not None and rope.op == "rope" and between and counts[value] == 1 and _may_be_joined(
                    rope.inputs[0], maker, counts[rope.inputs[0]]):
                turns.append(_Turn(rope, between, columns, start, stop))
        for run in _runs(turns):
            at = min(region.backward.index(turn.rope) for turn in run)
            if all(region.backward.index(maker[turn.rope.inputs[0]]) < at for turn in run):
                yield join, run


def _may_be_joined(value: Value, maker: dict[Value, Node], reads: int) -> bool:
    node = maker.get(value)
    if node is None or node.op in PLACEMENTS or reads != 1:
        return False
    return takes_rows_apart(node.op, node.outputs.index(value), of_output=True)


def _join_backward(graph: Graph, region: Region, join: Node, run: list[_Turn]) -> None:
    at = min(region.backward.index(turn.rope) for turn in run)
    counts = uses(graph, region)
    nodes: list[Node] = []
    builder = Builder(graph, region, nodes)
    heads = [builder.view(turn.rope.inputs[0], turn.columns.shape) for turn in run]
    turned = _rotated(graph, region, nodes, builder.join(heads, "_".join(v.name for v in heads)), run)
    for turn in run:
        if counts[turn.columns] > 1:  # by adapters, besides the join
            builder.slice(turned, turn.start - run[0].start, turn.stop - run[0].start)
            nodes[-1].outputs = (turn.columns,)
    members = [turn.columns for turn in run]
    first = join.inputs.index(members[0])
    join.inputs = (*join.inputs[:first], turned, *join.inputs[first + len(members):])
    gone = {node for turn in run for node in (turn.rope, *turn.between)}
    before, after = region.backward[:at], region.backward[at:]
    region.backward[:] = [*(n for n in before if n not in gone), *nodes, *(n for n in after if n not in gone)]
