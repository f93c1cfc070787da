"""Graph -> Program: unrolls the layers, drops what nobody reads, gives every value a place, and writes instructions.

Where values live:
    inputs, constants     arena "inputs": written by the host, kept between entries
    frozen parameters     external storages "weight.<name>", bound to the memory-mapped file or to converted copies; some
                          with their adapters beside them, see `WidenedWeights`
    trained parameters    arena "trained": one flat fp32 master of all of them, one flat copy in the compute dtype; or
                          flat masters of the matrices in the compute dtype and of the vectors in fp32
    gradients             arena "gradients": flat fp32, in the same order, so that clipping and updating are single sweeps
    optimizer state       arena "optimizer"
    caches                external storages, shared between programs
    activations           arena "activations", planned by lifetime
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import ops
from ..ir.builder import JOIN, SLICE, VIEW
from ..ir.graph import ACTIVATION, CONSTANT, GRAD, INPUT, PARAM, Graph, Node, Region, Value
from ..ops.record import PerLayer
from ..weights.formats import FORMATS, byte_count
from .call import Call, Key
from .memory import aligned, lower_bound, plan
from .places import Places
from .prefetch import prefetch, waits
from .program import (
    FIXED, HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Program, Storage, TensorEntry, dense_strides,
)
from .trainable import TrainableLayout, TrainedTypes
from .widened import WidenedWeights

@dataclass(frozen=True)
class EmitOptions:
    """bindings: symbolic dimension -> length. compute: dtype that products read trained matrices in. param_dtypes: stored
    dtype of each frozen parameter by full name. optimizer: what emits the update (None for a program that only runs
    forward). master, states: dtypes of what is kept of trained parameters, see `TrainedTypes`. prefetch: the stream
    on which copies of quantised weights are made for the products that read them, see `prefetch`; None: they are read as
    stored. outside: inputs, constants, states and outputs that are bound from outside, by name, and of how many bytes that
    memory is at least. fixed: nothing writes the frozen parameters, nor inputs that this program does not, while it or another
    of its queue runs. more: declares the entries that follow the graph's own."""

    bindings: Mapping[str, int]
    compute: str
    param_dtypes: Mapping[str, str]
    optimizer: Any = None
    master: str = "f32"
    states: str = "f32"
    prefetch: int | None = None
    outside: Mapping[str, int] = field(default_factory=dict)
    fixed: bool = False
    more: Callable[[Emitter], None] | None = None


def emit(graph: Graph, options: EmitOptions) -> Program:
    """Entries: "begin" (zeroes loss and gradients) where there is a loss; "forward", or "micro_step" when the graph was
    differentiated; then also "update", and "refresh" (makes compute copies follow the masters), when ``options.optimizer`` is
    given. Raises KeyError for an unbound dimension or a
    parameter whose stored dtype is not given."""
    return Emitter(graph, options).run()


def emit_each(graph: Graph, options: Iterable[EmitOptions]) -> Iterator[Program]:
    """Programs of one graph for several lengths of its symbolic dimensions. What is decided whatever they are is decided
    once. They must agree in all but ``bindings``, ``outside`` and ``more``."""
    first: Emitter | None = None
    for each in options:
        emitter = Emitter(graph, each, first)
        first = first or emitter
        yield emitter.run()


