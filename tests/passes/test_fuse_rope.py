"""fuse_rope with norms: heads normed, rotated and written by one op give the logits that they give apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import surogate_gemma.families
import surogate_gemma.tiny
import surogate_qwen.family
import surogate_qwen.tiny

from surogate_core.dsl import trace
from surogate_core.ir import Builder, Graph, Node
from surogate_core.model import LoadedModel
from surogate_core.passes import dead_code, fuse, fuse_projections, fuse_rope, paged_kv, precision
from surogate_core.passes.paged_kv import BLOCK_SIZE
from surogate_core.passes.precision import RECIPES
from surogate_core.program import EmitOptions, emit

from .models import MAX_POSITIONS, frozen_dtypes, open_session

TOKENS, BLOCKS = 20, 3
FAMILIES = (*surogate_qwen.family.FAMILIES, *surogate_gemma.families.FAMILIES)
QWEN3 = surogate_qwen.tiny.QWEN3
MODELS: dict[str, tuple[dict[str, Any], float, int]] = {
    "qwen3": (QWEN3, 0.0, 1),
    "qwen3 of odd heads": ({**QWEN3, "head_dim": 22}, 0.0, 1),
    "gemma3": (surogate_gemma.tiny.GEMMA_3, 1.0, 2),
}
"""Architecture, what is added to the weights of its norms, and how many kinds of layers it has."""


def model(architecture: dict[str, Any]) -> LoadedModel:
    return LoadedModel.from_architecture(architecture, FAMILIES)


def planned(loaded: LoadedModel, recipe: str, norms: bool, join: bool = False) -> Graph:
    graph = paged_kv(trace(loaded.dsl(), "row_logits", MAX_POSITIONS))
    if join:
        fuse_projections(graph, frozen_dtypes(graph))
    return dead_code(precision(fuse(fuse_rope(graph, norms=norms)), RECIPES[recipe]))


def logits(graph: Graph, loaded: LoadedModel, recipe: str) -> np.ndarray:
    """Of every token of two sequences, of 9 and 11. Weights of norms differ from dim to dim."""
    bindings = {"T": TOKENS, "R": TOKENS, "S": BLOCKS * BLOCK_SIZE, "B": 2, "M": 1}
    dtypes = frozen_dtypes(graph)
    program = emit(graph, EmitOptions(bindings, RECIPES[recipe].compute, dtypes))
    session = open_session(graph, program, loaded, scale=4.0)
    memories, generator = [], np.random.default_rng(3)
    for storage in program.external():
        name = storage.name
        if name.endswith("_cache"):
            memories.append(np.full(storage.bytes, 0xFF, np.uint8))
        elif name.endswith("_norm.weight"):
            memories.append(generator.uniform(-1.5, 1.5, storage.bytes // 4).astype(np.float32))
        else:
            continue
        session.bind(name, memories[-1])
    positions = np.concatenate([np.arange(9), np.arange(11)])
    sequences = np.repeat([0, 1], [9, 11])
    given = {"tokens": generator.integers(0, 160, TOKENS), "positions": positions, "sequence_ids": sequences,
             "slots": np.array([2, 0])[sequences] * BLOCK_SIZE + positions, "block_tables": [[2], [0]],
             "rows": np.arange(TOKENS)}
    for name in graph.inputs:
        session.tensor(name)[:] = given[name]
    session.run("forward")
    return session.tensor("logits").copy()


def nodes_of(graph: Graph, op: str) -> list[Node]:
    return [node for region in graph.ordered_regions() for node in region.forward if node.op == op]


@pytest.mark.parametrize("architecture, unit_offset, kinds", MODELS.values(), ids=MODELS)
def test_logits_stay(architecture, unit_offset, kinds):
    loaded = model(architecture)
    truth = logits(planned(loaded, "fp32", False), loaded, "fp32")
    for recipe in RECIPES:
        apart = planned(loaded, recipe, False)
        graph = planned(loaded, recipe, True, join=recipe == "bf16")
        compute = RECIPES[recipe].compute
        for node in nodes_of(graph, "rope_kv_write"):
            assert node.attrs["unit_offset"] == unit_offset and node.attrs["eps"] == 1e-6
            assert [v.dtype for v in (*node.inputs[:3], *node.outputs)] == [compute] * 6
            assert [v.name for v in node.inputs[6:]] == ["attn.q_norm.weight", "attn.k_norm.weight"]
        assert len(nodes_of(graph, "rms_norm")) == len(nodes_of(apart, "rms_norm")) - 2 * kinds
        found = logits(graph, loaded, recipe)
        off = np.linalg.norm(found - truth) / np.linalg.norm(truth)
        if recipe == "fp32":
            assert off <= 1e-5
        else:  # as near as with a rounding in between
            expected = logits(apart, loaded, recipe)
            assert off <= 1.4 * np.linalg.norm(expected - truth) / np.linalg.norm(truth)


def test_nothing_is_taken_in_unasked():
    graph = fuse_rope(paged_kv(trace(model(QWEN3).dsl(), "row_logits", MAX_POSITIONS)))
    assert "fuse_rope(1 layers)" in graph.history
    assert [node.inputs[6:] for node in nodes_of(graph, "rope_kv_write")] == [(None, None)]
    assert len(nodes_of(graph, "rms_norm")) == 5


@pytest.mark.parametrize("change", ["eps", "a second reader", "a wider product"])
def test_norms_that_differ_or_are_read_elsewhere_stay(change):
    graph = paged_kv(trace(model(QWEN3).dsl(), "row_logits", MAX_POSITIONS))
    (region,) = graph.layer_regions()
    of_k = next(n for n in region.forward if n.op == "rms_norm" and n.inputs[1].name == "attn.k_norm.weight")
    if change == "eps":
        of_k.attrs["eps"] = 1e-5
    elif change == "a second reader":
        Builder(graph, region, region.forward).op("add", of_k.outputs[0], of_k.outputs[0])
    else:
        view = next(n for n in region.forward if of_k.inputs[0] in n.outputs)
        product = next(n for n in region.forward if view.inputs[0] in n.outputs)
        view.inputs[0].dtype = of_k.inputs[0].dtype = product.attrs["out_dtype"] = "residual"
    fuse_rope(graph, norms=True)
    assert "fuse_rope(1 layers)" in graph.history
    assert len(nodes_of(graph, "rms_norm")) == 5
