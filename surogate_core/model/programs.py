"""The programs of a model: one that trains, one that evaluates, one that decodes with a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .. import engine
from ..dsl import trace
from ..errors import TrainingError
from ..ir.graph import BUFFER, Graph
from ..passes import (
    LoraSpec, Recipe, autodiff, dead_code, fuse, fuse_low_rank, fuse_norm_rope, fuse_projections, join_low_rank,
    join_ropes, lora, paged_kv, precision, recompute, widen_products, widened_names,
)
from ..passes.recompute import saved_bytes
from ..program import EmitOptions, Program, emit
from ..program.trainable import TrainableLayout, TrainedTypes
from .binding import FrozenWeights
from .loaded import LoadedModel


@dataclass
class TrainPlan:
    """A training program, the graph it came from, and what was decided on the way.

    saved_bytes: activations kept from forward to backward, before and after recomputation. planned: `engine.plan` of it.
    """

    graph: Graph
    program: Program
    layout: TrainableLayout
    bindings: Mapping[str, int]
    saved_bytes: tuple[int, int]
    planned: Mapping[str, Any]

    @property
    def resident_bytes(self) -> int:
        """What the program holds while it runs: arenas, scratch memory and weights."""
        return sum(self.planned["arenas"].values()) + self.planned["workspace"] + sum(self.planned["external"].values())

    @property
    def joins_projections(self) -> bool:
        """Whether products that read the same input are one. Programs that share its weights must be planned alike."""
        return any(name.startswith("fuse_projections") for name in self.graph.history)

    @property
    def widened(self) -> frozenset[str]:
        """Names of the weights that have their adapters beside them. Programs that share them read them so as well."""
        return widened_names(self.graph)


class TooLarge(TrainingError):
    """No plan fits the budget. ``plan``: the least, with everything recomputed."""

    def __init__(self, plan: TrainPlan, memory_budget: int) -> None:
        super().__init__(
            f"the training program needs at least {plan.resident_bytes:,} bytes with everything recomputed, and may take "
            f"{memory_budget:,}",
            "Lower per_device_train_batch_size or sequence_len, or raise memory_budget.",
        )
        self.plan = plan


def training_program(
    model: LoadedModel, recipe: Recipe, weights: FrozenWeights, bindings: Mapping[str, int], *, max_positions: int,
    adapter: LoraSpec | None, optimizer: Any, memory_budget: int | None, strategy_passes=(), backend: str = "cpu",
    device: int = 0, threads: int | None = None, join_projections: bool = False, deterministic: bool = True,
    master: str = "f32", states: str = "f32", widen: bool = False,
) -> TrainPlan:
    """Plans forward, backward and update. ``adapter`` None trains every parameter.

    master, states: dtypes of trained matrices ("f32", or what the recipe computes in) and of what the optimizer keeps.

    memory_budget: bytes that the program may hold, weights included, when ``backend`` runs it with ``threads``; None for no
    limit; 0 for the least there is, with everything recomputed, whatever that takes. join_projections: products that read
    the same input become one, as do the gradients of low-rank branches side by side (for a backend that copies weights
    anyway, and takes rows that lie apart). widen: products of adapters become terms of those that they are added to, for the
    same backends; such a weight lies where its adapters are beside it. deterministic: False lets attention's backward add in
    any order. Raises TooLarge, before anything is allocated, when not even full recomputation fits the budget.
    """
    def build(saved_budget: int | None) -> TrainPlan:
        graph = trace(model.dsl(), "loss", max_positions)
        if adapter is not None:
            lora(graph, adapter)
        else:
            for region in graph.ordered_regions():
                for value in region.params.values():
                    value.trainable = value.role != BUFFER
        if join_projections:
            fuse_projections(graph, weights.dtypes(graph), _joins_adapters(adapter))
        fuse(autodiff(graph))
        if not deterministic:
            _allow_any_order(graph)
        precision(graph, recipe)
        if widen and adapter is not None:
            widen_products(graph, weights.dtypes(graph), recipe.compute)
        if join_projections:
            join_low_rank(fuse_low_rank(graph))
        if backend != "cpu":  # whose server rounds between the two, and so does its trainer
            fuse_norm_rope(graph)
        if join_projections:
            join_ropes(graph)
        for rewrite in strategy_passes:
            graph = rewrite(graph)
        before = saved_bytes(graph, bindings)
        if saved_budget is not None:
            recompute(graph, saved_budget, bindings, backend)
        dead_code(graph)
        options = EmitOptions(bindings, recipe.compute, weights.dtypes(graph), optimizer, master, states,
                              decoding_stream(backend))
        program, layout = emit(graph, options), TrainableLayout.of(graph, TrainedTypes(recipe.compute, master, states))
        planned = engine.plan(program.to_bytes(), backend, threads, device)
        return TrainPlan(graph, program, layout, bindings, (before, saved_bytes(graph, bindings)), planned)

    if memory_budget == 0:
        return build(0)
    plan = build(None)
    if memory_budget is None or plan.resident_bytes <= memory_budget:
        return plan
    return _fit(build, plan, memory_budget)


def decoding_stream(backend: str) -> int | None:
    """Where copies of quantised weights are made ahead of the products that read them. A device does it while other
    work runs; the CPU's products decode blocks straight into the layout that they want."""
    return None if backend == "cpu" else 1


