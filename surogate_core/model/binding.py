"""Where a program's weights come from: mapped files read in place, converted copies, or random initial values.

What is read in place and what is copied:
    quantised, f16 and bf16 matrices   in place, whatever the recipe computes in (kernels read them as they are)
    f32 matrices                       in place for an fp32 recipe; one copy in the compute dtype otherwise
    f64 matrices                       one copy in the compute dtype
    vectors (norms, biases)            a copy in fp32: they are tiny and are applied in fp32

On a device all of these are copies in its memory; the file is read once. Parameters that a program reads as one are one
copy, their rows one after another, with room for adapters beside and below them where the program wants that; so are they on
the CPU, if a program is planned so there. Quantised ones can be decoded on the way, on the device itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dsl.module import Parameter
from ..engine import Memory, Queue, Session, Tuning, with_choices
from ..errors import WeightError
from ..ir.graph import BUFFER, Graph
from ..program import Entry, Instruction, Program, Storage, TensorEntry
from ..program.program import PERSISTENT, dense_strides
from ..weights.formats import FORMATS, byte_count
from ..weights.tensor import StoredTensor, from_f32
from .loaded import LoadedModel

WRITTEN_AT_ONCE = 8 << 20
"""Bytes of rows that are laid apart on the way to a device."""
IN_PLACE = frozenset({"bf16", "f16", *(name for name, form in FORMATS.items() if form.is_block)})


class FrozenWeights:
    """The parameters of one checkpoint for one compute dtype and one device, made once and shared by all sessions there."""

    def __init__(
        self, model: LoadedModel, compute: str, backend: str = "cpu", device: int = 0, decoded: bool = False
    ) -> None:
        """decoded: quantised matrices become copies in the compute dtype, for a device that has the room: its products then
        read more, and decode nothing."""
        self.model, self.compute, self.backend, self.device, self.decoded = model, compute, backend, device, decoded
        self._dtypes: dict[str, str] = {}
        self.choices: Program | None = None
        """A program with what kernels chose in an earlier run, which is taken before what other runs have measured."""
        self._held: dict[str, Any] = {}
        """By parameter: an array of the host, or `Memory` of the device."""
        self._adopted: set[str] = set()
        self._constants: dict[tuple[str, int], Memory] = {}

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Parameter ``name`` as the checkpoint has it. WeightError when it is missing or not of ``shape``. Of a model from random
        weights, a buffer that is not trained: as a new model has it."""
        if self.model.store is None and self.model.names is None:
            return from_f32(name, initial_values(name, shape, self._buffer(name), 0))
        return self.model.names.load(self.model.store, name, shape)

    def _buffer(self, name: str) -> Parameter:
        parameter = dict(self.model.dsl().parameters()).get(name)
        if parameter is None or parameter.role != BUFFER:
            raise WeightError(f"{name} is read, not trained, and a model from random weights has no checkpoint of it")
        return parameter

    def dtype(self, name: str, shape: tuple[int, ...]) -> str:
        """What a program reads parameter ``name`` as."""
        if name not in self._dtypes:
            stored = "f32" if len(shape) < 2 else self.stored(name, shape).dtype
            kept = stored in (*IN_PLACE, self.compute) and not (self.decoded and FORMATS[stored].is_block)
            self._dtypes[name] = stored if len(shape) < 2 or kept else self.compute
        return self._dtypes[name]

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Parameter ``name`` in that dtype: contiguous, in numpy's form. A view of the file where nothing is converted."""
        stored, dtype = self.stored(name, shape), self.dtype(name, shape)
        if stored.dtype != dtype:
            stored = from_f32(name, stored.to_f32(), dtype)
        return np.ascontiguousarray(stored.data)

    def adopt(self, name: str, dtype: str, memory: np.ndarray | Memory) -> None:
        """Uses ``memory`` (which somebody else may change, such as a training session) for parameter ``name``."""
        self._dtypes[name], self._held[name] = dtype, memory
        self._adopted.add(name)

    def dtypes(self, graph: Graph) -> dict[str, str]:
        """What a program reads every frozen parameter of ``graph`` as, by full name."""
        return {name: self.dtype(name, tuple(v.shape)) for name, v, _ in graph.instances() if not v.trainable}

    def _memory(self, name: str, shape: tuple[int, ...]) -> Any:
        held = self._held.get(name)
        if held is None and self.backend == "cpu":
            held = self.array(name, shape)
        if self.backend != "cpu" and not isinstance(held, Memory):
            memory = Memory(self.backend, byte_count(self.dtype(name, shape), shape), self.device)
            self._put(name, shape, memory, 0)
            held = memory
        self._held[name] = held
        return held

    def _put(self, name: str, shape: tuple[int, ...], memory: Memory, offset: int) -> None:
        """Writes parameter ``name`` to ``offset`` bytes past the beginning of ``memory``."""
        if self.decoded and name not in self._held:
            stored = self.stored(name, shape)
            if stored.dtype != self.dtype(name, shape) and FORMATS[stored.dtype].is_block:
                self._decode(stored, memory, offset)
                return
        memory.write(self._rows(name, shape), offset)

    def _decode(self, stored: StoredTensor, memory: Memory, offset: int) -> None:
        """The same for a quantised parameter, decoded by the device."""
        blocks = np.ascontiguousarray(stored.data)
        source = Memory(self.backend, blocks.nbytes, self.device)
        source.write(blocks)
        session = Session(_decoding(stored, self.compute, memory.bytes, offset).to_bytes(), self.backend, 1, self.device, False)
        session.bind("blocks", source)
        session.bind("decoded", memory)
        session.run("decode")
        session.synchronize()

    def _session(
        self, program: Program, threads: int | None, graphs: bool, queue: Queue | None, batch_invariant: bool
    ) -> Session:
        if self.backend == "cpu":
            return Session(program.to_bytes(), self.backend, threads, queue=queue, batch_invariant=batch_invariant)
        tuning = Tuning.of_device(self.backend, self.device)
        if self.choices is not None:
            tuning.learn(self.choices)
        session = Session(tuning.apply(program).to_bytes(), self.backend, threads, self.device, graphs, queue,
                          batch_invariant)
        if tuning.learn(with_choices(program, session)):
            tuning.save()
        return session

    def _rows(self, part: str, shape: tuple[int, ...]) -> np.ndarray:
        held = self._held.get(part)
        if part in self._adopted and not isinstance(held, np.ndarray):
            raise ValueError(f"the memory of {part} belongs to a session: adopt what it is joined to as well")
        return np.ascontiguousarray(held) if isinstance(held, np.ndarray) else self.array(part, shape)

    def _joined(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> Memory:
        """The memory of parameter ``name``, whose rows are those of ``parts`` (full name -> shape) one after another."""
        if name not in self._held:
            sizes = [byte_count(self.dtype(part, shape), shape) for part, shape in parts.items()]
            memory = Memory(self.backend, sum(sizes), self.device)
            offset = 0
            for (part, shape), size in zip(parts.items(), sizes):
                self._put(part, shape, memory, offset)
                offset += size
            self._held[name] = memory
        return self._held[name]

    def _widened(self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[int, ...]]) -> Memory:
        """The memory of a matrix of ``shape`` whose upper left corner is the rows of ``parts``, one after another. What is
        beside and below them starts as zeros, and is written by the programs that train."""
        if name not in self._held:
            dtype = self.dtype(*next(iter(parts.items())))
            row = byte_count(dtype, (shape[1],))
            memory = Memory(self.backend, shape[0] * row, self.device)
            start = 0
            for part, part_shape in parts.items():
                rows = self._rows(part, part_shape).view(np.uint8).reshape(part_shape[0], -1)
                _write_apart(memory, rows, start, row)
                start += len(rows)
            self._held[name] = memory
        return self._held[name]

    def _constant(self, name: str, array: np.ndarray) -> Memory:
        """The memory of a constant that programs share; those of another length are another memory."""
        memory = self._constants.get((name, array.nbytes))
        if memory is None:
            memory = self._constants[name, array.nbytes] = Memory(self.backend, array.nbytes, self.device)
            memory.write(array)
        return memory

    def open_session(
        self, graph: Graph, program: Program, threads: int | None = None, graphs: bool = True, queue: Queue | None = None,
        batch_invariant: bool = False,
    ) -> Session:
        """A session of ``program``, emitted from ``graph``, with its frozen parameters bound and its constants written, or
        bound where the program has them outside. queue, batch_invariant: as `Session` takes them."""
        session = self._session(program, threads, graphs, queue, batch_invariant)
        external = {storage.name for storage in program.external()}
        shapes = {name: tuple(value.shape) for name, value, _ in graph.instances()}
        for name, shape in shapes.items():
            if f"weight.{name}" in external:
                session.bind(f"weight.{name}", self._memory(name, shape))
        for name, _, _, parts in graph.joined_instances():
            if f"weight.{name}" in external:
                session.bind(f"weight.{name}", self._joined(name, {part: shapes[part] for part in parts}))
        for name, widened, layer in graph.widened_instances():
            if f"weight.{name}" in external:
                parts = [f"layers.{layer}.{part.name}" for part in widened.base.parts or (widened.base,)]
                session.bind(f"weight.{name}", self._widened(name, widened.shape, {part: shapes[part] for part in parts}))
        read = {tensor.name for tensor in program.tensors}
        for name, (_, array) in graph.constants.items():
            if name in external:
                session.bind(name, self._constant(name, array))
            elif name in read:  # the seed of the gradient is one that fused programs no longer read
                session.write(name, array)
        return session


