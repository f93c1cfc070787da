"""fuse_projections: products of one input as one product change nothing but how sums are rounded, and move no parameter."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import ops
from surogate_core.ir import Builder, GradientBuilder, Graph, Node
from surogate_core.passes import LoraSpec, autodiff, dead_code, fuse, fuse_projections, lora, precision, recompute
from surogate_core.passes.fuse_projections import _without_padding, joined_name
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program.emit import EmitOptions, Emitter
from surogate_core.program.trainable import TrainableLayout, TrainedTypes
from surogate_core.train.optimizers import AdamW

from . import models
from .models import BINDINGS, assert_close, assert_same_bits, loss_and_gradients, loss_graph

VARIANTS = {
    "plain": {},
    "biases, tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_size": 64,
                     "intermediate_size": 96},
    "one key head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3, "hidden_size": 128,
                                   "intermediate_size": 80},
}
ADAPTERS = {
    "everything trained": None,
    "lora": LoraSpec(4, 8.0),
    "lora of three roles": LoraSpec(8, 8.0, frozenset({"attn.q", "attn.v", "mlp.up"})),
    "lora with dropout": LoraSpec(4, 8.0, dropout=0.3),
}


def stored(graph: Graph) -> dict[str, str]:
    return {name: "f32" for name, value, _ in graph.instances() if not value.trainable}


def adapted(loaded, adapter: LoraSpec | None) -> Graph:
    graph = loss_graph(loaded)
    return graph if adapter is None else lora(graph, adapter)


def planned(loaded, adapter: LoraSpec | None, join: bool, recipe: str = "fp32", share: float | None = None) -> Graph:
    graph = adapted(loaded, adapter)
    if join:
        fuse_projections(graph, stored(graph))
    graph = precision(fuse(autodiff(graph)), RECIPES[recipe])
    if share is not None:
        recompute(graph, int(share * saved_bytes(graph, BINDINGS)), BINDINGS)
    return dead_code(graph)


def results(graph: Graph, loaded, recipe: str = "fp32"):
    """Weights so small that softmax stays well conditioned: adapters multiply."""
    return loss_and_gradients(graph, loaded, recipe, scale=2.0)


def linears(graph: Graph, op: str = "linear") -> list[Node]:
    return [n for n in graph.layer_regions()[0].nodes() if n.op == op]


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
class TestLaws:
    def test_loss_and_gradients_stay(self, variant, adapter):
        loaded = models.model(**variant)
        before = results(planned(loaded, adapter, False), loaded)
        graph = planned(loaded, adapter, True)
        assert any(n.op == "slice" for n in graph.layer_regions()[0].forward)
        assert_close(before, results(graph, loaded), 5e-6)

    def test_in_bf16_they_are_as_near_to_fp32_as_before(self, variant, adapter):
        loaded = models.model(**variant)
        exact = results(planned(loaded, adapter, False), loaded)
        errors = []
        for join in (False, True):
            found = results(planned(loaded, adapter, join, "bf16"), loaded, "bf16")
            off = np.concatenate([(g - found[1][name]).ravel() for name, g in exact[1].items()])
            errors.append(np.linalg.norm(off) / np.linalg.norm(np.concatenate([g.ravel() for g in exact[1].values()])))
        assert errors[1] < 1.1 * errors[0]

    def test_recompute_changes_no_bit(self, variant, adapter):
        loaded = models.model(**variant)
        whole = results(planned(loaded, adapter, True, "bf16"), loaded, "bf16")
        for share in (0.8, 0.5, 0.0):
            graph = planned(loaded, adapter, True, "bf16", share)
            assert_same_bits(whole, results(graph, loaded, "bf16"))


class TestWhatIsJoined:
    def test_all_that_reads_one_input(self):
        graph = planned(models.model(), None, True)
        assert len(linears(graph)) == len(linears(graph, "linear_input_grad")) == 4
        assert len(linears(graph, "linear_weight_grad")) == 4
        assert "fuse_projections(2 products)" in graph.history

    def test_adapters_too(self):
        graph = planned(models.model(), LoraSpec(4, 8.0), True)
        # Four products of frozen weights, four first halves of adapters, and a second half for each of seven layers.
        assert len(linears(graph)) == 4 + 4 + 7
        assert len(linears(graph, "linear_weight_grad")) == 4 + 7
        assert "fuse_projections(4 products)" in graph.history

    def test_dropped_inputs_differ(self):
        graph = planned(models.model(), LoraSpec(4, 8.0, dropout=0.5), True)
        assert len(linears(graph)) == 4 + 7 + 7

    def test_not_what_is_stored_otherwise_in_some_layer(self):
        graph = adapted(models.model(), LoraSpec(4, 8.0))
        dtypes = stored(graph)
        dtypes["layers.1.attn.v.weight"] = "bf16"
        fuse_projections(graph, dtypes)
        assert set(graph.layer_regions()[0].joined) == {
            "attn.q_k.weight", "attn.q_k_v.lora_a", "mlp.gate_up.weight", "mlp.gate_up.lora_a"}

    def test_not_what_padding_would_part(self):
        """Adapters of 3 x 24 elements do not fill whole 64 bytes."""
        graph = adapted(models.model(hidden_size=24, num_attention_heads=3, num_key_value_heads=1), LoraSpec(3, 8.0))
        fuse_projections(graph, stored(graph))
        assert set(graph.layer_regions()[0].joined) == {"attn.q_k_v.weight", "mlp.gate_up.weight"}

    def test_one_that_does_not_fill_its_place_goes_last(self):
        """Of vectors with 24, 16 and 8 elements none fills 64 bytes; of matrices all do, and biases decide."""
        graph = adapted(models.model(hidden_size=96, num_attention_heads=3, num_key_value_heads=1), None)
        region = graph.layer_regions()[0]
        names = ["attn.q.weight", "attn.k.weight", "attn.v.weight"]
        linear = {n.inputs[1].name: n for n in region.forward if n.op == "linear"}
        for name, rows in zip(names, (96, 24, 32), strict=True):
            bias = graph.param(region, name.replace("weight", "bias"), (rows,), "bias")
            bias.trainable = True
            node = linear[name]
            node.inputs[1].shape = (rows, 96)
            node.inputs = (*node.inputs[:2], bias, None)
        members = _without_padding([linear[name] for name in names])
        assert [m.inputs[1].name for m in members] == ["attn.q.weight", "attn.v.weight", "attn.k.weight"]

    def test_not_what_is_read_by_an_op_that_wants_dense_rows(self):
        graph = adapted(models.model(), None)
        region = graph.layer_regions()[0]
        gate = next(n for n in region.forward if n.op == "linear" and n.inputs[1].role == "mlp.gate").outputs[0]
        glu = next(n for n in region.forward if n.op == "glu")
        nodes = []
        capped = Builder(graph, region, nodes).op("softcap", gate, cap=3.0)
        region.forward.insert(region.forward.index(glu), nodes[0])
        glu.inputs = (capped, glu.inputs[1])
        fuse_projections(graph, {})
        assert set(region.joined) == {"attn.q_k_v.weight"}

    def test_names(self):
        assert joined_name(["attn.q.weight", "attn.k.weight"]) == "attn.q_k.weight"
        assert joined_name(["a.q.bias", "b.k.bias"]) == "a_b.q_k.bias"
        assert joined_name(["q", "mlp.up"]) == "q_mlp.up"


class TestLayout:
    def test_parts_are_neighbours_and_keep_their_names(self):
        loaded = models.model(num_hidden_layers=3)
        types = TrainedTypes("bf16")
        plain, joined = (TrainableLayout.of(planned(loaded, LoraSpec(4, 8.0), j), types) for j in (False, True))
        assert plain.parameters.keys() == joined.parameters.keys()
        assert plain.size == joined.size and plain.groups == joined.groups and not plain.joined
        for name, whole in joined.joined.items():
            offset = whole.offset
            stem, parts, half = name.rsplit(".", 2)
            for part in parts.split("_"):
                parameter = joined.parameters[f"{stem}.{part}.{half}"]
                assert parameter.offset == offset
                offset += parameter.size
            assert offset == whole.offset + whole.size
        assert len(joined.joined) == 3 * 2

    def test_frozen_parts_of_different_formats_are_refused(self):
        graph = planned(models.model(), LoraSpec(4, 8.0), True)
        dtypes = {**stored(graph), "layers.0.attn.k.weight": "q8_0"}
        with pytest.raises(ValueError, match="attn.q_k_v.weight is .* read as one, but they are stored as f32, q8_0"):
            Emitter(graph, EmitOptions(BINDINGS, "f32", dtypes, optimizer=AdamW())).run()

    @pytest.mark.parametrize("adapter", [None, LoraSpec(16, 32.0)], ids=["full", "lora"])
    @pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.0])
    def test_activations_take_no_more_memory(self, adapter, share):
        """Eight layers of a small Llama's proportions: what is saved is the same, and what is not differs by less than the
        residual stream of one layer."""
        loaded = models.model(vocab_size=4096, hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
                              num_attention_heads=8, num_key_value_heads=2)
        bindings = {"T": 1024, "D": 9}
        whole, working = [], []
        for join in (False, True):
            graph = adapted(loaded, adapter)
            if join:
                fuse_projections(graph, stored(graph))
            graph = precision(fuse(autodiff(graph)), RECIPES["bf16"])
            whole.append(saved_bytes(graph, bindings))
            recompute(graph, int(share * whole[0]), bindings)
            dtypes = {name: "bf16" for name, value, _ in graph.instances() if not value.trainable}
            emitter = Emitter(dead_code(graph), EmitOptions(bindings, "bf16", dtypes, optimizer=AdamW()))
            arena = next(a.bytes for a in emitter.run().arenas if a.name == "activations")
            working.append(arena - saved_bytes(graph, bindings))
        assert whole[0] == whole[1]
        assert working[1] <= working[0] + 4 * 1024 * 512


def test_a_product_without_gradient_for_some_columns_is_refused():
    graph = adapted(models.model(), None)
    fuse_projections(graph, {})
    region = graph.layer_regions()[0]
    cut = next(n for n in region.forward if n.op == "slice")
    cut.outputs[0].shape = (*cut.outputs[0].shape[:1], 16)
    cut.attrs["stop"] = 16
    with pytest.raises(ValueError, match="are not all of its columns, each once"):
        from surogate_core.passes.autodiff import _differentiate, _needs

        seeds = {region.carry_out[0]: [graph.value("d", region.carry_out[0].shape, "residual")]}
        _differentiate(graph, region, _needs(region, set(region.carry_in)), seeds)


@pytest.mark.parametrize("name", [name for name, op in ops.ALL.items() if op.rows_apart and op.vjp])
def test_an_op_that_reads_rows_apart_has_gradients_whose_rows_may_lie_apart(name):
    record = ops.get(name)
    operands = {o.name for o in (*record.inputs, *record.outputs)}
    assert operands >= set(record.rows_apart)
    sample = record.samples(np.random.default_rng(0))[0]
    graph = Graph()
    inputs = []
    for operand in record.inputs:
        array = sample.inputs.get(operand.name)
        kind = "i32" if array is not None and np.issubdtype(array.dtype, np.integer) else "f32"
        place = "param" if operand.name in ("weight", "bias") else "activation"
        inputs.append(None if array is None else graph.value(operand.name, array.shape, kind, place))
    attrs = record.complete_attrs(sample.attrs)
    types = record.infer([None if v is None else v.type for v in inputs], attrs)
    outputs = tuple(graph.value(o.name, t.shape, t.dtype) for o, t in zip(record.outputs, types))
    node = Node(name, tuple(inputs), outputs, attrs)
    builder = GradientBuilder(graph, graph.prologue, {v for v in inputs if v is not None})
    dy = graph.value("dy", outputs[0].shape, outputs[0].dtype)
    gradients = record.vjp(builder, node, [dy, *(None,) * (len(outputs) - 1)])
    for operand, gradient in zip(record.inputs, gradients):
        if operand.name not in record.rows_apart or gradient is None or gradient is dy:
            continue
        maker = next(n for n in graph.prologue.backward if gradient in n.outputs)
        made = ops.get(maker.op)
        assert made.outputs[maker.outputs.index(gradient)].name in made.rows_apart
