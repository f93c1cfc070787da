"""Graph, regions, nodes and values: SSA over ops, with each layer body kept once.

A graph is a prologue, a stack of layers and an epilogue. Layers of one kind share one `Region`; ``Graph.layers`` names
the region of each layer in order, so a model of 80 layers costs passes and dumps as much as one of 4. A region has a
forward and, after the `autodiff` pass, a backward list of nodes. What leaves one layer enters the next through the
region's carried values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from ..ops.record import Shape, TensorType

INPUT, CONSTANT, PARAM, GRAD, STATE, ACTIVATION = "input", "constant", "param", "grad", "state", "activation"
"""Kinds of values: a batch input; an array fixed when the program is planned; a weight; the gradient accumulator of a
weight; storage that outlives a step (a KV cache); anything a node computes."""

PROLOGUE, EPILOGUE = "prologue", "epilogue"

BUFFER = "buffer"
"""The role of parameters that checkpoints have and that are never trained."""


@dataclass(eq=False)
class Value:
    """One tensor of the graph. In a layer region it stands for one tensor per layer."""

    id: int
    name: str
    shape: Shape
    dtype: str
    kind: str = ACTIVATION
    role: str | None = None
    """What the tensor is to the model ("attn.q", "mlp.gate", "norm", "embed", "lm_head", "lora_a", ...): policies select
    by role, never by name."""
    trainable: bool = False
    of: Value | None = None
    """The parameter that a GRAD value accumulates the gradient of."""
    parts: tuple[Value, ...] = ()
    """The parameters whose rows, one after another, are this one (`Graph.join_params`). They keep their names in files."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    def __repr__(self) -> str:
        dims = ",".join(str(d) for d in self.shape)
        return f"%{self.id}:{self.name}<{self.dtype}[{dims}]>"


@dataclass(eq=False)
class Widened:
    """A frozen weight [N, K] with adapters of R ranks in all beside it, as one matrix [N + R, K + R]:

        W  sB     W: ``base``. A [R, K]: ``firsts``, their rows one after another.
        A  0      sB [N, R]: of ``seconds`` each (B, its first row, its first column among R, its factor); zero elsewhere.

    What multiplies with it reads all but the last rows, ``whole`` [N, K + R], or all but the last columns, ``turned``
    [N + R, K]. W is written when it is bound; A and B by the program, whenever they changed.
    """

    base: Value
    firsts: tuple[Value, ...]
    seconds: tuple[tuple[Value, int, int, float], ...]
    whole: Value
    turned: Value

    @property
    def shape(self) -> tuple[int, int]:
        """[N + R, K + R]."""
        return self.turned.shape[0], self.whole.shape[1]


@dataclass(eq=False)
class Node:
    """One application of an op. ``inputs`` and ``outputs`` hold None where an optional operand is absent."""

    op: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        outs = ", ".join(repr(v) for v in self.outputs)
        return f"{outs} = {self.op}({', '.join('-' if v is None else f'%{v.id}' for v in self.inputs)})"


@dataclass(eq=False)
class Region:
    """A straight list of nodes that runs once (prologue, epilogue) or once per layer of its kind."""

    name: str
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    carry_in: tuple[Value, ...] = ()
    carry_out: tuple[Value, ...] = ()
    grad_in: tuple[Value, ...] = ()
    """Gradients of carry_out: what the backward list starts from."""
    grad_out: tuple[Value | None, ...] = ()
    """Gradients of carry_in, or None where nothing before this region learns."""
    params: dict[str, Value] = field(default_factory=dict)
    joined: dict[str, Value] = field(default_factory=dict)
    """Parameters that are several of ``params`` read as one."""
    widened: dict[str, Widened] = field(default_factory=dict)
    """Frozen parameters, joined or not, with adapters beside them."""
    states: dict[str, Value] = field(default_factory=dict)

    def nodes(self) -> Iterator[Node]:
        yield from self.forward
        yield from self.backward

    def saved(self) -> list[Value]:
        """Forward activations that the backward list reads, in the order they are made."""
        made = {v: None for v in self.carry_in} | {v: None for n in self.forward for v in n.outputs if v is not None}
        read = {v for n in self.backward for v in n.inputs if v is not None}
        return [v for v in made if v in read and v.kind == ACTIVATION]


