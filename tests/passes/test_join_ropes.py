"""join_ropes: queries and keys that lie side by side are turned by one op, normed or not, back as well, and no bit changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import surogate_gemma.families
import surogate_gemma.tiny
import surogate_qwen.family
import surogate_qwen.tiny

from surogate_core.ir import Builder, Graph, Node
from surogate_core.ir.builder import JOIN
from surogate_core.model import LoadedModel, initial_values
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_low_rank, fuse_norm_rope, fuse_projections, join_ropes, lora, precision,
    recompute, widen_products,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program import EmitOptions, Program, emit
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, assert_device_is_close, assert_same_bits, frozen_dtypes, loss_and_gradients, loss_graph, program_of

ADAPTERS = {
    "everything trained": None, "lora": LoraSpec(8, 8.0), "of q and v": LoraSpec(8, 8.0, frozenset({"attn.q", "attn.v"})),
}
VARIANTS = {
    "plain": {}, "biases": {"attention_bias": True, "hidden_size": 64, "intermediate_size": 96},
    "one key head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3, "hidden_size": 128},
}
NORMED = {
    "qwen3": (surogate_qwen.tiny.QWEN3, surogate_qwen.family.FAMILIES, 1),
    "gemma3": (surogate_gemma.tiny.GEMMA_3, surogate_gemma.families.FAMILIES, 2),
}
"""Models whose heads have norms: architecture, families, and how many kinds of layers they have."""


def normed(name: str) -> LoadedModel:
    return LoadedModel.from_architecture(*NORMED[name][:2])


def differentiated(loaded: LoadedModel, adapter: LoraSpec | None, recipe: str = "fp32", widen: bool = True) -> Graph:
    """As it is where ropes are joined; with adapters inside the products that they belong to, where ``widen``."""
    graph = loss_graph(loaded)
    if adapter is not None:
        lora(graph, adapter)
    dtypes = frozen_dtypes(graph, RECIPES[recipe].compute)
    fuse_projections(graph, dtypes)
    precision(fuse(autodiff(graph)), RECIPES[recipe])
    if adapter is not None and widen:
        widen_products(graph, dtypes, RECIPES[recipe].compute)
    return fuse_norm_rope(fuse_low_rank(graph))


def planned(graph: Graph, one_op: bool, share: float | None = None, joined: tuple[int, int] = (1, 1)) -> Graph:
    """``share``: of the saved activations, what is not computed again. ``joined``: forward and backward, where ``one_op``."""
    if one_op:
        join_ropes(graph)
        assert graph.history[-1] == "join_ropes({} forward, {} backward)".format(*joined)
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def ropes(program: Program, *names: str) -> list[tuple[tuple[int, ...], bool]]:
    """Of all layers: what turns, and whether it is done in place."""
    found = [i for i in program.instructions if i.op in names]
    places = [(program.tensor(i.inputs[0]), program.tensor(i.outputs[0])) for i in found]
    return [(x.shape, (x.storage, x.byte_offset, x.strides) == (y.storage, y.byte_offset, y.strides)) for x, y in places]


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_no_bit_changes(variant, adapter):
    loaded, recipe = models.model(**variant), "bf16"
    found = [
        loss_and_gradients(planned(differentiated(loaded, adapter, recipe), *how), loaded, recipe, scale=1.0, matrices="bf16")
        for how in ((False,), (True,), (True, 0.5), (True, 0.0))
    ]
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_each_layer_turns_once_and_in_place(adapter):
    graph = planned(differentiated(models.model(), adapter), True)
    heads = ((BINDINGS["T"], 4 + 2, 8), True)
    assert ropes(program_of(graph), "rope") == [heads] * 4


WIDE = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("loaded, adapter", [
    *((models.model(**WIDE), adapter) for adapter in ADAPTERS.values()),
    (LoadedModel.from_architecture({**surogate_qwen.tiny.QWEN3, **WIDE}, surogate_qwen.family.FAMILIES), ADAPTERS["lora"]),
], ids=[*ADAPTERS, "norms and lora"])
def test_activations_take_no_more_memory(loaded, adapter):
    bindings: Mapping[str, int] = {"T": 1024, "D": 9}
    for share in (1.0, 0.5, 0.0):
        taken = []
        for one_op in (False, True):
            graph = planned(differentiated(loaded, adapter, "pure_bf16"), one_op)
            recompute(graph, int(share * saved_bytes(graph, bindings)), bindings)
            dtypes = frozen_dtypes(graph, "bf16")
            program = emit(dead_code(graph), EmitOptions(bindings, "bf16", dtypes, optimizer=AdamW()))
            taken.append(next(a.bytes for a in program.arenas if a.name == "activations"))
        assert taken[1] <= taken[0]


class TestNorms:
    """The two of a layer are one op where their weights do not learn."""

    @pytest.mark.parametrize("adapter", [ADAPTERS["lora"], ADAPTERS["of q and v"]], ids=["lora", "of q and v"])
    @pytest.mark.parametrize("name", NORMED)
    def test_no_bit_changes(self, name, adapter, monkeypatch):
        self.norms_that_weigh(monkeypatch)
        loaded, recipe, kinds = normed(name), "bf16", NORMED[name][2]
        found = [
            loss_and_gradients(planned(differentiated(loaded, adapter, recipe), one_op, share, (kinds, kinds)), loaded, recipe,
                               scale=1.0, matrices="bf16")
            for one_op, share in ((False, None), (True, None), (True, 0.5), (True, 0.0))
        ]
        for other in found[1:]:
            assert_same_bits(found[0], other)

    @staticmethod
    def norms_that_weigh(monkeypatch):
        """Weights that differ from dim to dim, and from norm to norm."""
        def values(name: str, shape: tuple[int, ...], declared: Any, seed: int) -> np.ndarray:
            if "norm" not in name:
                return initial_values(name, shape, declared, seed)
            return np.random.default_rng(sum(name.encode())).uniform(0.3, 1.5, shape).astype(np.float32)

        monkeypatch.setattr(models, "initial_values", values)

    def test_each_layer_turns_once_and_its_gradients_in_place(self):
        graph = planned(differentiated(normed("qwen3"), ADAPTERS["lora"]), True)
        program = program_of(graph)
        config, layers = surogate_qwen.tiny.QWEN3, len(graph.layers)
        heads = config["num_attention_heads"] + config["num_key_value_heads"]
        shape = (BINDINGS["T"], heads, config["head_dim"])
        assert ropes(program, "norm_rope") == [(shape, False)] * layers
        assert ropes(program, "norm_rope_grad", "rope") == [(shape, True)] * layers

    @pytest.mark.cuda
    @pytest.mark.parametrize("name", NORMED)
    def test_a_device_gives_what_the_cpu_gives(self, name, monkeypatch):
        self.norms_that_weigh(monkeypatch)
        loaded, kinds = normed(name), NORMED[name][2]
        graph = loss_graph(loaded)
        for region in graph.ordered_regions():
            for value in region.params.values():
                value.trainable = value.trainable and value.role != "norm"
        fuse_projections(graph, frozen_dtypes(graph))
        fuse_norm_rope(precision(fuse(autodiff(graph)), RECIPES["fp32"]))
        assert_device_is_close(planned(graph, True, joined=(kinds, kinds)), loaded, scale=0.5, relative=1e-3)

    def test_without_gradients(self):
        graph = loss_graph(normed("qwen3"), trainable=False)
        fuse_projections(graph, frozen_dtypes(graph))
        fuse_norm_rope(precision(fuse(graph), RECIPES["fp32"]))
        assert join_ropes(graph).history[-1] == "join_ropes(1 forward, 0 backward)"
        (node,) = (n for n in dead_code(graph).layer_regions()[0].forward if n.op == "norm_rope")
        assert node.outputs[1] is None

    @pytest.mark.parametrize("change", ["a second reader of x", "a second reader of rstd", "another eps", "an addend"])
    def test_two_that_something_parts_stay(self, change):
        graph = differentiated(normed("qwen3"), ADAPTERS["lora"])
        (region,) = graph.layer_regions()
        node = next(n for n in region.forward if n.op == "norm_rope")
        back = next(n for n in region.backward if n.op == "norm_rope_grad" and n.inputs[1] is node.inputs[0])
        if change == "another eps":
            node.attrs["eps"] = 0.5
        elif change == "an addend":
            back.inputs = (*back.inputs[:6], node.inputs[0], *back.inputs[7:])
        elif change == "a second reader of x":
            Builder(graph, region, region.backward).op("rope", node.inputs[0], *node.inputs[2:4])
        else:
            Builder(graph, region, region.backward).op("add", node.outputs[1], node.outputs[1])
        assert join_ropes(graph).history[-1] == "join_ropes(0 forward, 0 backward)"


class TestWhatStays:
    def test_of_products_with_adapters_beside_them(self):
        graph = join_ropes(differentiated(models.model(), LoraSpec(8, 8.0), widen=False))
        assert graph.history[-1] == "join_ropes(0 forward, 1 backward)"

    def test_of_heads_with_norms_that_learn(self):
        graph = join_ropes(differentiated(normed("qwen3"), ADAPTERS["everything trained"]))
        assert graph.history[-1] == "join_ropes(0 forward, 0 backward)"

    def test_where_products_are_apart(self):
        graph = join_ropes(precision(fuse(autodiff(loss_graph(models.model()))), RECIPES["fp32"]))
        assert graph.history[-1] == "join_ropes(0 forward, 0 backward)"

    @pytest.mark.parametrize("change", ["other angles", "a second reader", "dense rows", "out of order"])
    def test_of_queries_and_keys_that_something_parts(self, change):
        graph = differentiated(models.model(), None)
        (region,) = graph.layer_regions()
        of_k = self.rope(region.forward, 2)
        if change == "other angles":
            of_k.attrs["interleaved"] = self.rope(region.backward, 2).attrs["interleaved"] = 1
        elif change == "a second reader":
            for node in (of_k, self.rope(region.backward, 2)):
                Builder(graph, region, region.backward).op("rope", *node.inputs)
        elif change == "dense rows":
            Builder(graph, region, region.forward).op("softcap", of_k.outputs[0], cap=3.0)
            back = self.rope(region.backward, 2)
            nodes: list[Node] = []
            builder = Builder(graph, region, nodes)
            back.inputs = (builder.op("softcap", back.inputs[0], cap=3.0), *back.inputs[1:])
            region.backward.insert(region.backward.index(back), nodes[0])
        else:  # v between q and k
            for node in region.forward:
                if node.op == "slice" and node.attrs["start"] >= 32 and node.attrs["stop"] <= 64:
                    node.attrs |= {"start": 80 - node.attrs["start"], "stop": 80 - node.attrs["start"] + 16}
            join = next(n for n in region.backward if n.op == JOIN and len(n.inputs) == 3)
            join.inputs = (join.inputs[0], join.inputs[2], join.inputs[1])
        assert join_ropes(graph).history[-1] == "join_ropes(0 forward, 0 backward)"

    @staticmethod
    def rope(nodes: list[Node], heads: int) -> Node:
        return next(n for n in nodes if n.op == "rope" and n.inputs[0].shape[1] == heads)
