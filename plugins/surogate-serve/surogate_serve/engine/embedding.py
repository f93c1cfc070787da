"""Vectors of texts: the model's final hidden states over packed documents, pooled, and through its dense layers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from surogate_core import engine
from surogate_core.dsl import trace
from surogate_core.errors import EngineError
from surogate_core.model import FrozenWeights, LoadedModel
from surogate_core.passes import dead_code, fuse, fuse_projections, precision
from surogate_core.program import EmitOptions, emit
from surogate_core.weights.embedding import Embedding, Pooling

from ..types import Refused
from . import sizes
from .options import EngineOptions

SMALLEST, DOCUMENTS = 64, 64
"""Tokens of the smallest bucket, and documents of a run at most."""


class Runs(Protocol):
    """What `Embedder` needs of a model: `Runtime` has it, and `VectorRuntime`."""

    model: LoadedModel
    recipe: Any
    options: EngineOptions
    weights: FrozenWeights
    queue: engine.Queue
    context: int
    token_budget: int


class VectorRuntime:
    """The native side of a model that writes no text: its weights, and a queue. Nothing is planned here."""

    def __init__(self, model: LoadedModel, recipe: Any, options: EngineOptions) -> None:
        """Raises ConfigError for a context that the model does not have."""
        self.model, self.recipe, self.options = model, recipe, options
        self.queue = engine.Queue(options.backend, options.device, options.threads)
        self.context = sizes.context(options, longest_text(model))
        decoded = sizes.decodes_weights(options, sum(math.prod(each.shape) for _, each in model.dsl().parameters()))
        self.weights = FrozenWeights(model, recipe.compute, options.backend, options.device, decoded)
        self.token_budget = sizes.token_budget(options, self.context)


def longest_text(model: LoadedModel) -> int:
    """Tokens of a text that the model makes a vector of."""
    said, most = (model.embedding or Embedding()).max_tokens, model.hyperparameters.max_positions
    return most if said is None else min(said, most)


@dataclass
class _Bucket:
    session: engine.Session
    hidden: engine.Memory


class Embedder:
    """``embedding``: how the model's files, or nobody, say that texts become vectors; ``width``: values of a whole one;
    ``longest``: tokens of a text. Opens its programs at first use: 64, 128, ... tokens, up to the first that holds the
    longest."""

    def __init__(self, runtime: Runs) -> None:
        self._runtime = runtime
        self.embedding = runtime.model.embedding or Embedding()
        self.width = self.embedding.width(runtime.model.hyperparameters.hidden_size)
        self.longest = min(runtime.context, longest_text(runtime.model))
        self._graph = None
        self._buckets: dict[int, _Bucket] = {}
        self._lock = threading.Lock()

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling | None = None) -> np.ndarray:
        """float32 [len(prompts), width], neither cut nor normalised. A prompt has 1 to ``longest`` tokens. pooling: None
        for the model's own. Raises `Refused`."""
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.longest:
                raise Refused(
                    f"input {index} has {len(prompt)} tokens; this model takes 1 to {self.longest}", 400,
                    "context_length_exceeded", "input", n_prompt_tokens=len(prompt), n_ctx=self.longest,
                )
        full = self._runtime.token_budget  # so that answers, which wait meanwhile, wait no longer than for a prompt
        with self._lock:
            parts = [self._run([prompts[i] for i in group], pooling) for group in _groups(prompts, full)]
        return self.embedding.finished(np.concatenate(parts)) if parts else np.zeros((0, self.width), np.float32)

    def _run(self, prompts: Sequence[Sequence[int]], pooling: Pooling | None) -> np.ndarray:
        lengths = [len(prompt) for prompt in prompts]
        total = sum(lengths)
        size = max(SMALLEST, 1 << (total - 1).bit_length())
        session = self._bucket(size).session
        ends = np.cumsum(lengths)
        starts = np.full(DOCUMENTS + 2, size, np.int32)  # past the last document lies one of padding
        starts[: len(prompts) + 1] = [0, *ends]
        positions = np.concatenate([np.arange(length) for length in [*lengths, size - total]])
        session.write("tokens", np.concatenate([*prompts, np.zeros(size - total)]).astype(np.int32))
        session.write("positions", np.minimum(positions, self._runtime.context - 1).astype(np.int32))
        session.write("doc_starts", starts)
        session.run("forward")
        hidden = _floats(session.read("hidden"))[:total]
        if not np.isfinite(hidden).all():
            raise Refused("the model gives values that are not finite for this input", 500, "not_finite")
        pooling = pooling or self.embedding.pooling
        if pooling != "mean":
            return hidden[ends - 1 if pooling == "last" else ends - lengths]
        sums = np.add.reduceat(hidden, [0, *ends[:-1]], axis=0, dtype=np.float64)
        return (sums / np.array(lengths)[:, None]).astype(np.float32)

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._buckets:
            try:
                self._buckets[size] = self._open(size)
            except EngineError as error:
                raise Refused(f"an input of this length does not fit in memory: {error.message}", 400, "out_of_memory",
                              "input") from error
        return self._buckets[size]

    def _open(self, size: int) -> _Bucket:
        runtime = self._runtime
        if self._graph is None:
            graph = trace(runtime.model.dsl(), "hidden", runtime.context)
            if runtime.weights.backend != "cpu":
                fuse_projections(graph, runtime.weights.dtypes(graph))
            self._graph = dead_code(precision(fuse(graph), runtime.recipe))
        program = emit(self._graph, EmitOptions(
            {"T": size, "D": DOCUMENTS + 2}, runtime.recipe.compute, runtime.weights.dtypes(self._graph),
            outside=dict.fromkeys((*self._graph.constants, "hidden"), 0),
        ))
        session = runtime.weights.open_session(
            self._graph, program, queue=runtime.queue, batch_invariant=runtime.options.batch_invariant
        )
        storage = next(each for each in program.external() if each.name == "hidden")
        hidden = engine.Memory(runtime.options.backend, storage.bytes, runtime.options.device)
        session.bind("hidden", hidden)
        return _Bucket(session, hidden)


def _groups(prompts: Sequence[Sequence[int]], full: int) -> Iterator[range]:
    """Neighbours that are run together: up to ``full`` tokens, unless one by itself is longer."""
    start = tokens = 0
    for index, prompt in enumerate(prompts):
        if index > start and (tokens + len(prompt) > full or index - start == DOCUMENTS):
            yield range(start, index)
            start, tokens = index, 0
        tokens += len(prompt)
    if start < len(prompts):
        yield range(start, len(prompts))


def _floats(array: np.ndarray) -> np.ndarray:
    """float32 of what a session gives for f32 or bf16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)
