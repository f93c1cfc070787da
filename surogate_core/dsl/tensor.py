"""The symbolic tensor that a family's forward method computes with, and the context it is traced in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ir.builder import Builder
from ..ir.graph import Graph, Region, Value
from .rope import RopeSpec, rope_table


class Context:
    """Where tracing stands: the graph, the region nodes go to, what layers hand on beside x, and the batch inputs that they
    share."""

    def __init__(self, graph: Graph, max_positions: int) -> None:
        self.graph, self.max_positions = graph, max_positions
        self.region: Region = graph.prologue
        self.flow = Flow()
        self._rope_specs: list[RopeSpec] = []

    @property
    def builder(self) -> Builder:
        return Builder(self.graph, self.region, self.region.forward)

    def op(self, name: str, *inputs: Tensor | Value | None, **attrs: Any) -> Any:
        """Applies an op of the core or of a plugin; Tensors in, Tensors out."""
        raw = [v.value if isinstance(v, Tensor) else v for v in inputs]
        made = self.builder.op(name, *raw, **attrs)
        if isinstance(made, tuple):
            return tuple(None if v is None else Tensor(self, v) for v in made)
        return Tensor(self, made)

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "i32") -> Tensor:
        return Tensor(self, self.graph.input(name, tuple(shape), dtype))

    @property
    def tokens(self) -> Tensor:
        """Token ids, i32 [T]."""
        return self.input("tokens", ("T",))

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document, i32 [T]."""
        return self.input("positions", ("T",))

    @property
    def doc_starts(self) -> Tensor:
        """Where documents start in the batch, i32 ["D"], D the most documents + 1; entries past the last repeat T."""
        return self.input("doc_starts", ("D",))

    def rope_table(self, spec: RopeSpec) -> Tensor:
        """The rotary table of ``spec``, f32 [max_positions, R/2, 2], shared by the layers that rotate alike."""
        if spec not in self._rope_specs:
            self._rope_specs.append(spec)
        name = f"rope_table_{self._rope_specs.index(spec)}"
        if name in self.graph.constants:
            return Tensor(self, self.graph.constants[name][0])
        return self.constant(name, rope_table(spec, self.max_positions))

    def constant(self, name: str, array: np.ndarray) -> Tensor:
        return Tensor(self, self.graph.constant(name, array))


class Flow:
    """Values that layers hand on by name. Reading gives what the prologue or an earlier layer set last under the name; what a
    layer sets, later layers read. A value goes no further than to its last reader."""

    def __init__(self, take: Callable[[str], Tensor] | None = None) -> None:
        """take: gives what a layer is handed under a name, at the first read. None: nothing."""
        self._take = take
        self.taken: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Raises ValueError where nothing before has set ``name``."""
        if name in self.given:
            return self.given[name]
        if name not in self.taken:
            if self._take is None:
                raise ValueError(f"nothing before hands on {name!r}")
            self.taken[name] = self._take(name)
        return self.taken[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.given[name] = value


class Tensor:
    """A value being traced. Supports +, times a number, and what `Context.op` offers."""

    def __init__(self, context: Context, value: Value) -> None:
        self.context, self.value = context, value

    @property
    def shape(self) -> tuple[int | str, ...]:
        return self.value.shape

    @property
    def dtype(self) -> str:
        return self.value.dtype

    def __add__(self, other: Tensor) -> Tensor:
        dtype = "residual" if "residual" in (self.dtype, other.dtype) else self.dtype
        return self.context.op("add", self, other, out_dtype=dtype)

    def __mul__(self, factor: float) -> Tensor:
        """Times a constant; by 1 it is the tensor itself."""
        return self if factor == 1 else self.context.op("scale", self, factor=float(factor), label="scaled")

    def reshape(self, *shape: int | str) -> Tensor:
        """The same elements in another shape."""
        if tuple(shape) == self.shape:
            return self
        return Tensor(self.context, self.context.builder.view(self.value, shape))