class Graph:
    """A traced model and what the passes made of it."""

    def __init__(self) -> None:
        self._ids = count()
        self.inputs: dict[str, Value] = {}
        self.constants: dict[str, tuple[Value, np.ndarray]] = {}
        self.regions: dict[str, Region] = {PROLOGUE: Region(PROLOGUE), EPILOGUE: Region(EPILOGUE)}
        self.layers: tuple[str, ...] = ()
        self.outputs: dict[str, Value] = {}
        self.grads: dict[Value, Value] = {}
        """Parameter -> its gradient accumulator."""
        self.history: list[str] = []
        """Names of the passes applied, in order."""

    @property
    def prologue(self) -> Region:
        return self.regions[PROLOGUE]

    @property
    def epilogue(self) -> Region:
        return self.regions[EPILOGUE]

    def layer_regions(self) -> list[Region]:
        """The layer bodies, each once, in order of first use."""
        return [self.regions[name] for name in dict.fromkeys(self.layers)]

    def ordered_regions(self) -> list[Region]:
        return [self.prologue, *self.layer_regions(), self.epilogue]

    def value(
        self, name: str, shape: Shape, dtype: str, kind: str = ACTIVATION, role: str | None = None,
        trainable: bool = False, of: Value | None = None,
    ) -> Value:
        return Value(next(self._ids), name, tuple(shape), dtype, kind, role, trainable, of)

    def input(self, name: str, shape: Shape, dtype: str) -> Value:
        """The batch input called ``name``, made at first use; later uses must agree on its type."""
        known = self.inputs.get(name)
        if known is None:
            known = self.inputs[name] = self.value(name, shape, dtype, INPUT)
        elif known.type != TensorType(tuple(shape), dtype):
            raise ValueError(f"input {name!r} is {known.type}, and is asked for as {TensorType(tuple(shape), dtype)}")
        return known

    def constant(self, name: str, array: np.ndarray) -> Value:
        """A float32 array that is fixed when the program is planned (a rotary table, say)."""
        if name in self.constants:
            return self.constants[name][0]
        value = self.value(name, array.shape, "f32", CONSTANT)
        self.constants[name] = (value, np.ascontiguousarray(array, np.float32))
        return value

    def param(self, region: Region, name: str, shape: Shape, role: str, dtype: str = "f32") -> Value:
        """A weight of a region. In a layer region every layer has its own."""
        if name in region.params:
            raise ValueError(f"region {region.name} has two parameters named {name!r}")
        value = self.value(name, shape, dtype, PARAM, role)
        region.params[name] = value
        return value

    def join_params(self, region: Region, name: str, parts: Sequence[Value]) -> Value:
        """Several parameters of ``region`` as one, their rows one after another. They must agree in all but their number
        of rows, and in whether they are trained: memory is laid out so that the joined one is a piece of it."""
        if name in region.params or name in region.joined:
            raise ValueError(f"region {region.name} has two parameters named {name!r}")
        first = parts[0]
        for part in parts:
            if (part.shape[1:], part.dtype, part.trainable) != (first.shape[1:], first.dtype, first.trainable):
                raise ValueError(f"{part!r} cannot be joined to {first!r}: they differ in more than their number of rows")
        rows = sum(part.shape[0] for part in parts)
        value = self.value(name, (rows, *first.shape[1:]), first.dtype, PARAM, first.role, first.trainable)
        value.parts = tuple(parts)
        region.joined[name] = value
        return value

    def grad_of(self, param: Value) -> Value:
        """The f32 accumulator of a parameter's gradient."""
        if param not in self.grads:
            self.grads[param] = self.value(f"{param.name}.grad", param.shape, "f32", GRAD, param.role, of=param)
        return self.grads[param]

    def instances(self) -> Iterator[tuple[str, Value, int | None]]:
        """Every parameter as (full name, value, layer): layer parameters once per layer as ``layers.<i>.<name>``."""
        seen: set[Value] = set()
        for name, value in self.prologue.params.items():
            seen.add(value)
            yield name, value, None
        for index, region_name in enumerate(self.layers):
            for name, value in self.regions[region_name].params.items():
                yield f"layers.{index}.{name}", value, index
        for name, value in self.epilogue.params.items():
            if value not in seen:
                yield name, value, None

    def joined_instances(self) -> Iterator[tuple[str, Value, int | None, tuple[str, ...]]]:
        """Every joined parameter as (full name, value, layer, full names of its parts)."""
        order = [(self.prologue, None), *((self.regions[r], i) for i, r in enumerate(self.layers)), (self.epilogue, None)]
        for region, layer in order:
            prefix = "" if layer is None else f"layers.{layer}."
            for name, value in region.joined.items():
                yield prefix + name, value, layer, tuple(prefix + part.name for part in value.parts)

    def widened_instances(self) -> Iterator[tuple[str, Widened, int]]:
        """Every weight of the layers with adapters beside it as (full name, what it is made of, layer)."""
        for layer, region_name in enumerate(self.layers):
            for name, widened in self.regions[region_name].widened.items():
                yield f"layers.{layer}.{name}", widened, layer

    def divide(self, name: str, layers: Collection[int], new_name: str) -> Region:
        """Gives ``layers``, of region ``name``, a region of their own: the same values and parameters (which stand for one
        tensor a layer), and nodes that are copies, in the same order."""
        region = self.regions[name]

        def copies(nodes: list[Node]) -> list[Node]:
            return [Node(n.op, n.inputs, n.outputs, dict(n.attrs)) for n in nodes]

        self.regions[new_name] = replace(
            region, name=new_name, forward=copies(region.forward), backward=copies(region.backward),
            params=dict(region.params), joined=dict(region.joined), widened=dict(region.widened),
            states=dict(region.states),
        )
        self.layers = tuple(new_name if i in layers else old for i, old in enumerate(self.layers))
        return self.regions[new_name]

    def record(self, name: str) -> Graph:
        self.history.append(name)
        return self
