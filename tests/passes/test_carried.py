"""What layers hand on beside x: where it flows, and that no rewrite changes what it means. The model is one whose last layers
attend to keys and values of earlier ones, and whose layers all read the tokens' embeddings."""

from __future__ import annotations

import pytest
from surogate_gemma.gemma4 import FAMILIES
from surogate_gemma.gemma4_tiny import SHARED

from surogate_core.dsl import Embedding, LMHead, Model, Module, RMSNorm, RopeSpec, Stack, Tensor, trace
from surogate_core.dsl.attention import Attention
from surogate_core.ir import Graph
from surogate_core.ir.spec import SpecError, check
from surogate_core.model import LoadedModel
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, feed_tokens, fuse, fuse_low_rank, fuse_projections, join_low_rank, lora, paged_kv, precision,
    recompute, widen_products,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes

from .models import BINDINGS, MAX_POSITIONS, assert_close, assert_same_bits, loss_and_gradients, loss_graph

ADAPTERS = {"everything trained": None, "lora": LoraSpec(32, 8.0), "lora with dropout": LoraSpec(4, 8.0, dropout=0.3)}
TYPES = ["sliding_attention", "full_attention"] * 4


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = {**SHARED, "vocab_size": 96, "vocab_size_per_layer_input": 96, "num_hidden_layers": 8,
              "num_kv_shared_layers": 4, "layer_types": TYPES, "hidden_size_per_layer_input": 32}
    return LoadedModel.from_architecture(config, FAMILIES)


def planned(loaded, adapter=None, join=False, recipe="fp32", share: float | None = None) -> Graph:
    graph = loss_graph(loaded)
    if adapter is not None:
        lora(graph, adapter)
    dtypes = {name: "f32" for name, value, _ in graph.instances() if not value.trainable}
    if join:
        fuse_projections(graph, dtypes, adapter is None or not adapter.dropout)
    precision(fuse(autodiff(graph)), RECIPES[recipe])
    if join:
        join_low_rank(fuse_low_rank(widen_products(graph, dtypes, "f32")))
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def results(graph: Graph, loaded, recipe="fp32"):
    return loss_and_gradients(graph, loaded, recipe, scale=2.0)


def test_values_flow_from_where_they_are_set_to_where_they_are_read_last(loaded):
    graph = loss_graph(loaded)
    assert graph.layers == ("local", "global", "local:2", "global:2", "local_shared", "global_shared", "local_shared:2",
                            "global_shared:2")
    taken = {name: [value.name for value in graph.regions[name].carry_in[1:]] for name in graph.layers}
    everywhere, keys = ["tokens", "embeddings"], {kind: [f"{kind}.k", f"{kind}.v"] for kind in ("local", "global")}
    assert taken["local"] == taken["global"] == taken["local:2"] == everywhere
    assert taken["global:2"] == everywhere + keys["local"]
    both = everywhere + keys["local"] + keys["global"]
    assert taken["local_shared"] == taken["global_shared"] == taken["local_shared:2"] == both
    assert taken["global_shared:2"] == everywhere + keys["global"]
    assert len(graph.epilogue.carry_in) == 1


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_recompute_changes_no_bit(loaded, recipe):
    whole = results(planned(loaded, recipe=recipe), loaded, recipe)
    for share in (0.6, 0.0):
        assert_same_bits(whole, results(planned(loaded, recipe=recipe, share=share), loaded, recipe))


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_joined_products_change_nothing_but_rounding(loaded, adapter):
    before = results(planned(loaded, adapter), loaded)
    graph = planned(loaded, adapter, join=True)
    assert any(region.joined for region in graph.layer_regions())
    assert_close(before, results(graph, loaded), 1e-4)  # a change of 2e-7 in the weights moves them by 2e-5
    assert_same_bits(results(graph, loaded), results(planned(loaded, adapter, join=True, share=0.0), loaded))


def test_what_is_handed_on_is_counted_once(loaded):
    tokens, width = BINDINGS["T"], 64
    kept = saved_bytes(planned(loaded, share=0.0), BINDINGS)
    keys = 2 * 2 * (16 + 32)  # keys and values of two heads, of the last local and the last global layer of its own
    assert kept == 4 * tokens * (8 * width + width + 1 + keys)


def test_frozen_values_have_no_gradient(loaded):
    graph = planned(loaded, ADAPTERS["lora"])
    for name in graph.layers:
        region = graph.regions[name]
        learns = {value.name: grad is not None for value, grad in zip(region.carry_in, region.grad_out)}
        assert not learns["tokens"] and not learns["embeddings"]
        assert all(learned for value, learned in learns.items() if value.endswith((".k", ".v")))


def test_a_gradient_that_is_not_handed_back_is_seen(loaded):
    graph = autodiff(loss_graph(loaded))
    reader = graph.regions["local_shared"]
    reader.grad_out = tuple(None if v.name == "local.k" else g for v, g in zip(reader.carry_in, reader.grad_out))
    with pytest.raises(SpecError, match="region global:2 reads .*local.k.*, which region local_shared doesn't hand back"):
        check(graph)


def test_layers_that_share_have_no_cache(loaded):
    graph = feed_tokens(paged_kv(trace(loaded.dsl(), "row_logits", MAX_POSITIONS)))
    assert [len(graph.regions[name].states) for name in graph.layers] == [2, 2, 2, 2, 0, 0, 0, 0]
    assert sum(node.op == "feed_tokens" for region in graph.ordered_regions() for node in region.forward) == 1
    shapes = {value.name: value.shape for value in graph.regions["local_shared"].carry_in}
    assert shapes["local.k"] == shapes["local.v"] == ("S", 2, 16) and shapes["global.k"] == ("S", 2, 32)


class Toy(Model):
    def __init__(self, *kinds: str) -> None:
        self.embed, self.final_norm = Embedding(96, 32), RMSNorm(32, 1e-5)
        self.layers, self.lm_head = Stack(kinds, ToyBlock), LMHead(32, 96, self.embed)


class ToyBlock(Module):
    """kind: "own", "shared", or "scaled", which does more with another layer's keys than attend to them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        where = {"kv_to": "kv"} if kind == "own" else {"kv_from": "kv"}
        self.attn = Attention(32, 4, 2, 8, RopeSpec(8), **where)

    def forward(self, x: Tensor) -> Tensor:
        flow = self.context.flow
        if self.kind == "scaled":
            flow["kv.k"] = self.context.op("scale", flow["kv.k"], factor=2.0)
        return x + self.attn(x)


def test_what_nobody_set_cannot_be_read():
    with pytest.raises(ValueError, match="no layer before hands on 'kv.k'"):
        trace(Toy("shared", "own"), "hidden", MAX_POSITIONS)


def test_keys_of_a_cache_can_only_be_attended_to():
    assert paged_kv(trace(Toy("own", "shared"), "row_logits", MAX_POSITIONS))
    with pytest.raises(ValueError, match="can only be attended to"):
        paged_kv(trace(Toy("own", "scaled"), "row_logits", MAX_POSITIONS))
