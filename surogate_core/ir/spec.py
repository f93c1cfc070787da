"""The executable specification of a graph, checked after every pass."""

from __future__ import annotations

import math
from typing import NoReturn

from .. import ops
from ..errors import PluginError
from ..ops.record import Shape
from .builder import JOIN, PLACEMENTS, SLICE, VIEW
from .graph import ACTIVATION, GRAD, INPUT, PARAM, STATE, Graph, Node, Region, Value


class SpecError(AssertionError):
    """A pass produced a graph that breaks a rule; the message names pass, region and node."""


def check(graph: Graph) -> Graph:
    """Raises SpecError unless every rule below holds; returns the graph.

    1. Each node's op exists, with its operands and attributes complete, and its outputs have the types `infer` gives.
    2. A value is defined once, and before it is used; backward nodes also see their region's forward values, and all
       regions the parameters of the prologue.
    3. Read-write outputs are gradients, states or other storage that exists; all other outputs are fresh activations.
    4. Layers hand on what the next ones take: carried values agree in number and type, and what a backward list reads of
       gradients that the next ones hand back, they do hand back.
    5. Gradients have the shape of what they belong to.
    6. Views, slices and joins fit what they place. A value is joined once, and what is one of several slices or joined
       values is made and read by ops that take operands whose rows lie apart, also where another region makes it.
    7. A frozen weight with adapters beside it has rows and columns for all of them.
    """
    for layer, name in enumerate(graph.layers):
        if name not in graph.regions:
            _fail(graph, f"layer {layer} is of region {name!r}, which does not exist")
    for region in graph.ordered_regions():
        _check_region(graph, region)
    _check_carries(graph)
    handed = _handed_to_joins(graph)
    for region in graph.ordered_regions():
        _check_joined(graph, region)
        _check_widened(graph, region)
        _check_rows_apart(graph, region, handed[region.name])
    for param, grad in graph.grads.items():
        if grad.shape != param.shape or grad.dtype != "f32":
            _fail(graph, f"gradient {grad!r} does not fit parameter {param!r}")
    for name, value in graph.outputs.items():
        if value.kind == ACTIVATION and not any(value in n.outputs for n in graph.epilogue.nodes()):
            _fail(graph, f"output {name!r} ({value!r}) is not made in the epilogue")
    return graph


def _error(graph: Graph, message: str) -> SpecError:
    return SpecError(f"after pass {graph.history[-1] if graph.history else 'trace'}: {message}")


def _fail(graph: Graph, message: str) -> NoReturn:
    raise _error(graph, message)


def _check_region(graph: Graph, region: Region) -> None:
    defined: set[Value] = {*region.carry_in, *region.params.values(), *region.joined.values(), *region.states.values()}
    defined |= set(graph.prologue.params.values())
    defined |= {half for widened in region.widened.values() for half in (widened.whole, widened.turned)}
    defined |= {v for v in graph.inputs.values()} | {v for v, _ in graph.constants.values()}
    for node in region.forward:
        _check_node(graph, region, node, defined)
    for value in region.carry_out:
        if value not in defined:
            _fail(graph, f"region {region.name} hands on {value!r}, which it never makes")
    defined |= set(region.grad_in)
    for node in region.backward:
        _check_node(graph, region, node, defined)
    for grad, value in zip(region.grad_out, region.carry_in):
        if grad is not None and (grad not in defined or grad.shape != value.shape):
            _fail(graph, f"region {region.name}: {grad!r} is not a gradient of {value!r}")


def _check_node(graph: Graph, region: Region, node: Node, defined: set[Value]) -> None:
    where = f"region {region.name}, {node!r}"
    for value in node.inputs:
        if value is not None and value not in defined and value.kind not in (GRAD, PARAM):
            _fail(graph, f"{where}: {value!r} is used before it is made")
        if value is not None and value.kind == PARAM and value not in defined:
            _fail(graph, f"{where}: {value!r} is not a parameter of this region")
    if node.op in PLACEMENTS:
        _check_placement(graph, where, node)
        if node.outputs[0] in defined:
            _fail(graph, f"{where}: {node.outputs[0]!r} is defined twice")
        defined.add(node.outputs[0])
        return
    try:
        record = ops.get(node.op)
        if len(node.inputs) != len(record.inputs) or len(node.outputs) != len(record.outputs):
            _fail(graph, f"{where}: wrong number of operands")
        if record.complete_attrs(node.attrs) != node.attrs:
            _fail(graph, f"{where}: attributes are not complete")
        types = record.infer([None if v is None else v.type for v in node.inputs], node.attrs)
    except (PluginError, ValueError) as error:
        raise _error(graph, f"{where}: {getattr(error, 'message', error)}") from error
    for operand, value, type_ in zip(record.outputs, node.outputs, types):
        if value is None:
            if not operand.optional:
                _fail(graph, f"{where}: output {operand.name} is absent")
        elif operand.inout:
            if value.kind not in (GRAD, STATE, INPUT, PARAM):
                _fail(graph, f"{where}: read-write output {operand.name} is {value.kind}, not storage")
        else:
            if value in defined or value.kind != ACTIVATION:
                _fail(graph, f"{where}: {value!r} is defined twice")
            if value.type != type_:
                _fail(graph, f"{where}: output {operand.name} is {value.type}, the op makes {type_}")
            defined.add(value)


