"""fuse_low_rank: one op for the two gradients of a low-rank branch changes no gradient, wherever the two stood."""

from __future__ import annotations

import pytest

from surogate_core.ir import Graph, Node
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_low_rank, fuse_projections, lora, precision, recompute,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes

from . import models
from .models import BINDINGS, assert_close, assert_same_bits, loss_and_gradients, loss_graph

ADAPTERS = {
    "lora": LoraSpec(4, 8.0),
    "three roles": LoraSpec(8, 8.0, frozenset({"attn.q", "attn.v", "mlp.up"})),
    "dropout": LoraSpec(5, 8.0, dropout=0.3),
}


def planned(
    loaded, adapter: LoraSpec | None, *, join: bool, one_op: bool, recipe: str = "fp32", share: float | None = None,
) -> Graph:
    """``share``: of the saved activations, what is not computed again."""
    graph = loss_graph(loaded)
    if adapter is not None:
        lora(graph, adapter)
    if join:
        fuse_projections(graph, {name: "f32" for name, value, _ in graph.instances() if not value.trainable})
    precision(fuse(autodiff(graph)), RECIPES[recipe])
    if one_op:
        fuse_low_rank(graph)
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def results(graph: Graph, loaded, recipe: str = "fp32"):
    return loss_and_gradients(graph, loaded, recipe, scale=2.0)


def nodes_of(graph: Graph, op: str) -> list[Node]:
    return [n for n in graph.layer_regions()[0].backward if n.op == op]


@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
class TestLaws:
    @pytest.mark.parametrize("recipe, tolerance", [("fp32", 1e-6), ("bf16", 1e-2), ("pure_bf16", 1e-2)])
    def test_loss_and_gradients_stay(self, adapter, join, recipe, tolerance):
        loaded = models.model(attention_bias=True)
        before = results(planned(loaded, adapter, join=join, one_op=False, recipe=recipe), loaded, recipe)
        graph = planned(loaded, adapter, join=join, one_op=True, recipe=recipe)
        assert len(nodes_of(graph, "low_rank_grad")) == (7 if adapter.roles is None else 3)
        assert not any(n.inputs[1].role == "lora_b" for n in nodes_of(graph, "linear_input_grad"))
        after = results(graph, loaded, recipe)
        assert after[0] == before[0]
        assert_close(before, after, tolerance)

    def test_recompute_changes_no_bit(self, adapter, join):
        loaded = models.model()
        whole = results(planned(loaded, adapter, join=join, one_op=True, recipe="bf16"), loaded, "bf16")
        for share in (0.6, 0.0):
            graph = planned(loaded, adapter, join=join, one_op=True, recipe="bf16", share=share)
            assert_same_bits(whole, results(graph, loaded, "bf16"))


class TestWhatIsFused:
    def test_the_history_says_how_many(self):
        assert "fuse_low_rank(7 pairs)" in planned(models.model(), LoraSpec(4, 8.0), join=True, one_op=True).history

    def test_nothing_without_adapters(self):
        graph = planned(models.model(), None, join=True, one_op=True)
        assert "fuse_low_rank(0 pairs)" in graph.history and not nodes_of(graph, "low_rank_grad")

    @pytest.fixture
    def pair(self):
        """A graph, its backward list, and the two gradients of one branch in it."""
        graph = planned(models.model(), LoraSpec(4, 8.0, frozenset({"mlp.down"})), join=False, one_op=False)
        nodes = graph.layer_regions()[0].backward
        to_input = next(n for n in nodes if n.op == "linear_input_grad" and n.inputs[1].role == "lora_b")
        to_weight = next(n for n in nodes if n.op == "linear_weight_grad" and n.inputs[0] is to_input.inputs[0])
        return graph, nodes, to_input, to_weight

    def test_not_with_other_factors(self, pair):
        graph, _, to_input, _ = pair
        to_input.attrs = {**to_input.attrs, "alpha": 3.0}
        assert fuse_low_rank(graph).history[-1] == "fuse_low_rank(0 pairs)"

    def test_not_with_an_addend(self, pair):
        graph, _, to_input, to_weight = pair
        to_input.inputs = (*to_input.inputs[:2], to_weight.inputs[1])
        assert fuse_low_rank(graph).history[-1] == "fuse_low_rank(0 pairs)"

    def test_where_the_first_of_them_stood(self, pair):
        graph, nodes, to_input, to_weight = pair
        place = min(nodes.index(to_input), nodes.index(to_weight))
        fuse_low_rank(graph)
        assert nodes[place].op == "low_rank_grad"
        assert nodes[place].outputs == (to_input.outputs[0], to_weight.outputs[0], None, None, None)

    def test_where_the_later_of_them_stood_if_low_is_made_in_between(self, pair):
        graph, nodes, to_input, to_weight = pair
        again = graph.value("low.again", to_weight.inputs[1].shape, to_weight.inputs[1].dtype)
        maker = next(n for n in graph.layer_regions()[0].forward if to_weight.inputs[1] in n.outputs)
        to_weight.inputs = (to_weight.inputs[0], again)
        nodes.remove(to_weight)
        at = nodes.index(to_input) + 1
        nodes[at:at] = [Node(maker.op, maker.inputs, (again,), maker.attrs), to_weight]
        fuse_low_rank(graph)
        assert [n.op for n in nodes[at - 1 : at + 1]] == ["linear", "low_rank_grad"]

    def test_not_where_dlow_is_read_before_low_is_made(self, pair):
        graph, nodes, to_input, to_weight = pair
        again = graph.value("low.again", to_weight.inputs[1].shape, to_weight.inputs[1].dtype)
        maker = next(n for n in graph.layer_regions()[0].forward if to_weight.inputs[1] in n.outputs)
        to_weight.inputs = (to_weight.inputs[0], again)
        nodes.remove(to_weight)
        nodes += [Node(maker.op, maker.inputs, (again,), maker.attrs), to_weight]
        assert fuse_low_rank(graph).history[-1] == "fuse_low_rank(0 pairs)"

    def test_not_where_the_gradient_is_added_to_in_between(self, pair):
        graph, nodes, to_input, to_weight = pair
        nodes.remove(to_weight)
        at = nodes.index(to_input)
        twin = Node(to_weight.op, to_weight.inputs, to_weight.outputs, {**to_weight.attrs, "alpha": 3.0})
        nodes[at : at + 1] = [to_weight, twin, to_input]
        assert fuse_low_rank(graph).history[-1] == "fuse_low_rank(0 pairs)"
