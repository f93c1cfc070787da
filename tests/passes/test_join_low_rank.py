"""join_low_rank: branches side by side hand back their gradients by one op, and no bit changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import surogate_gemma.families
import surogate_gemma.tiny
import surogate_qwen.family
import surogate_qwen.tiny

from surogate_core.ir import Builder, Graph, Node, Region
from surogate_core.ir.builder import JOIN, SLICE
from surogate_core.model import LoadedModel
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_low_rank, fuse_norm_rope, fuse_projections, join_low_rank, join_ropes, lora,
    precision, recompute, widen_products,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program import EmitOptions, emit
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, assert_same_bits, frozen_dtypes, loss_and_gradients, loss_graph

QKV, GATE_UP = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")
ADAPTERS = {
    "all": (LoraSpec(8, 8.0), [QKV, GATE_UP]),
    "rank 24": (LoraSpec(24, 8.0, frozenset({*QKV, *GATE_UP})), [QKV, GATE_UP]),
    "of q and k": (LoraSpec(8, 4.0, frozenset({"attn.q", "attn.k", "mlp.down"})), [QKV[:2]]),
    "of k and v": (LoraSpec(16, 8.0, frozenset({"attn.k", "attn.v", "mlp.up"})), [QKV[1:]]),
}
"""With what is joined."""
MODELS = {
    "llama": lambda: models.model(),
    "biases": lambda: models.model(attention_bias=True, hidden_size=64, intermediate_size=96),
    "qwen3": lambda: LoadedModel.from_architecture(surogate_qwen.tiny.QWEN3, surogate_qwen.family.FAMILIES),
    "gemma3": lambda: LoadedModel.from_architecture(surogate_gemma.tiny.GEMMA_3, surogate_gemma.families.FAMILIES),
}


def differentiated(
    loaded: LoadedModel, adapter: LoraSpec | None, recipe: str = "bf16", widen: bool = True,
    stored: Mapping[str, str] | None = None,
) -> Graph:
    """As it is where gradients are joined. ``stored``: other dtypes by the ends of parameters' names."""
    graph = loss_graph(loaded)
    if adapter is not None:
        lora(graph, adapter)
    dtypes = frozen_dtypes(graph, RECIPES[recipe].compute)
    for end, dtype in (stored or {}).items():
        dtypes |= {name: dtype for name in dtypes if name.endswith(end)}
    fuse_projections(graph, dtypes, adapter is None or adapter.dropout == 0)
    precision(fuse(autodiff(graph)), RECIPES[recipe])
    if adapter is not None and widen:
        widen_products(graph, dtypes, RECIPES[recipe].compute)
    return fuse_low_rank(graph)


def planned(graph: Graph, join: bool, share: float | None = None) -> Graph:
    """What devices do after it, too. ``share``: of the saved activations, what is not computed again."""
    if join:
        join_low_rank(graph)
    join_ropes(fuse_norm_rope(graph))
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def calls(graph: Graph) -> list[tuple[str, ...]]:
    """Whose gradients are made together in the first body, of those that are."""
    found = []
    for node in graph.layer_regions()[0].backward:
        if node.op == "low_rank_grad":
            factors, gradients = ([v for v in values if v is not None] for values in (node.inputs[2:], node.outputs[1:]))
            assert [v.of for v in gradients] == factors
            found.append(tuple(v.name.removesuffix(".lora_b") for v in factors))
    return sorted(names for names in found if len(names) > 1)


