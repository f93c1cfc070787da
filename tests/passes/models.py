"""Small random models, traced, rewritten and run: what tests of graphs and programs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from surogate_llama.family import LlamaFamily

from surogate_core.dsl import trace
from surogate_core.engine import Session
from surogate_core.ir import Graph
from surogate_core.ir.graph import BUFFER
from surogate_core.model import LoadedModel, initial_values
from surogate_core.passes import RECIPES, autodiff, precision
from surogate_core.program import EmitOptions, Program, emit
from surogate_core.train.optimizers import AdamW
from surogate_core.weights.tensor import from_f32

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}
FAMILY = LlamaFamily("llama", "LlamaForCausalLM", ("llama",))
BINDINGS = {"T": 24, "D": 4}
MAX_POSITIONS = 24


def model(**changes: Any) -> LoadedModel:
    return LoadedModel.from_architecture({**CONFIG, **changes}, [FAMILY])


def loss_graph(loaded: LoadedModel, trainable: bool = True) -> Graph:
    graph = trace(loaded.dsl(), "loss", MAX_POSITIONS)
    for region in graph.ordered_regions():
        for value in region.params.values():
            value.trainable = trainable and value.role != BUFFER
    return graph


def gradient_graph(loaded: LoadedModel, *rewrites: Callable[[Graph], Graph], recipe: str = "fp32") -> Graph:
    """Differentiated and made concrete, with ``rewrites`` between the two."""
    graph = autodiff(loss_graph(loaded))
    for rewrite in rewrites:
        graph = rewrite(graph)
    return precision(graph, RECIPES[recipe])


def frozen_dtypes(graph: Graph, matrices: str = "f32") -> dict[str, str]:
    """Stored dtypes by name where all ``matrices`` are alike."""
    return {name: matrices if len(value.shape) > 1 else "f32"
            for name, value, _ in graph.instances() if not value.trainable}


def program_of(
    graph: Graph, recipe: str = "fp32", bindings: dict[str, int] = BINDINGS, matrices: str = "f32"
) -> Program:
    dtypes = frozen_dtypes(graph, matrices)
    return emit(graph, EmitOptions(bindings, RECIPES[recipe].compute, dtypes, optimizer=AdamW()))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Three documents in 24 tokens, some targets unsupervised, one weighing twice."""
    generator = np.random.default_rng(seed)
    starts = np.array([0, 9, 10, 24], np.int32)
    tokens = generator.integers(0, CONFIG["vocab_size"], 24).astype(np.int32)
    targets = np.where(generator.random(24) < 0.7, np.roll(tokens, -1), -100).astype(np.int32)
    positions = np.concatenate([np.arange(b - a) for a, b in zip(starts, starts[1:])]).astype(np.int32)
    weights = np.where(targets >= 0, np.where(np.arange(24) == 3, 2.0, 1.0), 0.0)
    return {"tokens": tokens, "targets": targets, "positions": positions, "doc_starts": starts,
            "token_weights": (weights / weights.sum()).astype(np.float32)}


def open_session(
    graph: Graph, program: Program, loaded: LoadedModel, scale: float = 8.0, threads: int = 1,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> Session:
    """A session with random weights, ``scale`` times those of a new model, so that every part of it matters.
    ``stored``: dtypes of frozen ones that are not f32."""
    session = Session(program.to_bytes(), threads=threads)
    names = {t.name for t in program.tensors}
    for name, (_, array) in graph.constants.items():
        if name in names:
            session.tensor(name)[...] = array
    declared = dict(loaded.dsl().parameters())
    storages, arrays = {s.name for s in program.storages}, {}
    for name, value, _ in graph.instances():
        array = initial_values(name, tuple(value.shape), declared.get(name), 1)
        if name.endswith("lora_b"):
            array = initial_values(name.replace("lora_b", "lora_a"), tuple(value.shape), None, 1)
        array = (array * np.float32(scale if array.ndim > 1 else 1)).astype(np.float32)
        arrays[name] = from_f32(name, array, stored.get(name, "f32")).data
        if f"master.{name}" in names:
            session.tensor(f"master.{name}")[...] = array
        elif f"weight.{name}" in storages:
            session.bind(f"weight.{name}", arrays[name])
    for name, _, _, parts in graph.joined_instances():
        if f"weight.{name}" in storages:
            session.bind(f"weight.{name}", np.concatenate([arrays[part] for part in parts]))
    for name, widened, layer in graph.widened_instances():
        if f"weight.{name}" in storages:
            parts = [arrays[f"layers.{layer}.{part.name}"] for part in widened.base.parts or (widened.base,)]
            memory = np.zeros(widened.shape, parts[0].dtype)
            memory[:sum(map(len, parts)), :parts[0].shape[1]] = np.concatenate(parts)
            session.bind(f"weight.{name}", memory)
    if "refresh" in {entry.name for entry in program.entries}:
        session.run("refresh")
    return session


def loss_and_gradients(graph: Graph, loaded: LoadedModel, recipe: str = "fp32", threads: int = 1,
                       scale: float = 8.0, matrices: str = "f32") -> tuple[float, dict[str, np.ndarray]]:
    """The loss of `batch` and every gradient by name. ``matrices``: stored dtype of frozen ones."""
    program = program_of(graph, recipe, matrices=matrices)
    session = open_session(graph, program, loaded, scale, threads, frozen_dtypes(graph, matrices))
    for name, array in batch().items():
        session.tensor(name)[:] = array
    if "dropout_seed" in graph.inputs:
        session.tensor("dropout_seed")[:] = (5, 7)
    session.run("begin")
    session.run("micro_step")
    names = {t.name for t in program.tensors}
    gradients = {name: session.tensor(f"gradients.{name}").copy()
                 for name, _, _ in graph.instances() if f"gradients.{name}" in names}
    return float(session.tensor("loss")[0]), gradients


def assert_same_bits(first, second) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        assert np.array_equal(gradient, second[1][name]), name


def assert_close(first, second, relative: float) -> None:
    assert abs(first[0] - second[0]) <= relative * abs(first[0])
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        error = np.linalg.norm(gradient - second[1][name])
        assert error <= relative * np.linalg.norm(gradient) + 1e-9, name
