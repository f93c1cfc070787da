"""The native side of one model: its weights, its state, and a session for every bucket, all on one queue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from surogate_core import engine
from surogate_core.errors import ConfigError
from surogate_core.ir.graph import Graph
from surogate_core.model import FrozenWeights, LoadedModel
from surogate_core.model.programs import decoding_stream
from surogate_core.model.serving import ServingShape, serving_graph, serving_programs
from surogate_core.passes import BankSpec
from surogate_core.passes.paged_kv import BLOCK_SIZE
from surogate_core.program import Program
from surogate_core.weights.formats import FORMATS, byte_count

from . import sizes
from .options import EngineOptions
from .sizes import Bucket


FEW_TOKENS = 8
"""Up to so many tokens a device's products read blocks of quantised weights as they are, and norms go into products; above,
they read decoded weights. The number is that of the kernels for few tokens (kFewTokens of
native/backends/cuda/linear_few.cuh)."""

RING_ARCHITECTURE = 90
"""Devices that have the kernels of native/backends/cuda/linear_ring.cuh, which read bf16 faster than blocks are decoded: what
is decoded there is read so by steps of few tokens too, but for files of RING_FORMATS."""
RING_FORMATS = frozenset({"q4_k", "q5_k", "q6_k"})
"""Blocks that those devices read faster than bf16 (native/backends/cuda/linear_blocks_ring.cu)."""


@dataclass(frozen=True)
class _Kind:
    """Programs of one graph, of more than ``above`` tokens and at most ``upto``, if that is given."""

    graph: Graph
    weights: FrozenWeights
    adapters: bool
    above: int = 0
    upto: int | None = None
    prefetch: int | None = None

    def takes(self, bucket: Bucket) -> bool:
        return bucket.tokens > self.above and (self.upto is None or bucket.tokens <= self.upto)

    def programs(self, recipe: Any, shapes: Iterable[ServingShape]) -> Iterator[Program]:
        dtypes = self.weights.dtypes(self.graph)
        return serving_programs(self.graph, recipe, dtypes, shapes, BLOCK_SIZE, self.prefetch)

    def is_quantised(self) -> bool:
        return any(FORMATS[dtype].is_block for dtype in self.weights.dtypes(self.graph).values())

    def weight_bytes(self) -> int:
        dtypes = self.weights.dtypes(self.graph)
        return sum(byte_count(dtypes[name], tuple(value.shape)) for name, value, _ in self.graph.instances())


@dataclass(frozen=True)
class Opened:
    """A session, and what it is for."""

    session: engine.Session
    bucket: Bucket
    adapters: bool


class Runtime:
    """``context``: tokens of a sequence; ``places``; ``blocks``; ``token_budget``; ``vocab``; ``weights``; ``queue``.

    Nothing is run here. Raises ConfigError where memory does not suffice.
    """

    def __init__(self, model: LoadedModel, recipe: Any, options: EngineOptions, bank: BankSpec | None) -> None:
        self.model, self.recipe, self.bank = model, recipe, bank
        self.queue = engine.Queue(options.backend, options.device, options.threads)
        self._asked_for_sequences = options.max_sequences is not None
        self.context = sizes.context(options, model.hyperparameters.max_positions)
        decoded = sizes.decodes_weights(options, sum(math.prod(each.shape) for _, each in model.dsl().parameters()))
        self.weights = FrozenWeights(model, recipe.compute, options.backend, options.device, decoded)
        self._kinds = [kind for each in dict.fromkeys((None, bank)) for kind in self._kinds_of(each)]
        self.vocab = self._kinds[0].graph.outputs["logits"].shape[1]
        self.memories: dict[str, engine.Memory] = {}
        """What the sessions share, by storage: caches, tables, counts, banks."""
        self.options, self.blocks = self._fitted(options)
        self.places = sizes.places(self.options)
        self.context = min(self.context, self.blocks * BLOCK_SIZE)
        self.token_budget = sizes.token_budget(self.options, self.context)

    def open(self) -> Iterator[Opened]:
        """Opens the sessions, those without adapters first, the largest of each kind first."""
        for kind in self._kinds:
            buckets = sizes.buckets(self.options, self.context, plain=not kind.adapters)
            buckets = [bucket for bucket in buckets if kind.takes(bucket)]
            shapes = [self._shape(self.options, bucket, self.blocks) for bucket in buckets]
            for bucket, program in zip(buckets, kind.programs(self.recipe, shapes), strict=True):
                yield Opened(self._open(kind, program), bucket, kind.adapters)

    def memory(self, name: str, size: int) -> engine.Memory:
        """The state called ``name``, made at first use."""
        if name not in self.memories:
            self.memories[name] = engine.Memory(self.options.backend, size, self.options.device)
        return self.memories[name]

    def _kinds_of(self, bank: BankSpec | None) -> list[_Kind]:
        """On a device steps of few tokens have programs of their own. Quantised weights are there decoded too, or are decoded
        ahead of the products; but steps of few tokens read the blocks, which are fewer bytes, unless there are rings."""
        adapters, weights, stored = bank is not None, self.weights, self._stored
        kind = _Kind(self._graph(weights, bank), weights, adapters)
        if self.queue.backend == "cpu":
            return [kind]
        ahead = stored is weights and kind.is_quantised()
        kind = replace(kind, above=FEW_TOKENS, prefetch=decoding_stream(self.queue.backend) if ahead else None)
        return [kind, _Kind(self._graph(stored, bank, few=True), stored, adapters, upto=FEW_TOKENS)]

    @cached_property
    def _stored(self) -> FrozenWeights:
        """The weights as steps of few tokens read them: as they are stored, as far as programs can, or as all do."""
        if not self.weights.decoded:
            return self.weights
        stored = FrozenWeights(self.model, self.recipe.compute, self.queue.backend, self.queue.device)
        dtypes = {stored.dtype(name, tuple(each.shape)) for name, each in self.model.dsl().parameters()}
        blocks = {dtype for dtype in dtypes if FORMATS[dtype].is_block}
        return stored if blocks <= RING_FORMATS or not self._has_rings() else self.weights

    def _has_rings(self) -> bool:
        built = any(row["op"] == "linear" and row["name"] == "ring" for row in engine.kernels())
        info = engine.device_info(self.queue.backend, self.queue.device)
        return built and info["architecture"] == RING_ARCHITECTURE

    def _graph(self, weights: FrozenWeights, bank: BankSpec | None, few: bool = False) -> Graph:
        return serving_graph(self.model, self.recipe, weights, max_positions=self.context, adapters=bank, few=few)

    def _shape(self, options: EngineOptions, bucket: Bucket, blocks: int) -> ServingShape:
        places = sizes.places(options)
        blocks_each = sizes.sequence_blocks(self.context)
        return ServingShape(bucket.tokens, bucket.rows, places, blocks, blocks_each, places, bucket.decode)

    def _open(self, kind: _Kind, program: Program) -> engine.Session:
        session = kind.weights.open_session(
            kind.graph, program, queue=self.queue, batch_invariant=self.options.batch_invariant
        )
        for storage in program.external():
            if not storage.name.startswith("weight.") and storage.name not in kind.graph.constants:
                session.bind(storage.name, self.memory(storage.name, storage.bytes))
        return session

    def _fitted(self, options: EngineOptions) -> tuple[EngineOptions, int]:
        """Options with fewer sequences where memory has no room for the usual number, and the blocks of the cache."""
        while True:
            try:
                return options, self._blocks(options)
            except ConfigError:
                fewer = sizes.places(options) // 2
                if self._asked_for_sequences or fewer < 2:
                    raise
                options = replace(options, max_sequences=fewer)

    def _blocks(self, options: EngineOptions) -> int:
        """What fits beside everything else, by the plan of the largest program on a cache of one block."""
        kind = next(kind for kind in reversed(self._kinds) if kind.upto is None)
        shape = self._shape(options, sizes.buckets(options, self.context)[0], 1)
        program = next(kind.programs(self.recipe, [shape]))
        planned = engine.plan(program.to_bytes(), options.backend, self.queue.threads, options.device)
        needed = sum(planned["arenas"].values()) + planned["workspace"]
        needed += next((other.weight_bytes() for other in self._kinds if other.weights is not kind.weights), 0)
        mapped = options.backend == "cpu"  # weights that are read where their file is mapped can be dropped
        needed += sum(size for name, size in planned["external"].items() if not (mapped and name.startswith("weight.")))
        return sizes.blocks(options, self.block_bytes(), needed, sizes.sequence_blocks(self.context))

    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        graph, total = self._kinds[0].graph, 0
        for name in graph.layers:
            for value in graph.regions[name].states.values():
                if value.role in ("key_cache", "value_cache"):
                    total += byte_count(value.dtype, (BLOCK_SIZE, *value.shape[1:]))
        return total


def bank_of(options: EngineOptions, ranks: list[int]) -> BankSpec | None:
    """``ranks``: of the adapters that are there from the start."""
    if options.adapter_slots == 0:
        return None
    return BankSpec(options.adapter_slots, max([options.adapter_rank, *ranks]))


__all__ = ["Opened", "Runtime", "bank_of"]