@pytest.mark.parametrize("adapter, joined", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_bit_changes(make, adapter, joined):
    loaded, recipe = make(), "bf16"
    found = []
    for join, share in ((False, None), (True, None), (True, 0.5), (True, 0.0)):
        graph = planned(differentiated(loaded, adapter, recipe), join, share)
        assert calls(graph) == (joined if join else [])
        found.append(loss_and_gradients(graph, loaded, recipe, scale=1.0, matrices="bf16"))
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.parametrize("recipe", ["fp32", "pure_bf16"])
@pytest.mark.parametrize("stored, joined", [({}, [QKV, GATE_UP]), ({"attn.v.weight": "q8_0"}, [QKV[:2], GATE_UP])],
                         ids=["all alike", "v otherwise"])
def test_no_bit_changes_where_adapters_are_products_of_their_own(stored, joined, recipe):
    loaded, found = models.model(), []
    for join, share in ((False, None), (True, None), (True, 0.0)):
        graph = planned(differentiated(loaded, LoraSpec(8, 8.0), recipe, False, stored), join, share)
        assert calls(graph) == (joined if join else [])
        found.append(loss_and_gradients(graph, loaded, recipe, scale=1.0))
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.parametrize("widen", [False, True])
def test_activations_take_no_more_memory(widen):
    loaded = models.model(vocab_size=4096, hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
                          num_attention_heads=8, num_key_value_heads=2)
    bindings = {"T": 1024, "D": 9}
    for share in (1.0, 0.5, 0.0):
        taken = []
        for join in (False, True):
            graph = differentiated(loaded, LoraSpec(16, 8.0), "bf16", widen)
            graph = join_ropes(join_low_rank(graph) if join else graph)
            recompute(graph, int(share * saved_bytes(graph, bindings)), bindings)
            dtypes = frozen_dtypes(graph, "bf16")
            program = emit(dead_code(graph), EmitOptions(bindings, "bf16", dtypes, optimizer=AdamW()))
            taken.append(next(a.bytes for a in program.arenas if a.name == "activations"))
        assert taken[1] <= taken[0]


class TestPlace:
    @pytest.mark.parametrize("widen", [False, True])
    def test_operands_are_what_is_there_already(self, widen):
        """No slice or join is made for it: dy is what the base's products read, dlow what those of the first halves do."""
        graph = differentiated(models.model(), LoraSpec(8, 8.0), widen=widen)
        (region,) = graph.layer_regions()
        before = set(region.backward)
        low = {n.outputs[0] for n in region.forward if n.op == "linear" and n.inputs[1].role == "lora_a"}
        join_low_rank(graph)
        made = [n for n in region.backward if n not in before]
        assert [n.op for n in made] == ["low_rank_grad"] * 2
        for node in made:
            readers = [n.op for n in region.backward if node.outputs[0] in n.inputs]
            assert readers == ["linear_weight_grad", JOIN if widen else "linear_input_grad"]
            assert node.inputs[1] in low
            assert next(n for n in region.backward if node.inputs[0] in n.outputs).op == JOIN

    def test_a_part_of_what_is_joined_lies_in_it(self):
        graph = differentiated(models.model(), LoraSpec(8, 8.0), widen=False, stored={"attn.v.weight": "q8_0"})
        join_low_rank(graph)
        (region,) = graph.layer_regions()
        node = next(n for n in region.backward if n.op == "low_rank_grad" and n.inputs[2].name == "attn.q.lora_b")
        columns = next(n for n in region.backward if node.inputs[1] in n.outputs)
        assert (columns.op, columns.attrs) == (SLICE, {"start": 0, "stop": 16})
        (join,) = (n for n in region.backward if n.op == JOIN and node.outputs[0] in n.inputs)
        assert [v.shape[1] for v in join.inputs] == [16, 8]


class TestWhatStays:
    def test_the_history_says_how_many(self):
        assert join_low_rank(differentiated(models.model(), LoraSpec(8, 8.0))).history[-1] == "join_low_rank(2 joined)"

    @pytest.mark.parametrize("adapter", [
        None, LoraSpec(8, 8.0, dropout=0.2), LoraSpec(8, 8.0, frozenset({"attn.q", "attn.v", "mlp.up", "attn.o"})),
    ], ids=["everything trained", "dropout", "of q and v"])
    def test_of_what_does_not_lie_side_by_side(self, adapter):
        self.stays(differentiated(models.model(), adapter))

    def test_of_products_apart(self):
        loaded = models.model()
        graph = lora(loss_graph(loaded), LoraSpec(8, 8.0))
        self.stays(fuse_low_rank(precision(fuse(autodiff(graph)), RECIPES["bf16"])))

    @pytest.mark.parametrize("change", ["factor", "a second reader", "other rows", "added to in between"])
    def test_of_branches_that_something_parts(self, change):
        graph = differentiated(models.model(), LoraSpec(8, 8.0, frozenset(GATE_UP)))
        (region,) = graph.layer_regions()
        up, gate = (n for n in region.backward if n.op == "low_rank_grad")
        if change == "factor":
            gate.attrs = {"alpha": 3.0}
        elif change == "a second reader":
            weight = region.params["mlp.gate.lora_a"]
            Builder(graph, region, region.backward).op("linear_input_grad", gate.outputs[0], weight, out_dtype="bf16")
        elif change == "other rows":  # of the product of both first halves
            gate.inputs, up.inputs = ((own.inputs[0], other.inputs[1], *own.inputs[2:])
                                      for own, other in ((gate, up), (up, gate)))
        else:
            twin = Node("linear_weight_grad", (up.inputs[0], up.inputs[1]), (up.outputs[1],), {"alpha": 1.0})
            region.backward.insert(region.backward.index(gate), twin)
        self.stays(graph)

    @staticmethod
    def stays(graph: Graph) -> None:
        assert join_low_rank(graph).history[-1] == "join_low_rank(0 joined)"
        assert not calls(graph)


@pytest.mark.parametrize("count, joined", [(4, [4]), (5, [4]), (6, [4, 2]), (9, [4, 4])])
def test_more_than_four_are_several(count, joined):
    graph, region = side_by_side(count, rank=8)
    join_low_rank(graph)
    assert [len(names) for names in calls(graph)] == joined
    assert graph.history[-1] == f"join_low_rank({len(joined)} joined)"
    assert [n.inputs[0].shape[1] for n in region.backward if n.op == "linear_weight_grad"] == [8 * count]


def side_by_side(count: int, rank: int) -> tuple[Graph, Region]:
    """The gradients of ``count`` branches whose projections and first halves are one product each."""
    graph, region = Graph(), Region("body")
    graph.regions["body"], graph.layers = region, ("body",)
    x = graph.input("x", ("T", 32), "f32")
    first = graph.param(region, "lora_a", (count * rank, 32), "lora_a")
    forward, backward = (Builder(graph, region, nodes) for nodes in (region.forward, region.backward))
    low = forward.op("linear", x, first)
    lows = [forward.slice(low, i * rank, (i + 1) * rank) for i in range(count)]
    dys = [backward.op("scale", graph.input(f"d{i}", ("T", 16 + i), "f32"), factor=2.0, out_dtype="f32") for i in range(count)]
    dlows = []
    for i, (dy, own) in enumerate(zip(dys, lows)):
        b = graph.param(region, f"{i}.lora_b", (16 + i, rank), "lora_b")
        dlow, *_ = backward.op("low_rank_grad", dy, own, b, inout={"db": graph.grad_of(b)}, absent=("db_2", "db_3", "db_4"))
        dlows.append(dlow)
    joined = backward.join(dlows, "dlow")
    backward.op("linear_weight_grad", joined, x, inout={"dweight": graph.grad_of(first)})
    backward.op("scale", backward.join(dys, "dy"), factor=1.0, out_dtype="f32")
    return graph, region
