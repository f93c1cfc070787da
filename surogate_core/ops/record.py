"""The op record: everything the toolkit knows about one operation, in one declarative object.

A record names its operands and attributes, infers output types, gives the gradient rule, a numpy reference in float64,
the tolerance a kernel is held to, and samples to test it on. Conformance and gradient tests, the table of docs/ops.md and the
spec of graphs are driven by these records, so an op that is registered is tested without writing a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..ir.builder import GradientBuilder
    from ..ir.graph import Node, Value

Shape = tuple["int | str", ...]
"""Axis lengths; a string is a symbolic dimension such as "T" (tokens), fixed when a program is planned."""


@dataclass(frozen=True)
class TensorType:
    """Shape and element type of a value. ``dtype`` is a concrete name ("f32", "bf16", "i32", "q4_1", ...) or one of the
    precision classes "compute" and "residual", which the `precision` pass makes concrete from the recipe."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Operand:
    """One input or output. ``optional`` inputs and outputs may be absent; an ``inout`` output is read and written: it
    names storage that exists before the op runs (a gradient accumulator, a cache, an optimizer state)."""

    name: str
    doc: str
    optional: bool = False
    inout: bool = False


@dataclass(frozen=True)
class Attr:
    """One attribute: ``kind`` is int, float or str (booleans are ints 0 and 1)."""

    kind: type
    default: int | float | str | None
    doc: str


class PerLayer(int):
    """An integer attribute that differs between the layers of a region: ``self + stride * layer`` when emitted."""

    stride: int

    def __new__(cls, first: int, stride: int) -> PerLayer:
        self = super().__new__(cls, first)
        self.stride = stride
        return self


@dataclass(frozen=True)
class Tolerance:
    """A kernel passes when ||out - reference|| <= relative * ||reference|| + absolute * sqrt(size), output by output.
    ``relative`` is keyed by the output's dtype."""

    relative: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-6, "bf16": 4e-3})
    absolute: float = 1e-7


@dataclass
class Sample:
    """One conformance case: input arrays (numpy; float operands in float64, made concrete per dtype by the harness),
    attributes, and the dtype combinations worth running, each a mapping operand name -> dtype for inputs and outputs
    (operands not named keep "f32", integer operands "i32"). ``initial`` holds starting values of inout outputs."""

    inputs: dict[str, np.ndarray | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    dtypes: Sequence[Mapping[str, str]] = ({},)
    initial: dict[str, np.ndarray] = field(default_factory=dict)
    absent_outputs: frozenset[str] = frozenset()


InferFn = Callable[[Sequence[TensorType | None], Mapping[str, Any]], list[TensorType]]
ReferenceFn = Callable[..., "list[np.ndarray]"]
StoreFn = Callable[..., "list[np.ndarray]"]
VjpFn = Callable[["GradientBuilder", "Node", "Sequence[Value | None]"], "Sequence[Value | None]"]
CostFn = Callable[[Sequence[TensorType | None], Mapping[str, Any]], float]


@dataclass(frozen=True)
class Op:
    """An operation.

    infer(inputs, attrs) -> types of the outputs, in order; raises ValueError naming the operand when shapes disagree.
    reference(inputs, attrs, initial) -> outputs as float64 (or integer) arrays; ``inputs`` and ``initial`` map operand
        names to arrays (None = absent); ``initial`` holds the inout outputs' values before the op.
    store(outputs, dtypes, inputs, attrs) -> the reference's outputs as float64 once stored in ``dtypes``. For ops that
        define how they round; others round to nearest, which their tolerance covers.
    vjp(builder, node, output_gradients) -> one gradient (or None) per input. Gradients of parameters are not returned:
        they are written with ``builder.accumulate``. None for an op that has no gradient.
    flops(inputs, attrs) -> multiply-add operations counted as two; 0 for ops bound by memory.
    samples(rng) -> conformance cases: odd, empty and large shapes.
    in_place: index of the input whose storage output 0 may take over when that input is not used again, or None.
    rows_apart: operands that may be columns of a wider matrix: every axis but the first is dense, rows lie apart. A
        backend that joins projections has a kernel that takes them so. The gradient of an input that is named here is made by
        an op that names its output, or is the gradient of the op's result itself.
    differentiable: input names that finite differences are checked on (level 2); empty when there is no gradient.
    compute_inputs: inputs that the op wants in the recipe's compute dtype (operands of matrix products); the `precision`
        pass casts a wider value once and shares the copy.
    """

    name: str
    doc: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    infer: InferFn
    reference: ReferenceFn
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    vjp: VjpFn | None = None
    flops: CostFn | None = None
    store: StoreFn | None = None
    samples: Callable[[np.random.Generator], list[Sample]] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    in_place: int | None = None
    rows_apart: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    compute_inputs: tuple[str, ...] = ()

    def complete_attrs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` with defaults filled in, sorted by name. Raises ValueError for unknown or missing attributes."""
        unknown = set(given) - set(self.attrs)
        if unknown:
            raise ValueError(f"op {self.name} has no attribute {sorted(unknown)[0]!r}; it has {sorted(self.attrs)}")
        result: dict[str, Any] = {}
        for name in sorted(self.attrs):
            attr = self.attrs[name]
            value = given.get(name, attr.default)
            if value is None:
                continue
            result[name] = value if isinstance(value, attr.kind) else attr.kind(value)
        return result


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) when a shape rule is broken."""
    if not condition:
        raise ValueError(message)