def _decoding(stored: StoredTensor, dtype: str, size: int, offset: int) -> Program:
    """Decodes storage "blocks" into the matrix of ``dtype`` at ``offset`` of storage "decoded", of ``size`` bytes."""
    strides = dense_strides(stored.shape)
    return Program(
        storages=[Storage("blocks", None, 0, stored.data.nbytes), Storage("decoded", None, 0, size, PERSISTENT)],
        tensors=[TensorEntry("weight", "blocks", 0, stored.dtype, stored.shape, strides),
                 TensorEntry("values", "decoded", offset, dtype, stored.shape, strides)],
        instructions=[Instruction("dequantize", ("weight",), ("values",), (("out_dtype", dtype),))],
        entries=[Entry("decode", 0, 1)],
    )


def _write_apart(memory: Memory, rows: np.ndarray, start: int, row: int) -> None:
    """Writes bytes [N, n] as rows ``start`` and on of a matrix whose rows take ``row`` bytes, the rest of each zero."""
    count = max(WRITTEN_AT_ONCE // row, 1)
    buffer = np.zeros((min(count, len(rows)), row), np.uint8)
    for first in range(0, len(rows), count):
        piece = rows[first:first + count]
        buffer[:len(piece), :rows.shape[1]] = piece
        memory.write(buffer[:len(piece)], (start + first) * row)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """A counter-based generator that depends on the seed and the name alone, not on what was drawn before."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def initial_values(name: str, shape: tuple[int, ...], parameter: Parameter | None, seed: int) -> np.ndarray:
    """float32 starting values of a parameter that no checkpoint gives.

    LoRA A is uniform in +-1/sqrt(in), B zero, as PEFT does it; other parameters are normal with their ``init_std``, ones
    where that is None.
    """
    if name.endswith(".lora_b"):
        return np.zeros(shape, np.float32)
    generator = generator_for(seed, name)
    if name.endswith(".lora_a"):
        bound = shape[1] ** -0.5
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    if parameter is None:
        raise KeyError(f"parameter {name!r} is not declared by the model")
    if parameter.init_std is None:
        return np.ones(shape, np.float32)
    if parameter.init_std == 0.0:
        return np.zeros(shape, np.float32)
    return (generator.standard_normal(shape, np.float32) * np.float32(parameter.init_std)).astype(np.float32)
