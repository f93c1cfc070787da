"""How trained parameters are laid out: flat, so that zeroing, clipping and updating are a few sweeps over memory.

All trained parameters lie one after another in one fp32 storage, matrices first (they get weight decay), then vectors.
Gradients, optimizer states and the copies in the compute dtype use the same element offsets. Each parameter starts at a
multiple of 64 bytes in every one of them; the padding between stays zero. Parameters that are read as one (a joined
parameter of the graph) follow one another without padding.

Where masters of matrices are kept in the compute dtype they are what products read, and there is no copy. Vectors stay fp32,
so the masters then are two storages: of the matrices' elements, and of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..ir.graph import Graph, Value
from ..weights.formats import byte_count
from .program import HOST_WRITTEN, PERSISTENT, Instruction

if TYPE_CHECKING:
    from .emit import Emitter

PARAMETER_ALIGNMENT = 32
"""Elements; 64 bytes of bf16."""


@dataclass(frozen=True)
class TrainedParameter:
    name: str
    shape: tuple[int, ...]
    role: str
    offset: int
    """In elements of the flat storages."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TrainedTypes:
    """Dtypes of what is kept of a trained parameter. compute: what products read matrices as. master: what updates change of
    matrices (of vectors it is f32): f32, or compute. states: of the optimizer."""

    compute: str
    master: str = "f32"
    states: str = "f32"

    def __post_init__(self) -> None:
        if self.master not in ("f32", self.compute):
            raise ValueError(f"masters are kept in f32 or in what products read, {self.compute}; not in {self.master}")


@dataclass(frozen=True)
class MasterPart:
    """A storage of masters: elements [start, stop) of the flat layout."""

    storage: str
    dtype: str
    start: int
    stop: int

    def offset(self, element: int) -> int:
        """Bytes before an element."""
        return byte_count(self.dtype, (element - self.start,))


@dataclass(frozen=True)
class ParameterGroup:
    """What one optimizer instruction updates: elements [start, stop) of the flat storages."""

    name: str
    start: int
    stop: int
    decay: bool


