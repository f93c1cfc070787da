"""widen_products: low-rank branches inside their products change nothing but how sums are rounded, and move no parameter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from surogate_core.ir import Builder, Graph, SpecError, check
from surogate_core.passes import (
    LoraSpec, autodiff, dead_code, fuse, fuse_low_rank, fuse_projections, lora, precision, recompute, widen_products,
    widened_names,
)
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program import EmitOptions, emit
from surogate_core.program.trainable import TrainableLayout, TrainedTypes
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, assert_close, assert_same_bits, frozen_dtypes, loss_and_gradients, loss_graph

VARIANTS = {
    "plain": {},
    "biases, tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_size": 64,
                     "intermediate_size": 96},
    "one key head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3, "hidden_size": 128,
                                   "intermediate_size": 80},
}
ADAPTERS = {
    "rank 4": LoraSpec(4, 8.0),
    "rank 8": LoraSpec(8, 16.0),
    "rank 16": LoraSpec(16, 8.0),
    "rank-stabilised": LoraSpec(8, 8.0, rank_stabilised=True),
    "q of q, k and v": LoraSpec(8, 8.0, frozenset({"attn.q", "mlp.up"})),
    "k and v": LoraSpec(8, 16.0, frozenset({"attn.k", "attn.v"})),
    "o and down": LoraSpec(8, 16.0, frozenset({"attn.o", "mlp.down"})),
}
ALL = frozenset({"attn.q_k_v.wide", "attn.o.wide", "mlp.gate_up.wide", "mlp.down.wide"})


def dtype_of(recipe: str) -> str:
    return RECIPES[recipe].compute


def concrete(loaded, adapter: LoraSpec, recipe: str = "fp32", matrices: str | None = None) -> Graph:
    """Differentiated, with projections joined; ``matrices``: stored dtype of frozen ones."""
    graph = lora(loss_graph(loaded), adapter)
    fuse_projections(graph, frozen_dtypes(graph, matrices or dtype_of(recipe)), adapter.dropout == 0)
    return precision(fuse(autodiff(graph)), RECIPES[recipe])


def widened(graph: Graph, recipe: str = "fp32", matrices: str | None = None, **names) -> Graph:
    return widen_products(graph, frozen_dtypes(graph, matrices or dtype_of(recipe)), dtype_of(recipe), **names)


def planned(loaded, adapter: LoraSpec, widen: bool, recipe: str = "fp32", share: float | None = None) -> Graph:
    graph = concrete(loaded, adapter, recipe)
    if widen:
        fuse_low_rank(widened(graph, recipe))
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def results(graph: Graph, loaded, recipe: str = "fp32"):
    """Weights so small that softmax stays well conditioned: adapters multiply."""
    return loss_and_gradients(graph, loaded, recipe, scale=1.0, matrices=dtype_of(recipe))


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
class TestLaws:
    def test_loss_and_gradients_stay(self, variant, adapter):
        loaded = models.model(**variant)
        before = results(planned(loaded, adapter, False), loaded)
        graph = planned(loaded, adapter, True)
        assert widened_names(graph)
        assert_close(before, results(graph, loaded), 5e-6)

    @pytest.mark.parametrize("recipe", ["bf16", "pure_bf16"])
    def test_in_bf16_they_are_about_as_near_to_fp32_as_before(self, variant, adapter, recipe):
        loaded = models.model(**variant)
        exact = results(planned(loaded, adapter, False), loaded)
        errors = []
        for widen in (False, True):
            found = results(planned(loaded, adapter, widen, recipe), loaded, recipe)
            off = np.concatenate([(g - found[1][name]).ravel() for name, g in exact[1].items()])
            errors.append(np.linalg.norm(off) / np.linalg.norm(np.concatenate([g.ravel() for g in exact[1].values()])))
        assert errors[1] < 2.0 * errors[0]

    @pytest.mark.parametrize("recipe", ["fp32", "pure_bf16"])
    def test_recompute_changes_no_bit(self, variant, adapter, recipe):
        loaded = models.model(**variant)
        whole = results(planned(loaded, adapter, True, recipe), loaded, recipe)
        for share in (0.8, 0.5, 0.0):
            graph = planned(loaded, adapter, True, recipe, share)
            assert_same_bits(whole, results(graph, loaded, recipe))


class TestWhatIsWidened:
    def test_every_product_with_adapters(self):
        for recipe in RECIPES:
            graph = widened(concrete(models.model(), LoraSpec(8, 8.0), recipe), recipe)
            assert widened_names(graph) == ALL
            region = graph.layer_regions()[0]
            assert sum(n.op == "linear" for n in region.forward) == 4 + 4
            assert sum(n.op == "linear_input_grad" for n in region.backward) == 4 + 7
            assert "widen_products(4 products)" in graph.history

    def test_only_what_is_named(self):
        graph = widened(concrete(models.model(), LoraSpec(8, 8.0)), only={"attn.o.wide"})
        assert widened_names(graph) == {"attn.o.wide"}

    def test_whose_rows_begin_at_multiples_of_eight(self):
        """Three times four columns are not; two times four, and 32 and 48, are."""
        graph = widened(concrete(models.model(), LoraSpec(4, 8.0)))
        assert widened_names(graph) == {"mlp.gate_up.wide"}

    def test_not_with_dropout(self):
        graph = widened(concrete(models.model(), LoraSpec(8, 8.0, dropout=0.5)))
        assert not widened_names(graph)

    def test_not_what_is_stored_otherwise_in_some_layer(self):
        graph = concrete(models.model(), LoraSpec(8, 8.0))
        dtypes = {**frozen_dtypes(graph), "layers.1.attn.k.weight": "bf16"}
        assert widened_names(widen_products(graph, dtypes, "f32")) == ALL - {"attn.q_k_v.wide"}

    def test_not_what_is_stored_in_blocks_or_in_other_floats(self):
        for matrices in ("q8_0", "f32"):
            graph = concrete(models.model(), LoraSpec(8, 8.0), "bf16", matrices)
            assert not widened_names(widened(graph, "bf16", matrices))

    def test_not_what_an_op_reads_that_wants_dense_rows(self):
        graph = concrete(models.model(), LoraSpec(8, 8.0))
        region = graph.layer_regions()[0]
        h = next(n for n in region.forward if n.op == "glu").outputs[0]
        Builder(graph, region, region.forward).op("softcap", h, cap=3.0)
        assert widened_names(widened(graph)) == ALL - {"mlp.down.wide"}

    def test_not_where_a_gradient_is_handed_on_by_an_op_that_makes_dense_rows(self):
        """The gradient that a layer is handed is a part of what its last product reads."""
        graph = concrete(models.model(), LoraSpec(8, 8.0))
        epilogue = graph.epilogue
        builder = Builder(graph, epilogue, epilogue.backward)
        epilogue.grad_out = (builder.op("softcap", epilogue.grad_out[0], cap=3.0),)
        assert widened_names(widened(graph)) == ALL - {"mlp.down.wide"}

    def test_evaluation_reads_the_same(self):
        trained = widened(concrete(models.model(), LoraSpec(8, 8.0)))
        graph = lora(loss_graph(models.model()), LoraSpec(8, 8.0), trainable=False)
        fuse_projections(graph, frozen_dtypes(graph))
        widened(precision(fuse(graph), RECIPES["fp32"]), only=widened_names(trained))
        assert widened_names(graph) == ALL
        for (name, ours, _), (other, theirs, _) in zip(
            graph.widened_instances(), trained.widened_instances(), strict=True
        ):
            assert (name, ours.shape) == (other, theirs.shape)
            assert [(s[0].name, *s[1:]) for s in ours.seconds] == [(s[0].name, *s[1:]) for s in theirs.seconds]


class TestLayout:
    def test_parameters_lie_where_they_did(self):
        types = TrainedTypes("bf16")
        plain, wide = (TrainableLayout.of(planned(models.model(), LoraSpec(8, 8.0), w), types) for w in (False, True))
        assert plain.parameters == wide.parameters and plain.joined == wide.joined and plain.size == wide.size

    @pytest.mark.parametrize("recipe", ["fp32", "bf16"])
    def test_a_weight_lies_in_one_storage_with_its_adapters(self, recipe):
        loaded, dtype = models.model(), dtype_of(recipe)
        graph = planned(loaded, LoraSpec(8, 16.0), True, recipe)
        program = models.program_of(graph, recipe, matrices=dtype)
        storages = {s.name: s.bytes for s in program.external()}
        assert not any(name.startswith("weight.layers") and name.endswith(".weight") and "norm" not in name
                       for name in storages)
        assert storages["weight.layers.1.attn.q_k_v.wide"] == (64 + 24) * (32 + 24) * (4 if recipe == "fp32" else 2)
        session = models.open_session(graph, program, loaded, 2.0, stored=frozen_dtypes(graph, dtype))
        whole, turned = (session.tensor(f"layers.1.attn.q_k_v.wide{half}") for half in ("", ".turned"))
        assert whole.shape == (64, 56) and turned.shape == (88, 32)
        for part, row, column in (("q", 0, 32), ("k", 32, 40), ("v", 48, 48)):
            second = session.tensor(f"master.layers.1.attn.{part}.lora_b")
            found = values(whole[row:row + len(second), column:column + 8], dtype)
            np.testing.assert_allclose(found, 2.0 * second, rtol=0 if recipe == "fp32" else 4e-3)
            rest = whole[row:row + len(second), 32:].copy()
            rest[:, column - 32:column - 24] = 0
            assert not rest.any()
        first = session.tensor("master.layers.1.attn.q_k_v.lora_a")
        np.testing.assert_allclose(values(turned[64:], dtype), first, rtol=0 if recipe == "fp32" else 4e-3)

    def test_copies_follow_the_update(self):
        loaded = models.model()
        graph = planned(loaded, LoraSpec(8, 16.0), True)
        program = models.program_of(graph)
        session = models.open_session(graph, program, loaded, 2.0)
        before = session.tensor("layers.0.mlp.down.wide").copy()
        for name, array in models.batch().items():
            session.tensor(name)[:] = array
        for entry in ("begin", "micro_step"):
            session.run(entry)
        session.tensor("hyper")[:] = (1e-2, 1, 0, 0)
        session.run("update")
        after = session.tensor("layers.0.mlp.down.wide")
        assert np.array_equal(after[:, :48], before[:, :48]) and np.abs(after - before)[:, 48:].min() > 0
        np.testing.assert_array_equal(after[:, 48:], 2.0 * session.tensor("master.layers.0.mlp.down.lora_b"))

    @pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.0])
    def test_activations_take_hardly_more_memory(self, share):
        """Eight layers of a small Llama's proportions: what is saved is the same, and what is not differs by less than the
        residual stream of one layer."""
        loaded = models.model(vocab_size=4096, hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
                              num_attention_heads=8, num_key_value_heads=2)
        bindings: Mapping[str, int] = {"T": 1024, "D": 9}
        whole, working = [], []
        for widen in (False, True):
            graph = concrete(loaded, LoraSpec(16, 32.0), "pure_bf16")
            if widen:
                widened(graph, "pure_bf16")
            whole.append(saved_bytes(graph, bindings))
            recompute(graph, int(share * whole[0]), bindings)
            dtypes = frozen_dtypes(graph, "bf16")
            program = emit(dead_code(graph), EmitOptions(bindings, "bf16", dtypes, optimizer=AdamW()))
            arena = next(a.bytes for a in program.arenas if a.name == "activations")
            working.append(arena - saved_bytes(graph, bindings))
        assert whole[0] == whole[1]
        assert working[1] <= working[0] + 2 * 1024 * 512


def values(array: np.ndarray, dtype: str) -> np.ndarray:
    return array if dtype == "f32" else (array.astype(np.uint32) << 16).view(np.float32)


def test_the_spec_sees_a_weight_without_room_for_its_adapters():
    graph = widened(concrete(models.model(), LoraSpec(8, 8.0)))
    region = graph.layer_regions()[0]
    whole = region.widened["mlp.down.wide"].whole
    whole.shape = (whole.shape[0] + 8, whole.shape[1])
    with pytest.raises(SpecError):
        check(graph)