class Emitter:
    """One emission. ``add_storage``, ``add_tensor`` and ``add_entry`` are what other modules declare theirs with."""

    def __init__(self, graph: Graph, options: EmitOptions, like: Emitter | None = None) -> None:
        """``like``: an emission of the same graph, which is over; only its bindings may be others."""
        self.graph, self.options = graph, options
        self.program = Program()
        self.names: dict[Key, str] = {}
        self.alias: dict[Key, Key] = {} if like is None else like.alias
        self.places = Places(self._shape) if like is None else like.places
        self.calls: list[Call] | None = None if like is None else like.calls
        self.param_names = {(v, layer): name for name, v, layer in graph.instances()}
        self.parts = {name: parts for name, _, _, parts in graph.joined_instances()}
        self.param_names |= {(v, layer): name for name, v, layer, _ in graph.joined_instances()}
        self.widened = WidenedWeights(self)
        self.parts |= self.widened.parts
        self.param_names |= self.widened.names
        self.trained = TrainableLayout.of(graph, TrainedTypes(options.compute, options.master, options.states))
        self.arena_sizes: dict[str, int] = {}
        self.viewed: set[str] = set()

    def run(self) -> Program:
        if self.calls is None:
            self.calls = self._decide()
        calls = self.calls
        self._place_fixed(calls)
        self._place_activations(calls)
        self._entries(calls)
        if self.options.more is not None:
            self.options.more(self)
        if self.options.fixed:
            self._mark_inputs()
        program = self.program
        program.arenas = [Arena(name, size) for name, size in self.arena_sizes.items()]
        program.fingerprint = hashlib.sha256(program.to_bytes()).digest()
        return program

    def _decide(self) -> list[Call]:
        """What runs, and what lies in what: no length of a symbolic dimension matters to it."""
        calls = self._sweep(self._unroll())
        if self.options.prefetch is not None:
            calls = prefetch(calls, self._is_quantised, self.options.prefetch)
        self.places.settle(calls, [self._key(v, None) for v in self.graph.outputs.values()])
        return calls

    # -- unrolling ---------------------------------------------------------------------------------------------------

    def _unroll(self) -> list[Call]:
        graph, calls = self.graph, []
        order: list[tuple[Region, int | None]] = [(graph.prologue, None)]
        order += [(graph.regions[name], i) for i, name in enumerate(graph.layers)]
        order.append((graph.epilogue, None))
        handed: tuple[Key, ...] = ()
        for region, layer in order:
            for value, key in zip(region.carry_in, handed):
                self.alias[(value, layer)] = key
            calls += self._calls(region.forward, layer)
            handed = tuple(self._key(v, layer) for v in region.carry_out)
        if any(r.backward for r in graph.ordered_regions()):
            grads: tuple[Key | None, ...] = ()
            for region, layer in reversed(order):
                for value, key in zip(region.grad_in, grads):
                    if key is not None:
                        self.alias[(value, layer)] = key
                calls += self._calls(region.backward, layer)
                grads = tuple(None if v is None else self._key(v, layer) for v in region.grad_out)
        return calls

    def _key(self, value: Value, layer: int | None) -> Key:
        """The tensor behind a value: global ones have no layer; views and carried values are what they stand for."""
        if value.kind in (INPUT, CONSTANT) or (value.kind == PARAM and (value, layer) not in self.param_names):
            return value, None
        if value.kind == GRAD:
            return value, layer if (value.of, layer) in self.param_names else None
        key = (value, layer)
        while key in self.alias:
            key = self.alias[key]
        return key

    def _calls(self, nodes: list[Node], layer: int | None) -> list[Call]:
        calls = []
        for node in nodes:
            inputs = tuple(None if v is None else self._key(v, layer) for v in node.inputs)
            if node.op == VIEW:
                self.alias[(node.outputs[0], layer)] = inputs[0]
                continue
            if node.op == SLICE:
                self.places.put((node.outputs[0], layer), inputs[0], node.attrs["start"])
                continue
            if node.op == JOIN:
                column = 0
                for value, key in zip(node.inputs, inputs):
                    self.places.put(key, (node.outputs[0], layer), column)
                    column += value.shape[1]
                continue
            outputs = tuple(None if v is None else self._key(v, layer) for v in node.outputs)
            calls.append(Call(node, inputs, outputs, layer))
        return calls

    def _sweep(self, calls: list[Call]) -> list[Call]:
        """Drops calls whose results nobody reads: what the first layer would hand to nothing that learns."""
        live = {k for v in self.graph.outputs.values() for k in self.places.around(self._key(v, None))}
        kept = []
        for call in reversed(calls):
            record = ops.get(call.node.op)
            writes = any(o.inout and k is not None for o, k in zip(record.outputs, call.outputs))
            if writes or any(k in live for k in call.outputs):
                kept.append(call)
                live.update(k for key in call.inputs if key is not None for k in self.places.around(key))
        return kept[::-1]

    # -- places ------------------------------------------------------------------------------------------------------

    def _shape(self, value: Value) -> tuple[int, ...]:
        return tuple(self.options.bindings[d] if isinstance(d, str) else d for d in value.shape)

    def add_storage(self, name: str, arena: str | None, size: int, flags: int) -> str:
        """Declares a storage at the end of its arena (None: bound from outside); returns its name."""
        offset = 0
        if arena is not None:
            offset = self.arena_sizes.get(arena, 0)
            self.arena_sizes[arena] = offset + aligned(size)
        self.program.storages.append(Storage(name, arena, offset, size, flags))
        return name

    def add_tensor(
        self, name: str, storage: str, dtype: str, shape: tuple[int, ...], byte_offset: int = 0, row: int | None = None
    ) -> str:
        """Declares a tensor, dense but for its rows, which are ``row`` elements apart when that is given; returns its name."""
        strides = dense_strides(shape)
        strides = strides if row is None else (row, *strides[1:])
        self.program.tensors.append(TensorEntry(name, storage, byte_offset, dtype, shape, strides))
        return name

    def _place_fixed(self, calls: list[Call]) -> None:
        self.trained.place(self)
        for call in calls:
            for key in (*call.inputs, *call.outputs):
                if key is not None and key not in self.names and key[0].kind != ACTIVATION:
                    self.names[key] = self._place_one(key)

    def _place_one(self, key: Key) -> str:
        value, layer = key
        shape = self._shape(value)
        if value.kind in (INPUT, CONSTANT):
            size, flags = byte_count(value.dtype, shape), PERSISTENT | HOST_WRITTEN
            storage = self.add_storage(value.name, self._arena(value.name), size, flags)
            return self.add_tensor(value.name, storage, value.dtype, shape)
        if value.kind == PARAM:
            name = self.param_names[key]
            if value.trainable:
                return self.trained.tensor_name(name)
            dtype = self._stored_dtype(name)
            if key in self.widened.names:
                return self.widened.place(key, dtype)
            storage = self.add_storage(f"weight.{name}", None, byte_count(dtype, shape), FIXED if self.options.fixed else 0)
            return self.add_tensor(name, storage, dtype, shape)
        if value.kind == GRAD:
            return self.trained.gradient_name(self.param_names[(value.of, layer)])
        name = value.name if layer is None else f"layers.{layer}.{value.name}"
        arena = self._arena(name) if layer is None else None
        storage = self.add_storage(name, arena, byte_count(value.dtype, shape), PERSISTENT)
        return self.add_tensor(name, storage, value.dtype, shape)

    def _mark_inputs(self) -> None:
        program = self.program
        made = {program.tensor(o).storage for i in program.instructions for o in i.outputs if o is not None}
        for place, storage in enumerate(program.storages):
            if storage.flags & HOST_WRITTEN and storage.name not in made:
                program.storages[place] = replace(storage, flags=storage.flags | FIXED)

    def _arena(self, name: str) -> str | None:
        return None if name in self.options.outside else "inputs"

    def _stored_dtype(self, name: str) -> str:
        parts = self.parts.get(name, (name,))
        dtypes = {self.options.param_dtypes[part] for part in parts}
        if len(dtypes) > 1:
            raise ValueError(f"{name} is {', '.join(parts)} read as one, but they are stored as {', '.join(sorted(dtypes))}")
        return dtypes.pop()

    def _is_quantised(self, key: Key) -> bool:
        frozen = key[0].kind == PARAM and not key[0].trainable
        return frozen and FORMATS[self._stored_dtype(self.param_names[key])].is_block

    def _place_activations(self, calls: list[Call]) -> None:
        places = self.places
        lives = places.lives(calls, self._shape)
        outside = {places.at(self._key(value, None))[0]: name for name, value in self.graph.outputs.items()
                   if name in self.options.outside}
        for key, name in outside.items():
            size = max(lives[key].bytes, self.options.outside[name])
            lives[key].name = self.add_storage(name, None, size, PERSISTENT)
        inside = {key: life for key, life in lives.items() if key not in outside}
        self.activation_floor = lower_bound(list(inside.values()))
        self.arena_sizes["activations"] = plan(list(inside.values()))
        self.waits = waits(calls, inside)
        for life in inside.values():
            self.program.storages.append(Storage(life.name, "activations", life.offset, life.bytes))
        made = dict.fromkeys(k for c in calls for k in c.outputs if k is not None and k[0].kind == ACTIVATION)
        read = dict.fromkeys(k for c in calls for k in c.inputs if k is not None and k[0].kind == ACTIVATION)
        for key in dict.fromkeys((*lives, *made, *read)):
            value, layer = key
            root, column = places.at(key)
            shape, prefix = self._shape(value), "" if layer is None else f"{layer}."
            self.names[key] = self.add_tensor(
                f"{prefix}{value.name}.{value.id}", lives[root].name, value.dtype, shape, byte_count(value.dtype, (column,)),
                places.width(root) if places.lies_apart(key) else None,
            )

    # -- instructions ------------------------------------------------------------------------------------------------

    def _entries(self, calls: list[Call]) -> None:
        program = self.program
        if "loss" in self.graph.outputs:
            targets = ["loss", *(["gradients"] if self.graph.grads else [])]
            self.add_entry("begin", [Instruction("fill", (), (name,), (("value", 0.0),)) for name in targets])
        first = len(program.instructions)
        waiting = {i: (first + waited,) for i, waited in self.waits.items()}
        self.add_entry("micro_step" if self.graph.grads else "forward",
                    [self._instruction(call, waiting.get(i, ())) for i, call in enumerate(calls)])
        if self.options.optimizer is not None and self.graph.grads:
            copies = [*self.trained.copy(), *self.widened.refresh(self.options.compute)]
            self.add_entry("update", [*self.trained.update(self, self.options.optimizer), *copies])
            if copies:  # also by themselves, for masters that were written from outside
                program.entries.append(Entry("refresh", len(program.instructions) - len(copies), len(copies)))
        for name, value in self.graph.outputs.items():
            key = self._key(value, None)
            entry = program.tensor(self.names[key])
            if entry.name != name:
                program.tensors.append(TensorEntry(name, entry.storage, entry.byte_offset, entry.dtype, entry.shape,
                                                   entry.strides))

    def add_entry(self, name: str, instructions: list[Instruction]) -> None:
        """Declares an entry at the end of the program."""
        self.program.entries.append(Entry(name, len(self.program.instructions), len(instructions)))
        self.program.instructions += instructions

    def _instruction(self, call: Call, waiting: tuple[int, ...]) -> Instruction:
        inputs = self._shaped(call.node.inputs, call.inputs)
        outputs = self._shaped(call.node.outputs, call.outputs)
        attrs = tuple(
            (name, int(v) + v.stride * (call.layer or 0) if isinstance(v, PerLayer) else v)
            for name, v in sorted(call.node.attrs.items())
        )
        return Instruction(call.node.op, inputs, outputs, attrs, "", call.stream, waiting)

    def _shaped(self, values: tuple[Value | None, ...], keys: tuple[Key | None, ...]) -> tuple[str | None, ...]:
        """Names of the operands; where a view gave a value another shape than its storage's tensor, a tensor of that shape."""
        names = []
        for value, key in zip(values, keys):
            if value is None or key is None:
                names.append(None)
                continue
            name = self.names[key]
            if value is not key[0]:
                name = self._viewed(name, self._shape(value))
            names.append(name)
        return tuple(names)

    def _viewed(self, name: str, shape: tuple[int, ...]) -> str:
        entry = self.program.tensor(name)
        if entry.shape == shape:
            return name
        viewed = f"{name}:{'x'.join(map(str, shape))}"
        if viewed not in self.viewed:
            row = None if entry.strides == dense_strides(entry.shape) else entry.strides[0]
            self.viewed.add(self.add_tensor(viewed, entry.storage, entry.dtype, shape, entry.byte_offset, row))
        return viewed
