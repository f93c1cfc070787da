"""Builders append nodes to a region: `Builder` forwards, `GradientBuilder` backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import ops
from ..ops.record import TensorType
from .graph import PARAM, Graph, Node, Region, Value

VIEW, SLICE, JOIN = "view", "slice", "join"
"""The nodes that are no ops. They say where elements lie; they cost nothing and emit nothing.

view: the same elements under another shape. slice: columns [start, stop) of a matrix. join: matrices that lie side by side
in one, in order; what makes them writes their columns of it.
"""
PLACEMENTS = frozenset({VIEW, SLICE, JOIN})


class Builder:
    """Appends nodes to one list of one region, inferring the types of what they make."""

    def __init__(self, graph: Graph, region: Region, nodes: list[Node]) -> None:
        self.graph, self.region, self.nodes = graph, region, nodes

    def op(
        self, name: str, *inputs: Value | None, absent: Sequence[str] = (), inout: dict[str, Value] | None = None,
        label: str | None = None, role: str | None = None, **attrs: Any,
    ) -> Any:
        """Applies op ``name``. Returns its output value, or a tuple when it has several (None for absent ones).

        absent: optional outputs to leave out. inout: the existing values that read-write outputs work on.
        Raises ValueError where operands, attributes or shapes do not fit the op's record.
        """
        record = ops.get(name)
        if len(inputs) > len(record.inputs):
            raise ValueError(f"op {name} takes {len(record.inputs)} inputs, got {len(inputs)}")
        operands = (*inputs, *(None,) * (len(record.inputs) - len(inputs)))
        for operand, value in zip(record.inputs, operands):
            if value is None and not operand.optional:
                raise ValueError(f"op {name} needs its input {operand.name!r}")
        complete = record.complete_attrs(attrs)
        types = record.infer([None if v is None else v.type for v in operands], complete)
        outputs = tuple(
            self._output(record.outputs[i], types[i], absent, inout or {}, label or name, role, name)
            for i in range(len(record.outputs))
        )
        self.nodes.append(Node(name, operands, outputs, complete))
        return outputs[0] if len(outputs) == 1 else outputs

    def _output(self, operand, type_: TensorType, absent, inout, label, role, op_name) -> Value | None:
        if operand.name in absent:
            if not operand.optional:
                raise ValueError(f"op {op_name}: output {operand.name!r} is not optional")
            return None
        if operand.inout:
            if operand.name not in inout:
                raise ValueError(f"op {op_name}: output {operand.name!r} works on an existing value; name it in inout")
            return inout[operand.name]
        return self.graph.value(label, type_.shape, type_.dtype, role=role)

    def view(self, value: Value, shape: Sequence[int | str]) -> Value:
        """The same elements under another shape; the symbolic leading axis must stay."""
        result = self.graph.value(value.name, tuple(shape), value.dtype, role=value.role)
        self.nodes.append(Node(VIEW, (value,), (result,), {}))
        return result

    def slice(self, value: Value, start: int, stop: int) -> Value:
        """Columns [start, stop) of ``value`` [T, N]."""
        result = self.graph.value(value.name, (value.shape[0], stop - start), value.dtype, role=value.role)
        self.nodes.append(Node(SLICE, (value,), (result,), {"start": start, "stop": stop}))
        return result

    def join(self, values: Sequence[Value], label: str) -> Value:
        """Matrices [T, N_i] of one dtype as the matrix [T, sum of N_i] whose columns they are."""
        first = values[0]
        result = self.graph.value(label, (first.shape[0], sum(v.shape[1] for v in values)), first.dtype)
        self.nodes.append(Node(JOIN, tuple(values), (result,), {}))
        return result


class GradientBuilder(Builder):
    """What a gradient rule gets: emits into the region's backward list."""

    def __init__(self, graph: Graph, region: Region, needs: set[Value]) -> None:
        super().__init__(graph, region, region.backward)
        self._needs = needs

    def needs_grad(self, value: Value | None) -> bool:
        """Whether something that learns lies upstream of ``value``."""
        return value is not None and value in self._needs

    def accumulate(
        self, param: Value, op_name: str, *inputs: Value | None, output: str | None = None, **attrs: Any
    ) -> Any:
        """Emits ``op_name`` with its read-write output (the only one, or ``output``) on the gradient of ``param``."""
        if param.kind != PARAM:
            raise ValueError(f"{op_name}: gradients accumulate into parameters; {param!r} is none")
        record = ops.get(op_name)
        name = output or next(o.name for o in record.outputs if o.inout)
        return self.op(op_name, *inputs, inout={name: self.graph.grad_of(param)}, **attrs)

    def sum(self, values: Sequence[Value]) -> Value:
        """The sum of the gradients of a value's uses, in a fixed order."""
        total = values[0]
        for value in values[1:]:
            dtype = "residual" if "residual" in (total.dtype, value.dtype) else total.dtype
            total = self.op("add", total, value, out_dtype=dtype, label="grad_sum")
        return total
