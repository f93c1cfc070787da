"""Where a program's weights come from: mapped files read in place, converted copies, or random initial values.

What is read in place and what is copied:
    quantised, f16 and bf16 matrices   in place, whatever the recipe computes in (kernels read them as they are)
    f32 matrices                       in place for an fp32 recipe; one copy in the compute dtype otherwise
    f64 matrices                       one copy in the compute dtype
    vectors (norms, biases)            a copy in fp32: they are tiny and are applied in fp32
"""

from __future__ import annotations

import hashlib

import numpy as np

from ..dsl.module import Parameter
from ..engine import Session
from ..ir.graph import Graph
from ..program import Program
from ..weights.formats import FORMATS
from ..weights.tensor import StoredTensor, from_f32
from .loaded import LoadedModel

IN_PLACE = frozenset({"bf16", "f16", *(name for name, form in FORMATS.items() if form.is_block)})


class FrozenWeights:
    """The arrays of one checkpoint's parameters for one compute dtype, made once and shared by all sessions."""

    def __init__(self, model: LoadedModel, compute: str) -> None:
        self.model, self.compute = model, compute
        self._tensors: dict[str, StoredTensor] = {}

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Parameter ``name`` as the checkpoint has it. WeightError when it is missing or not of ``shape``."""
        return self.model.names.load(self.model.store, name, shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Parameter ``name`` as a program reads it."""
        if name not in self._tensors:
            stored = self.stored(name, shape)
            if len(shape) < 2:
                stored = StoredTensor(name, "f32", shape, np.ascontiguousarray(stored.to_f32()))
            elif stored.dtype not in (*IN_PLACE, self.compute):
                stored = from_f32(name, stored.to_f32(), self.compute)
            self._tensors[name] = stored
        return self._tensors[name]

    def adopt(self, name: str, dtype: str, shape: tuple[int, ...], array: np.ndarray) -> None:
        """Uses ``array`` (of memory that somebody else changes, such as a training session's) for parameter ``name``."""
        self._tensors[name] = StoredTensor(name, dtype, shape, array)

    def dtypes(self, graph: Graph) -> dict[str, str]:
        """Stored dtype of every frozen parameter of ``graph``, by full name."""
        return {name: self.tensor(name, tuple(v.shape)).dtype for name, v, _ in graph.instances() if not v.trainable}

    def open_session(self, graph: Graph, program: Program, backend: str = "cpu", threads: int | None = None) -> Session:
        """A session of ``program``, emitted from ``graph``, with its frozen parameters bound and its constants written."""
        session = Session(program.to_bytes(), backend, threads)
        for name, value, _ in graph.instances():
            if not value.trainable:
                tensor = self.tensor(name, tuple(value.shape))
                session.bind(f"weight.{name}", np.ascontiguousarray(tensor.data))
        read = {tensor.name for tensor in program.tensors}
        for name, (_, array) in graph.constants.items():
            if name in read:  # the seed of the gradient is one that fused programs no longer read
                session.tensor(name)[...] = array
        return session


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