def _check_placement(graph: Graph, where: str, node: Node) -> None:
    result = node.outputs[0]
    if any(v.dtype != result.dtype for v in node.inputs):
        _fail(graph, f"{where}: a {node.op} keeps the dtype")
    if node.op == VIEW:
        if _sizes(node.inputs[0].shape) != _sizes(result.shape):
            _fail(graph, f"{where}: a view keeps elements and dtype")
        return
    rows = result.shape[0]
    if any(len(v.shape) != 2 or v.shape[0] != rows for v in (*node.inputs, result)):
        _fail(graph, f"{where}: a {node.op} is of matrices with the same rows")
    widths = [v.shape[1] for v in node.inputs]
    if node.op == JOIN and (result.shape[1] != sum(widths) or len(set(node.inputs)) != len(widths)):
        _fail(graph, f"{where}: a join has the columns of its inputs, each once")
    if node.op == SLICE:
        start, stop = node.attrs["start"], node.attrs["stop"]
        if not 0 <= start < stop <= widths[0] or result.shape[1] != stop - start:
            _fail(graph, f"{where}: there are no columns {start} to {stop} of {result.shape[1]}")


def _sizes(shape: Shape) -> tuple[list[str], int]:
    """Symbolic axes, and the product of the others."""
    return [d for d in shape if isinstance(d, str)], math.prod(d for d in shape if not isinstance(d, str))


def _check_joined(graph: Graph, region: Region) -> None:
    for value in region.joined.values():
        parts = value.parts
        fits = value.shape == (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
        if not fits or any(p not in region.params.values() or p.trainable != value.trainable for p in parts):
            _fail(graph, f"region {region.name}: {value!r} is not the rows of {', '.join(map(repr, parts))}")


def _check_widened(graph: Graph, region: Region) -> None:
    """Rule 7."""
    for widened in region.widened.values():
        (rows, columns), base = widened.shape, widened.base
        ranks = sum(first.shape[0] for first in widened.firsts)
        fits = base.shape == (rows - ranks, columns - ranks) and not base.trainable
        fits = fits and widened.whole.shape[0] == base.shape[0] and widened.turned.shape[1] == base.shape[1]
        fits = fits and all(first.shape[1:] == base.shape[1:] for first in widened.firsts)
        for second, row, column, _ in widened.seconds:
            fits = fits and row + second.shape[0] <= base.shape[0] and column + second.shape[1] <= ranks
        if not fits:
            _fail(graph, f"region {region.name}: {widened.whole!r} is not {base!r} with its adapters beside it")


def _check_rows_apart(graph: Graph, region: Region, handed: set[Value]) -> None:
    """Rule 6. A view of a value lies where the value lies. ``handed``: what the region hands on to be joined elsewhere."""
    source = {n.outputs[0]: n.inputs[0] for n in region.nodes() if n.op == VIEW}

    def root(value: Value) -> Value:
        while value in source:
            value = source[value]
        return value

    joined = [root(v) for n in region.nodes() if n.op == JOIN for v in n.inputs]
    apart = {*joined, *handed, *(n.outputs[0] for n in region.nodes() if n.op == SLICE)}
    if len(set(joined)) != len(joined):
        _fail(graph, f"region {region.name}: a value is joined twice")
    for node in region.nodes():
        if node.op in PLACEMENTS:
            continue
        record = ops.get(node.op)
        for operand, value in zip((*record.inputs, *record.outputs), (*node.inputs, *node.outputs)):
            if value is not None and root(value) in apart and operand.name not in record.rows_apart:
                _fail(graph, f"region {region.name}, {node!r}: rows of {operand.name} lie apart, which {node.op} does not take")


def _handed_to_joins(graph: Graph) -> dict[str, set[Value]]:
    """By region, the gradients it hands to one before it that joins them."""
    found: dict[str, set[Value]] = {region.name: set() for region in graph.ordered_regions()}
    order = [*graph.layers, graph.epilogue.name]
    for name, next_name in zip(order, order[1:]):
        region, maker = graph.regions[name], graph.regions[next_name]
        joined = {v for n in region.nodes() if n.op == JOIN for v in n.inputs}
        for value, made in zip(region.grad_in, maker.grad_out):
            if value in joined:
                if made is None or made in maker.grad_in:
                    _fail(graph, f"region {name} joins {value!r}, which region {next_name} doesn't make")
                found[next_name].add(made)
    return found


def _check_carries(graph: Graph) -> None:
    """Rule 4."""
    if not graph.layers:
        return
    before = graph.prologue
    for name in [*graph.layers, graph.epilogue.name]:
        region = graph.regions[name]
        flowing = [v.type for v in before.carry_out]
        if [v.type for v in region.carry_in] != flowing:
            _fail(graph, f"region {name} takes {[v.type for v in region.carry_in]}, is handed {flowing}")
        read = {v for n in before.backward for v in n.inputs} | set(before.grad_out)
        for wanted, made in zip(before.grad_in, region.grad_out):
            if made is None and wanted in read:
                _fail(graph, f"region {before.name} reads {wanted!r}, which region {name} doesn't hand back")
        before = region


__all__ = ["SpecError", "check"]
