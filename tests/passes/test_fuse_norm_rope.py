"""fuse_norm_rope: a head's norm and rotation as one op, and back, change no loss and no gradient beyond a rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import surogate_gemma.families
import surogate_gemma.tiny
import surogate_qwen.family
import surogate_qwen.tiny

from surogate_core.engine import Memory, Session
from surogate_core.ir import Builder, Graph, Node
from surogate_core.model import LoadedModel, initial_values
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_norm_rope, fuse_projections, lora, precision, recompute, widen_products,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes

from . import models
from .models import (
    BINDINGS, assert_close, assert_same_bits, batch, frozen_dtypes, loss_and_gradients, loss_graph, open_session,
    program_of,
)

FAMILIES = (*surogate_qwen.family.FAMILIES, *surogate_gemma.families.FAMILIES)
QWEN3 = surogate_qwen.tiny.QWEN3
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": (QWEN3, 1), "qwen3 of odd heads": ({**QWEN3, "head_dim": 22}, 1),
    "gemma3": (surogate_gemma.tiny.GEMMA_3, 2),
}
"""Architecture, and how many kinds of layers it has."""
ADAPTERS = {"everything trained": None, "lora": LoraSpec(4, 8.0)}


@pytest.fixture(autouse=True)
def norms_that_weigh(monkeypatch):
    """Weights of norms that differ from dim to dim, and from norm to norm."""
    def values(name: str, shape: tuple[int, ...], declared: Any, seed: int) -> np.ndarray:
        if "norm" not in name:
            return initial_values(name, shape, declared, seed)
        return np.random.default_rng(sum(name.encode())).uniform(0.3, 1.5, shape).astype(np.float32)

    monkeypatch.setattr(models, "initial_values", values)


def model(architecture: dict[str, Any] = QWEN3) -> LoadedModel:
    return LoadedModel.from_architecture(architecture, FAMILIES)


def differentiated(loaded: LoadedModel, adapter: LoraSpec | None, recipe: str = "fp32", join: bool = False) -> Graph:
    graph = loss_graph(loaded)
    if adapter is not None:
        lora(graph, adapter)
    if join:
        fuse_projections(graph, frozen_dtypes(graph))
    return precision(fuse(autodiff(graph)), RECIPES[recipe])


def planned(loaded: LoadedModel, adapter: LoraSpec | None, recipe: str, join: bool = False, *, one_op: bool = True,
            share: float | None = None) -> Graph:
    """``share``: of the saved activations, what is not computed again."""
    graph = differentiated(loaded, adapter, recipe, join)
    if one_op:
        fuse_norm_rope(graph)
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def results(graph: Graph, loaded: LoadedModel, recipe: str):
    """Of weights so small that a rounding does not grow."""
    return loss_and_gradients(graph, loaded, recipe, scale=0.5)


def nodes_of(graph: Graph, op: str) -> list[Node]:
    return [node for region in graph.ordered_regions() for node in region.nodes() if node.op == op]


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("architecture, kinds", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_stay(architecture, kinds, adapter):
    loaded, gone = model(architecture), 2 * kinds
    truth = results(planned(loaded, adapter, "fp32", one_op=False), loaded, "fp32")
    for recipe in RECIPES:
        join = recipe == "bf16"
        apart = planned(loaded, adapter, recipe, join, one_op=False)
        graph = planned(loaded, adapter, recipe, join)
        assert len(nodes_of(graph, "norm_rope")) == gone
        assert len(nodes_of(graph, "rms_norm")) == len(nodes_of(apart, "rms_norm")) - gone
        assert len(nodes_of(graph, "norm_rope_grad")) == (0 if adapter is None else gone)
        assert len(nodes_of(graph, "rope")) == (gone if adapter is None else 0)
        for node in nodes_of(graph, "norm_rope"):
            assert node.attrs["unit_offset"] == kinds - 1.0 and node.attrs["eps"] == 1e-6
        found = results(graph, loaded, recipe)
        if recipe == "fp32":
            assert_close(truth, found, 1e-5)
        else:  # as near as with a rounding in between
            assert off(found, truth) <= 1.5 * off(results(apart, loaded, recipe), truth)


def off(found, truth) -> float:
    """Of all gradients together, relative to what they are in fp32."""
    differences = [np.linalg.norm(gradient - truth[1][name]) for name, gradient in found[1].items()]
    return np.linalg.norm(differences) / np.linalg.norm([np.linalg.norm(gradient) for gradient in truth[1].values()])


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_recompute_changes_no_bit(adapter, join):
    loaded = model()
    whole = results(planned(loaded, adapter, "bf16", join), loaded, "bf16")
    for share in (0.6, 0.0):
        graph = planned(loaded, adapter, "bf16", join, share=share)
        assert_same_bits(whole, results(graph, loaded, "bf16"))
    assert any(node.op == "norm_rope" for region in graph.layer_regions() for node in region.backward)


def test_with_adapters_beside_the_weights():
    graph = differentiated(model(), LoraSpec(8, 8.0), "fp32", join=True)
    widen_products(graph, frozen_dtypes(graph), "f32")
    fuse_norm_rope(graph)
    assert graph.history[-1] == "fuse_norm_rope(2 forward, 2 backward)"
    assert "widen_products(0 products)" not in graph.history


@pytest.mark.parametrize("change", ["a second reader", "another dtype"])
def test_pairs_that_something_stands_between_stay(change):
    graph = differentiated(model(), LoraSpec(4, 8.0, frozenset({"mlp.down"})))
    (region,) = graph.layer_regions()
    norm = next(n for n in region.forward if n.op == "rms_norm" and n.inputs[1].name == "attn.k_norm.weight")
    back = next(n for n in region.backward if n.op == "rms_norm_grad" and n.inputs[1] is norm.inputs[0])
    if change == "a second reader":
        Builder(graph, region, region.backward).op("add", norm.outputs[0], back.inputs[0])
    else:
        view = next(n for n in region.forward if norm.inputs[0] in n.outputs)
        product = next(n for n in region.forward if view.inputs[0] in n.outputs)
        product.attrs["out_dtype"] = view.inputs[0].dtype = norm.inputs[0].dtype = "bf16"
    assert fuse_norm_rope(graph).history[-1] == "fuse_norm_rope(1 forward, 1 backward)"
    assert norm in region.forward and back in region.backward


@pytest.mark.cuda
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("architecture, kinds", MODELS.values(), ids=MODELS)
def test_a_device_gives_what_the_cpu_gives(architecture, kinds, adapter):
    loaded = model(architecture)
    graph = planned(loaded, adapter, "fp32", join=True)
    assert len(nodes_of(graph, "norm_rope")) == 2 * kinds
    program = program_of(graph)
    host = open_session(graph, program, loaded, scale=0.5)
    device = Session(program.to_bytes(), backend="cuda")
    for storage in program.external():
        values = np.ascontiguousarray(host.tensor(next(t.name for t in program.tensors if t.storage == storage.name)))
        memory = Memory("cuda", values.nbytes)
        memory.write(values)
        device.bind(storage.name, memory)
    lasting = {storage.name for storage in program.storages if storage.arena not in (None, "activations")}
    for tensor in program.tensors:
        if tensor.storage in lasting:
            device.write(tensor.name, host.read(tensor.name))
    names = ["loss", *(t.name for t in program.tensors if t.name.startswith("gradients."))]
    found = []
    for session in (host, device):
        for name, array in batch().items():
            session.write(name, array)
        session.run("begin")
        session.run("micro_step")
        found.append({name: session.read(name) for name in names})
    for name in names:
        error = np.linalg.norm(found[1][name] - found[0][name])
        assert error <= 1e-3 * np.linalg.norm(found[0][name]) + 1e-9, name
