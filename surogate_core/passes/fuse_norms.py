"""fuse_norms: a norm, the product that reads it, and the gated unit behind that become one op, `rms_norm_linear`.

For programs of a few tokens on a device, where a kernel takes hardly longer than its launch. It runs after `precision`, and
takes products in bf16 with weights that are stored so in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.builder import SLICE, Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check
from .uses import uses

ROWS = "gather_rows"


def fuse_norms(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """``dtypes``: stored dtype of every frozen parameter by full name ("layers.0.attn.q_k_v.weight", "norm.weight")."""
    count, stored = 0, _stored(graph, dtypes)
    for region in graph.ordered_regions():
        for norm in [node for node in region.forward if node.op == "rms_norm"]:
            found = _match(graph, region, norm)
            if found is not None and stored.get(found.linear.inputs[1]) == {"bf16"}:
                _replace(graph, region, found)
                count += 1
    return check(graph.record(f"fuse_norms({count} products)"))


def _stored(graph: Graph, dtypes: Mapping[str, str]) -> dict[Value, set[str]]:
    """Dtypes of every frozen parameter in all layers; of a joined one, of all its parts."""
    stored: dict[Value, set[str]] = {}
    for name, value, _ in graph.instances():
        if not value.trainable:
            stored.setdefault(value, set()).add(dtypes[name])
    for _, value, _, parts in graph.joined_instances():
        stored.setdefault(value, set()).update(dtypes[part] for part in parts)
    return stored


@dataclass
class _Match:
    """rows: what picks rows of the normed ones, if something does. slices, glu: behind the product, if they are."""

    norm: Node
    rows: Node | None
    linear: Node
    slices: list[Node]
    glu: Node | None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.norm, self.rows, self.linear, *self.slices, self.glu) if node is not None]


def _match(graph: Graph, region: Region, norm: Node) -> _Match | None:
    normed, rstd = norm.outputs
    if len(normed.shape) != 2 or normed.dtype != "bf16" or (rstd is not None and _readers(region, rstd)):
        return None
    reader, rows = _only(graph, region, normed), None
    if reader is not None and reader.op == ROWS:
        reader, rows = _only(graph, region, reader.outputs[0]), reader
    if reader is None or reader.op != "linear" or reader.inputs[0] is not (rows or norm).outputs[0]:
        return None
    if reader.inputs[3] is not None:
        return None
    product = reader.outputs[0]
    slices = _readers(region, product)
    return _Match(norm, rows, reader, *_gated(graph, region, product, slices))


def _gated(graph: Graph, region: Region, product: Value, slices: list[Node]) -> tuple[list[Node], Node | None]:
    """The two halves of the product and the unit that reads nothing else, if that is what reads it."""
    half = product.shape[1] // 2
    by_start = {node.attrs.get("start"): node for node in slices if node.op == SLICE}
    if len(slices) != 2 or set(by_start) != {0, half} or by_start[0].attrs["stop"] != half or 2 * half != product.shape[1]:
        return [], None
    ordered = [by_start[0], by_start[half]]
    readers = [_only(graph, region, node.outputs[0]) for node in ordered]
    glu = readers[0]
    if glu is None or glu.op != "glu" or readers[1] is not glu or glu.inputs != tuple(n.outputs[0] for n in ordered):
        return [], None
    return ordered, glu


def _readers(region: Region, value: Value) -> list[Node]:
    return [node for node in region.forward for each in node.inputs if each is value]


def _only(graph: Graph, region: Region, value: Value) -> Node | None:
    """What reads the value, if one node alone does."""
    readers = _readers(region, value)
    return readers[0] if readers and uses(graph, region)[value] == 1 else None


def _replace(graph: Graph, region: Region, found: _Match) -> None:
    """One node where the last of them stood: all that it reads is there by then."""
    nodes: list[Node] = []
    builder = Builder(graph, region, nodes)
    x, norm_weight = found.norm.inputs
    if found.rows is not None:
        x = builder.op(ROWS, x, *found.rows.inputs[1:], label=found.rows.outputs[0].name)
    last = found.glu or found.linear
    _, weight, bias, _ = found.linear.inputs
    builder.op(
        "rms_norm_linear", x, norm_weight, weight, bias, eps=found.norm.attrs["eps"],
        unit_offset=found.norm.attrs["unit_offset"], alpha=found.linear.attrs["alpha"],
        activation=found.glu.attrs["activation"] if found.glu is not None else "none",
        out_dtype=last.outputs[0].dtype, label=last.outputs[0].name,
    )
    nodes[-1].outputs = last.outputs  # what reads it stays as it is
    at = region.forward.index(last)
    region.forward[at:at + 1] = nodes
    gone = {id(node) for node in found.nodes}
    region.forward[:] = [node for node in region.forward if id(node) not in gone]