class TrainableLayout:
    """``joined``: pieces of the flat storages that are several parameters read as one, by name."""

    def __init__(
        self, parameters: Sequence[TrainedParameter], groups: Sequence[ParameterGroup], size: int, types: TrainedTypes,
        joined: Sequence[TrainedParameter] = (),
    ) -> None:
        self.parameters = {p.name: p for p in parameters}
        self.joined = {p.name: p for p in joined}
        self.groups, self.size, self.types = list(groups), size, types
        self.masters = [MasterPart("master", "f32", 0, size)]
        if types.master != "f32":
            self.masters = [
                MasterPart("master", types.master, g.start, g.stop) if g.decay else
                MasterPart("master_vectors", "f32", g.start, g.stop) for g in self.groups
            ]

    @classmethod
    def of(cls, graph: Graph, types: TrainedTypes) -> TrainableLayout:
        trained = _neighbours_together(graph)
        parameters: list[TrainedParameter] = []
        groups: list[ParameterGroup] = []
        offset = 0
        for group, matrices in (("matrices", True), ("vectors", False)):
            start = offset
            for name, value in trained:
                if (len(value.shape) >= 2) == matrices:
                    parameters.append(TrainedParameter(name, tuple(value.shape), value.role or "", offset))
                    offset += -(-parameters[-1].size // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
            if offset > start:
                groups.append(ParameterGroup(group, start, offset, matrices))
        return cls(parameters, groups, offset, types, _joined(graph, {p.name: p for p in parameters}))

    @property
    def has_copy(self) -> bool:
        """Whether matrices are computed with in another dtype than the master's."""
        return self.types.compute != self.types.master and any(len(p.shape) >= 2 for p in self.parameters.values())

    def flat(self, state: str, parameter: TrainedParameter) -> tuple[str, int]:
        """Where a program with an update keeps a parameter's ``state`` ("master", or a state of the optimizer as
        "optimizer.<state>"): a flat tensor, and the parameter's first element in it."""
        group = next(g for g in self.groups if g.start <= parameter.offset < g.stop)
        return f"{state}.{group.name}", parameter.offset - group.start

    def place(self, emitter: Emitter) -> None:
        """Declares storages and tensors: "master", "trained" (the copy), "gradients", and one of each per parameter."""
        if not self.size:
            return
        for part in self.masters:
            self._flat(emitter, part.storage, "trained", part.dtype, part.stop - part.start)
        if self.has_copy:
            self._flat(emitter, "trained", "trained", self.types.compute)
        if emitter.graph.grads:
            self._flat(emitter, "gradients", "gradients", "f32")
        for p in (*self.parameters.values(), *self.joined.values()):
            part = self._master_at(p.offset)
            emitter.add_tensor(f"master.{p.name}", part.storage, part.dtype, p.shape, part.offset(p.offset))
            if self.has_copy and len(p.shape) >= 2:
                size = byte_count(self.types.compute, (1,))
                emitter.add_tensor(f"trained.{p.name}", "trained", self.types.compute, p.shape, size * p.offset)
            if emitter.graph.grads:
                emitter.add_tensor(f"gradients.{p.name}", "gradients", "f32", p.shape, 4 * p.offset)

    def _master_at(self, element: int) -> MasterPart:
        return next(part for part in self.masters if part.start <= element < part.stop)

    def _flat(self, emitter: Emitter, name: str, arena: str, dtype: str, size: int | None = None) -> None:
        size = self.size if size is None else size
        emitter.add_storage(name, arena, byte_count(dtype, (size,)), PERSISTENT)
        emitter.add_tensor(name, name, dtype, (size,))

    def tensor_name(self, name: str) -> str:
        """The tensor that ops read parameter ``name`` from."""
        matrix = len((self.parameters.get(name) or self.joined[name]).shape) >= 2
        return f"trained.{name}" if self.has_copy and matrix else f"master.{name}"

    def gradient_name(self, name: str) -> str:
        return f"gradients.{name}"

    def update(self, emitter: Emitter, optimizer) -> list[Instruction]:
        """Global norm, and the optimizer's instructions for each group."""
        norm = emitter.add_tensor("grad_norm", emitter.add_storage("grad_norm", "inputs", 4, PERSISTENT), "f32", (1,))
        hyper = emitter.add_tensor("hyper", emitter.add_storage("hyper", "inputs", 16, PERSISTENT | HOST_WRITTEN), "f32", (4,))
        kept = self.types.states
        for state in optimizer.states:
            self._flat(emitter, f"optimizer.{state}", "optimizer", kept)
        instructions = [Instruction("global_norm", ("gradients",), (norm,))]
        for group in self.groups:
            def part(flat: str, dtype: str, start: int, storage: str | None = None, group: ParameterGroup = group) -> str:
                count = group.stop - group.start
                return emitter.add_tensor(f"{flat}.{group.name}", storage or flat, dtype, (count,), start)

            master, first = self._master_at(group.start), byte_count(kept, (group.start,))
            states = {state: part(f"optimizer.{state}", kept, first) for state in optimizer.states}
            gradient = part("gradients", "f32", 4 * group.start)
            parameter = part("master", master.dtype, master.offset(group.start), master.storage)
            instructions += optimizer.emit(group, gradient, norm, hyper, parameter, states)
        return instructions

    def copy(self) -> list[Instruction]:
        """What makes the copy in the compute dtype follow the masters, where there is one."""
        if not self.has_copy:
            return []
        return [Instruction("cast", ("master",), ("trained",), (("out_dtype", self.types.compute),))]


def _neighbours_together(graph: Graph) -> list[tuple[str, Value]]:
    """The trained parameters in the graph's order, those that are read as one drawn to where the first of them stands."""
    trained = {name: v for name, v, _ in graph.instances() if v.trainable}
    rows = {names[0]: names for _, v, _, names in graph.joined_instances() if v.trainable}
    drawn = {name for names in rows.values() for name in names[1:]}
    return [(n, trained[n]) for name in trained if name not in drawn for n in rows.get(name, (name,))]


def _joined(graph: Graph, parameters: Mapping[str, TrainedParameter]) -> list[TrainedParameter]:
    """Raises ValueError where padding stands between the parts."""
    result = []
    for name, value, _, names in graph.joined_instances():
        if not value.trainable:
            continue
        parts = [parameters[n] for n in names]
        if any(b.offset != a.offset + a.size for a, b in pairwise(parts)):
            raise ValueError(f"parameters {', '.join(names)} are read as one, but their sizes leave padding between them")
        result.append(TrainedParameter(name, tuple(value.shape), value.role or "", parts[0].offset))
    return result
