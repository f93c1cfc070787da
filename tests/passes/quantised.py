"""A small model whose layers are stored in block formats, with adapters: its graph, its program, and a run of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from surogate_core.engine import Session
from surogate_core.ir import Graph
from surogate_core.passes import LoraSpec, autodiff, dead_code, fuse, fuse_projections, lora, precision, recompute
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program import EmitOptions, Program, emit
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, loss_graph

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
FORMATS = ("q8_0", "q4_1", "q4_0")
"""Of the layers' matrices, layer by layer; the middle layer's `mlp.down` stays f32."""


def model() -> Any:
    return models.model(**SHAPE)


def stored(graph: Graph) -> dict[str, str]:
    dtypes = {}
    for name, value, layer in graph.instances():
        if not value.trainable:
            plain = layer is None or len(value.shape) < 2 or name == "layers.1.mlp.down.weight"
            adapter = value.role in ("lora_a", "lora_b")
            dtypes[name] = "bf16" if adapter else "f32" if plain else FORMATS[layer]
    return dtypes


def planned(loaded: Any, join: bool = False, recipe: str = "bf16", share: float | None = None) -> Graph:
    """``share``: of what would be saved, how much may be."""
    graph = lora(loss_graph(loaded, trainable=False), LoraSpec(4, 8.0))
    if join:
        fuse_projections(graph, stored(graph))
    graph = precision(fuse(autodiff(graph)), RECIPES[recipe])
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def program_of(graph: Graph, prefetch: int | None, recipe: str = "bf16") -> Program:
    return emit(graph, EmitOptions(BINDINGS, RECIPES[recipe].compute, stored(graph), AdamW(), prefetch=prefetch))


def outcome(session: Session, program: Program) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients that `begin` and `micro_step` leave."""
    session.run("begin")
    session.run("micro_step")
    gradients = [t.name for t in program.tensors if t.name.startswith("gradients.")]
    return float(session.read("loss")[0]), {name: session.read(name) for name in gradients}
