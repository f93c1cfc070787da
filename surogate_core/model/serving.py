"""The programs that serve a model: one a bucket of tokens, on weights, caches and tables that all of them share.

Entries of each: "forward" (tokens to the logits of the asked rows), "sample" and "sample_full" (logits to ids, the latter
with penalties, biases and masks), "logprobs" (of the logits as they are).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..dsl import trace
from ..ir.graph import Graph
from ..ops.sample import DRAW, SAMPLING
from ..ops.token_logprobs import MOST
from ..passes import (
    BankSpec, Recipe, adapter_bank, dead_code, feed_tokens, fuse, fuse_norms, fuse_projections, fuse_rope, paged_kv, precision,
)
from ..program import EmitOptions, Emitter, Instruction, Program, emit_each
from ..program.program import HOST_WRITTEN, PERSISTENT
from ..weights.formats import byte_count
from .binding import FrozenWeights
from .loaded import LoadedModel

SHARED = ("last_ids", "block_tables", "counts", "bias", "logits")
"""What all programs of a model are bound to, beside weights, caches, banks and constants."""


@dataclass(frozen=True)
class ServingShape:
    """tokens, rows: of a step at most, rows being those whose logits are wanted. places: sequences that have a place in the
    tables. blocks: of the cache. table_blocks: of one sequence at most. most_rows: the most rows of all programs that share one
    memory of logits; 0: this one's. lone: a step has one token of each sequence."""

    tokens: int
    rows: int
    places: int
    blocks: int
    table_blocks: int
    most_rows: int = 0
    lone: bool = False


def serving_graph(
    model: LoadedModel, recipe: Recipe, weights: FrozenWeights, *, max_positions: int, adapters: BankSpec | None = None,
    few: bool = False,
) -> Graph:
    """What programs of a model that serve it are emitted from. max_positions: of the longest sequence. few: for programs of a
    few tokens on a device. Products of the same input are one where ``weights`` are copies anyway, as they are on a device;
    norms of heads go into their rotation there, while the CPU does as the trainer does, to the bit."""
    graph = feed_tokens(paged_kv(trace(model.dsl(), "row_logits", max_positions)))
    if weights.backend != "cpu":
        fuse_projections(graph, weights.dtypes(graph))
    if adapters is not None:
        adapter_bank(graph, adapters)
    fuse_rope(graph, norms=weights.backend != "cpu")
    precision(fuse(graph), recipe)
    if few:
        fuse_norms(graph, weights.dtypes(graph))
    return dead_code(graph)


def serving_program(
    graph: Graph, recipe: Recipe, dtypes: Mapping[str, str], shape: ServingShape, block_size: int, prefetch: int | None = None
) -> Program:
    """The program of one bucket. ``dtypes``: `FrozenWeights.dtypes` of the graph. prefetch: as `EmitOptions` has it.

    External beside weights and states of the layers: `SHARED` and the graph's constants.
    """
    return next(serving_programs(graph, recipe, dtypes, [shape], block_size, prefetch))


def serving_programs(
    graph: Graph, recipe: Recipe, dtypes: Mapping[str, str], shapes: Iterable[ServingShape], block_size: int,
    prefetch: int | None = None,
) -> Iterator[Program]:
    """Those of several buckets, one after another, for less than each by itself would take."""
    return emit_each(graph, (_options(graph, recipe, dtypes, shape, block_size, prefetch) for shape in shapes))


def _options(
    graph: Graph, recipe: Recipe, dtypes: Mapping[str, str], shape: ServingShape, block_size: int, prefetch: int | None
) -> EmitOptions:
    bindings = {"T": shape.tokens, "R": shape.rows, "S": shape.blocks * block_size, "B": shape.places,
                "M": shape.table_blocks}
    logits = graph.outputs["logits"]
    outside = {**dict.fromkeys((*SHARED, *graph.constants), 0),
               "logits": byte_count(logits.dtype, (shape.most_rows, *logits.shape[1:]))}
    return EmitOptions(
        bindings, recipe.compute, dtypes, prefetch=prefetch, outside=outside, fixed=True,
        more=lambda emitter: _finish(emitter, shape),
    )


def _finish(emitter: Emitter, shape: ServingShape) -> None:
    if shape.lone:
        _tell_attention(emitter)
    _sampling(emitter, shape)


def _tell_attention(emitter: Emitter) -> None:
    """That every token is of another sequence."""
    instructions = emitter.program.instructions
    for place, each in enumerate(instructions):
        if each.op == "paged_attention":
            instructions[place] = replace(each, attrs=tuple(sorted({**dict(each.attrs), "lone": 1}.items())))


def _sampling(emitter: Emitter, shape: ServingShape) -> None:
    """Entries that take the logits from there."""
    rows, (_, vocab) = shape.rows, emitter.program.tensor("logits").shape

    def tensor(name: str, arena: str | None, dtype: str, dims: tuple[int, ...], flags: int = PERSISTENT) -> str:
        return emitter.add_tensor(name, emitter.add_storage(name, arena, byte_count(dtype, dims), flags), dtype, dims)

    sampling = tensor("sampling", "inputs", "f32", (rows, SAMPLING), PERSISTENT | HOST_WRITTEN)
    draw = tensor("draw", "inputs", "i32", (rows, DRAW), PERSISTENT | HOST_WRITTEN)
    places = tensor("row_places", "inputs", "i32", (rows,), PERSISTENT | HOST_WRITTEN)
    mask = tensor("mask", "inputs", "i32", (rows, -(-vocab // 32)), PERSISTENT | HOST_WRITTEN)
    counts = tensor("counts", None, "i32", (shape.places, vocab), PERSISTENT | HOST_WRITTEN)
    bias = tensor("bias", None, "f32", (shape.places, vocab), PERSISTENT | HOST_WRITTEN)
    sampled = tensor("sampled", "sampled", "i32", (rows,))
    probable = (tensor("logprob", "sampled", "f32", (rows,)), tensor("top_ids", "sampled", "i32", (rows, MOST)),
                tensor("top_logprobs", "sampled", "f32", (rows, MOST)))
    plain = ("logits", sampling, draw, places)
    emitter.add_entry("sample", [Instruction("sample", (*plain, None, None), (sampled, "last_ids", None))])
    emitter.add_entry("sample_full", [Instruction("sample", (*plain, mask, bias), (sampled, "last_ids", counts))])
    emitter.add_entry("logprobs", [Instruction("token_logprobs", ("logits", sampled, draw), probable)])


__all__ = ["SHARED", "ServingShape", "serving_graph", "serving_program", "serving_programs"]