def _allow_any_order(graph: Graph) -> None:
    for region in graph.ordered_regions():
        for node in region.backward:
            if "deterministic" in node.attrs:
                node.attrs["deterministic"] = 0


def _fit(build: Callable[[int | None], TrainPlan], plan: TrainPlan, memory_budget: int) -> TrainPlan:
    """Lowers what may be saved until the whole program fits; the last try recomputes everything."""
    budget = plan.saved_bytes[0]
    for attempts_left in reversed(range(8)):
        budget = max(budget - (plan.resident_bytes - memory_budget), 0) if attempts_left else 0
        plan = build(budget)
        if plan.resident_bytes <= memory_budget:
            return plan
        if budget == 0:
            break
    raise TooLarge(plan, memory_budget)


def _forward(model: LoadedModel, output: str, max_positions: int, adapter: LoraSpec | None) -> Graph:
    graph = trace(model.dsl(), output, max_positions)
    return graph if adapter is None else lora(graph, adapter, trainable=False)


def _joins_adapters(adapter: LoraSpec | None) -> bool:
    return adapter is None or adapter.dropout == 0


def _packed(
    model: LoadedModel, recipe: Recipe, output: str, max_positions: int, adapter: LoraSpec | None,
    dtypes: Callable[[Graph], Mapping[str, str]], join_projections: bool, widened: Collection[str] | None, backend: str,
) -> Graph:
    """Forward over packed documents. ``dtypes``: of the stored parameters. ``widened``: names of the weights that have their
    adapters beside them; None for all that can."""
    graph = _forward(model, output, max_positions, adapter)
    if join_projections:
        fuse_projections(graph, dtypes(graph), _joins_adapters(adapter))
    precision(fuse(graph), recipe)
    if adapter is not None and (widened is None or widened):
        widen_products(graph, dtypes(graph), recipe.compute, widened)
    if backend != "cpu":
        fuse_norm_rope(graph)
    if join_projections:
        join_ropes(graph)
    return dead_code(graph)


def loss_program(
    model: LoadedModel, recipe: Recipe, weights: FrozenWeights, bindings: Mapping[str, int], *, max_positions: int,
    adapter: LoraSpec | None = None, output: str = "loss", join_projections: bool = False,
    widened: Collection[str] = (),
) -> tuple[Graph, Program]:
    """A program that only runs forward over packed documents: "loss" (entries begin, forward) or all "logits".

    widened: the `TrainPlan.widened` of a session that writes adapters beside the weights that both read.
    """
    graph = _packed(model, recipe, output, max_positions, adapter, weights.dtypes, join_projections, widened,
                    weights.backend)
    options = EmitOptions(bindings, recipe.compute, weights.dtypes(graph), prefetch=decoding_stream(weights.backend))
    return graph, emit(graph, options)


def evaluation_bytes(
    model: LoadedModel, recipe: Recipe, weights: FrozenWeights, bindings: Mapping[str, int], *, max_positions: int,
    adapter: LoraSpec | None, backend: str = "cpu", device: int = 0, threads: int | None = None,
    join_projections: bool = False, widen: bool = False,
) -> int:
    """What `loss_program` takes beside a training session whose weights it reads: its arenas and scratch memory."""
    def dtype(name: str, value: Any) -> str:
        if adapter is None or value.role in ("lora_a", "lora_b"):
            return recipe.compute if len(value.shape) > 1 else "f32"
        return weights.dtype(name, tuple(value.shape))

    def dtypes(graph: Graph) -> dict[str, str]:
        return {name: dtype(name, value) for name, value, _ in graph.instances()}

    graph = _packed(model, recipe, "loss", max_positions, adapter, dtypes, join_projections, None if widen else (),
                    backend)
    program = emit(graph, EmitOptions(bindings, recipe.compute, dtypes(graph), prefetch=decoding_stream(backend)))
    planned = engine.plan(program.to_bytes(), backend, threads, device)
    return sum(planned["arenas"].values()) + planned["workspace"]


def cached_program(
    model: LoadedModel, recipe: Recipe, weights: FrozenWeights, bindings: Mapping[str, int], *, max_positions: int,
    adapter: LoraSpec | None = None,
) -> tuple[Graph, Program]:
    """A program over tokens of sequences whose earlier tokens are cached; gives the logits of the asked rows.

    bindings: T tokens a run, R rows of logits, S cache rows, B sequences, M blocks of a sequence.
    """
    graph = paged_kv(_forward(model, "row_logits", max_positions, adapter))
    graph = dead_code(precision(fuse(graph), recipe))
    return graph, emit(graph, EmitOptions(bindings, recipe.compute, weights.dtypes(graph)))
