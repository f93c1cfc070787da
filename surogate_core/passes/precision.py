"""precision: makes the precision classes concrete from a recipe, and casts where a matrix product wants less.

Values are traced in two classes. "residual" is the residual stream and its gradient: SmolLM2-sized models lose more in a
bf16 residual stream than in all their bf16 products together, so it is fp32 unless a recipe says otherwise. "compute" is
everything that matrix products read and write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import ops
from ..ir.builder import PLACEMENTS, Builder
from ..ir.graph import Graph, Node, Region, Value
from ..ir.spec import check


@dataclass(frozen=True)
class Recipe:
    """Which precision each class computes in. ``classes`` maps "compute" and "residual" to a dtype name."""

    name: str
    doc: str
    classes: Mapping[str, str]

    @property
    def compute(self) -> str:
        return self.classes["compute"]


RECIPES = {
    "bf16": Recipe("bf16", "bf16 products, fp32 accumulation, residual stream and norms",
                   {"compute": "bf16", "residual": "f32"}),
    "pure_bf16": Recipe("pure_bf16", "bf16, with a bf16 residual stream too: fewer bytes, and a rounding at every sum",
                        {"compute": "bf16", "residual": "bf16"}),
    "fp32": Recipe("fp32", "everything in fp32", {"compute": "f32", "residual": "f32"}),
}


def precision(graph: Graph, recipe: Recipe) -> Graph:
    """Afterwards every dtype is concrete. A value wider than compute that a matrix product reads is cast once a list."""
    if recipe.classes["residual"] != recipe.compute:
        for region in graph.ordered_regions():
            region.forward[:] = _with_casts(graph, region, region.forward)
            region.backward[:] = _with_casts(graph, region, region.backward)
    for region in graph.ordered_regions():
        for value in _values(region):
            value.dtype = recipe.classes.get(value.dtype, value.dtype)
        for node in region.nodes():
            if "out_dtype" in node.attrs:
                node.attrs["out_dtype"] = recipe.classes.get(node.attrs["out_dtype"], node.attrs["out_dtype"])
        _drop_idle_casts(graph, region)
    return check(graph.record(f"precision({recipe.name})"))


def _drop_idle_casts(graph: Graph, region: Region) -> None:
    """Casts between the classes of a recipe that gives both one dtype."""
    same: dict[Value, Value] = {}
    for nodes in (region.forward, region.backward):
        kept = []
        for node in nodes:
            node.inputs = tuple(same.get(v, v) for v in node.inputs)
            if node.op == "cast" and node.inputs[0].dtype == node.outputs[0].dtype:
                same[node.outputs[0]] = node.inputs[0]
            else:
                kept.append(node)
        nodes[:] = kept
    if same:
        region.carry_out = tuple(same.get(v, v) for v in region.carry_out)
        region.grad_out = tuple(same.get(v, v) for v in region.grad_out)
        graph.outputs = {name: same.get(v, v) for name, v in graph.outputs.items()}


def _values(region: Region):
    yield from (*region.carry_in, *region.carry_out, *region.grad_in)
    yield from region.states.values()
    for node in region.nodes():
        yield from (v for v in (*node.inputs, *node.outputs) if v is not None)


def _with_casts(graph: Graph, region: Region, nodes: list[Node]) -> list[Node]:
    result: list[Node] = []
    builder = Builder(graph, region, result)
    narrow: dict[Value, Value] = {}
    for node in nodes:
        if node.op not in PLACEMENTS:
            names = ops.get(node.op).compute_inputs
            operands = list(node.inputs)
            for i, operand in enumerate(ops.get(node.op).inputs):
                value = operands[i]
                if operand.name in names and value is not None and value.dtype == "residual":
                    if value not in narrow:
                        narrow[value] = builder.op("cast", value, out_dtype="compute", label=f"{value.name}.cast")
                    operands[i] = narrow[value]
            node.inputs = tuple(operands)
            if "out_dtype" not in node.attrs:
                _keep_result_type(node)
        result.append(node)
    return result


def _keep_result_type(node: Node) -> None:
    """An op whose result took its input's dtype says so itself, now that the input was cast."""
    record = ops.get(node.op)
    if "out_dtype" in record.attrs and node.outputs[0] is not None:
        node.attrs = record.complete_attrs({**node.attrs, "out_dtype": node.outputs[0].dtype})
