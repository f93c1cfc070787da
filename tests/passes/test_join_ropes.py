"""join_ropes: queries and keys that lie side by side are turned by one op, back as well, and no bit changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import surogate_qwen.family
import surogate_qwen.tiny

from surogate_core.ir import Builder, Graph, Node
from surogate_core.ir.builder import JOIN
from surogate_core.model import LoadedModel
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_low_rank, fuse_norm_rope, fuse_projections, join_ropes, lora, precision,
    recompute, widen_products,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program import EmitOptions, Program, emit
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, assert_same_bits, frozen_dtypes, loss_and_gradients, loss_graph, program_of

ADAPTERS = {
    "everything trained": None, "lora": LoraSpec(8, 8.0), "of q and v": LoraSpec(8, 8.0, frozenset({"attn.q", "attn.v"})),
}
VARIANTS = {
    "plain": {}, "biases": {"attention_bias": True, "hidden_size": 64, "intermediate_size": 96},
    "one key head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3, "hidden_size": 128},
}


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


def planned(graph: Graph, one_op: bool, share: float | None = None) -> Graph:
    """``share``: of the saved activations, what is not computed again."""
    if one_op:
        join_ropes(graph)
        assert graph.history[-1] == "join_ropes(1 forward, 1 backward)"
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def ropes(program: Program) -> list[tuple[tuple[int, ...], bool]]:
    """Of the first layer that runs: what turns, and whether it is done in place."""
    found = [i for i in program.instructions if i.op == "rope"]
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
    assert ropes(program_of(graph)) == [heads] * 4


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_activations_take_no_more_memory(adapter):
    loaded = models.model(vocab_size=4096, hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
                          num_attention_heads=8, num_key_value_heads=2)
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


class TestWhatStays:
    def test_of_products_with_adapters_beside_them(self):
        graph = join_ropes(differentiated(models.model(), LoraSpec(8, 8.0), widen=False))
        assert graph.history[-1] == "join_ropes(0 forward, 1 backward)"

    def test_of_heads_with_norms(self):
        loaded = LoadedModel.from_architecture(surogate_qwen.tiny.QWEN3, surogate_qwen.family.FAMILIES)
        for adapter in ADAPTERS.values():
            graph = join_ropes(differentiated(loaded, adapter))
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
