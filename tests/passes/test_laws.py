"""Pass laws: what a rewrite promises not to change, on small random models with the real engine."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core.passes import LoraSpec, autodiff, dead_code, fuse, lora, precision, recompute
from surogate_core.passes.precision import RECIPES
from surogate_core.passes.recompute import saved_bytes

from . import models
from .models import BINDINGS, assert_close, assert_same_bits, gradient_graph, loss_and_gradients, loss_graph

VARIANTS = {
    "untied": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "one key head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3},
}


@pytest.fixture(params=VARIANTS, scope="module")
def loaded(request):
    return models.model(**VARIANTS[request.param])


@pytest.fixture(scope="module")
def plain(loaded):
    graph = gradient_graph(loaded)
    return graph, loss_and_gradients(graph, loaded)


def test_something_is_learnt_everywhere(plain):
    loss, gradients = plain[1]
    assert np.isfinite(loss) and loss > 1
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, name


def test_dead_code_changes_no_bit(loaded, plain):
    assert_same_bits(plain[1], loss_and_gradients(dead_code(gradient_graph(loaded)), loaded))


def test_fuse_changes_no_more_than_rounding(loaded, plain):
    fused = gradient_graph(loaded, fuse)
    assert not any(n.op == "add" for r in fused.ordered_regions() for n in r.forward)
    assert sum(1 for r in fused.ordered_regions() for _ in r.nodes()) < sum(
        1 for r in plain[0].ordered_regions() for _ in r.nodes())
    assert_close(plain[1], loss_and_gradients(fused, loaded), 2e-6)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.0])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_recompute_changes_no_bit_and_frees_what_it_says(loaded, share, recipe):
    expected = loss_and_gradients(gradient_graph(loaded, fuse, recipe=recipe), loaded, recipe)
    graph = gradient_graph(loaded, fuse, recipe=recipe)
    before = saved_bytes(graph, BINDINGS)
    recompute(graph, int(share * before), BINDINGS)
    after = saved_bytes(graph, BINDINGS)
    assert after < before
    if share > 0.2:
        assert after <= share * before
    assert_same_bits(expected, loss_and_gradients(dead_code(graph), loaded, recipe))


def test_recompute_to_nothing_keeps_only_what_layers_hand_on():
    loaded = models.model(num_hidden_layers=4)
    graph = gradient_graph(loaded, fuse)
    recompute(graph, 0, BINDINGS)
    carried = 4 * BINDINGS["T"] * models.CONFIG["hidden_size"] * 4
    assert saved_bytes(graph, BINDINGS) <= 1.5 * carried


def test_a_budget_that_everything_fits_recomputes_nothing():
    graph = gradient_graph(models.model())
    before = saved_bytes(graph, BINDINGS)
    recompute(graph, before, BINDINGS)
    assert saved_bytes(graph, BINDINGS) == before
    assert graph.history[-1] == "recompute(0 nodes)"


def test_recompute_shrinks_the_activation_arena():
    loaded = models.model(num_hidden_layers=6)

    bindings = {"T": 240, "D": 4}

    def plan(budget: int) -> tuple[int, int]:
        graph = gradient_graph(loaded, fuse)
        recompute(graph, budget, bindings)
        program = models.program_of(dead_code(graph), bindings=bindings)
        return saved_bytes(graph, bindings), next(a.bytes for a in program.arenas if a.name == "activations")

    saved, whole = plan(1 << 40)
    for share in (0.7, 0.4, 0.2):
        less, smaller = plan(int(share * saved))
        assert less <= share * saved
        # One layer at a time has what it recomputes: of six layers, five are freed.
        assert whole - smaller > 0.8 * (saved - less)


@pytest.mark.parametrize("share", [0.95, 0.7, 0.45, 0.25])
def test_recompute_stops_as_soon_as_the_budget_is_met(share):
    """Layers of one kind part where only some of them have to give something up."""
    loaded = models.model(num_hidden_layers=8)
    expected = loss_and_gradients(gradient_graph(loaded, fuse), loaded)
    graph = gradient_graph(loaded, fuse)
    whole = saved_bytes(graph, BINDINGS)
    budget = int(share * whole)
    recompute(graph, budget, BINDINGS)
    largest_step = whole // 8  # of one layer
    assert budget - largest_step < saved_bytes(graph, BINDINGS) <= budget
    assert len(graph.layers) == 8 and list(graph.layers) == sorted(graph.layers, key=graph.layers.index)
    assert_same_bits(expected, loss_and_gradients(dead_code(graph), loaded))


def test_recompute_parts_the_layers_at_most_once():
    graph = gradient_graph(models.model(num_hidden_layers=8), fuse)
    recompute(graph, int(0.6 * saved_bytes(graph, BINDINGS)), BINDINGS)
    assert len(graph.layer_regions()) == 2
    assert graph.layers[0] != graph.layers[-1] == "full"  # the last layers keep more


def test_what_a_step_of_recompute_costs_depends_on_the_machine():
    """Bytes are dear to a core, whose products are slow; the choice is never worse at the prices that it was made for."""
    from surogate_core.passes.recompute import MACHINES, _Body, _hull, _ways

    graph = gradient_graph(models.model(hidden_size=256, intermediate_size=1024), fuse)
    bindings = {"T": 4096, "D": 4}
    chosen = {}
    for backend, machine in MACHINES.items():
        body = _Body(graph, graph.layer_regions()[0], bindings, machine)
        hull = _hull(_ways(body))
        assert [way.bytes for way in hull] == sorted((way.bytes for way in hull), reverse=True)
        assert all(a.cost <= b.cost for a, b in zip(hull, hull[1:]))
        chosen[backend] = [way.chosen for way in hull]
    assert chosen["cpu"] != chosen["cuda"]


def test_recompute_repeats_dropout_with_the_same_mask():
    loaded = models.model()

    def run(budget: int | None):
        graph = loss_graph(loaded)
        lora(graph, LoraSpec(4, 8.0, dropout=0.3))
        graph = precision(fuse(autodiff(graph)), RECIPES["fp32"])
        if budget is not None:
            recompute(graph, budget, BINDINGS)
            assert any(n.op == "dropout" for r in graph.layer_regions() for n in r.backward if ".again" in repr(n))
        return loss_and_gradients(dead_code(graph), loaded)

    assert_same_bits(run(None), run(0))


def test_dead_code_removes_what_nobody_reads():
    graph = loss_graph(models.model())
    kept = sum(len(r.forward) for r in graph.ordered_regions())
    region = graph.layer_regions()[0]
    from surogate_core.ir import Builder

    Builder(graph, region, region.forward).op("scale", region.carry_in[0], factor=2.0)
    dead_code(graph)
    assert sum(len(r.forward) for r in graph.ordered_regions()) == kept


def test_dead_code_drops_outputs_for_the_backward_pass_alone():
    """Evaluation makes no rstd."""
    graph = dead_code(precision(loss_graph(models.model()), RECIPES["fp32"]))
    norms = [n for r in graph.ordered_regions() for n in r.forward if n.op == "rms_norm"]
    assert norms and all(n.outputs[1] is None for n in norms)


class TestLora:
    def test_adapters_go_to_the_chosen_roles_alone_and_everything_else_freezes(self):
        graph = lora(loss_graph(models.model()), LoraSpec(4, 8.0, frozenset({"attn.q", "mlp.down"})))
        trained = {name for name, value, _ in graph.instances() if value.trainable}
        assert trained == {f"layers.{i}.{stem}.lora_{half}" for i in (0, 1) for stem in ("attn.q", "mlp.down")
                           for half in "ab"}

    def test_all_linear_layers_of_the_stack_without_roles(self):
        graph = lora(loss_graph(models.model()), LoraSpec(4, 8.0))
        roles = {name.rsplit(".", 1)[0].split(".", 2)[2] for name, v, _ in graph.instances() if v.trainable}
        assert roles == {"attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"}

    def test_an_unknown_role_is_named_beside_the_known_ones(self):
        with pytest.raises(ValueError, match=r"no linear layer has the role \['attn.qq'\].*attn\.q"):
            lora(loss_graph(models.model()), LoraSpec(4, 8.0, frozenset({"attn.q", "attn.qq"})))

    def test_b_of_zero_leaves_the_loss_as_it_was(self):
        loaded = models.model()
        graph = gradient_graph(loaded)
        adapted = precision(fuse(autodiff(lora(loss_graph(loaded), LoraSpec(4, 8.0)))), RECIPES["fp32"])
        program = models.program_of(adapted)
        session = models.open_session(adapted, program, loaded)
        for tensor in program.tensors:
            if tensor.name.startswith("master.") and tensor.name.endswith("lora_b"):
                session.tensor(tensor.name)[...] = 0
        for name, array in models.batch().items():
            session.tensor(name)[:] = array
        session.run("begin")
        session.run("micro_step")
        assert session.tensor("loss")[0] == pytest.approx(loss_and_gradients(graph, loaded)[0], rel=1e-6)

    def test_scale(self):
        assert LoraSpec(4, 8.0).scale == 2.0
        assert LoraSpec(4, 8.0, rank_stabilised=True).scale == 4.0

    def test_every_dropout_has_a_stream_of_its_own(self):
        graph = precision(lora(loss_graph(models.model(num_hidden_layers=3)), LoraSpec(4, 8.0, dropout=0.5)),
                          RECIPES["fp32"])
        streams = [dict(i.attrs)["stream_id"] for i in models.program_of(graph).instructions if i.op == "dropout"]
        assert len(streams) == 3 * 7 and len(set(streams)) == len(streams)

    def test_two_layers_of_one_role_do_not_share_a_stream(self):
        graph = loss_graph(models.model())
        for value in graph.layer_regions()[0].params.values():
            if value.role and value.role.startswith("mlp."):
                value.role = "mlp"
        lora(graph, LoraSpec(4, 8.0, dropout=0.5))
        streams = [int(n.attrs["stream_id"]) for n in graph.layer_regions()[0].forward if n.op == "dropout"]
        assert len(streams) == 7 and len(set(streams)) == 7


class TestAutodiff:
    def test_nothing_trainable(self):
        with pytest.raises(ValueError, match="no parameter is trainable"):
            autodiff(loss_graph(models.model(), trainable=False))

    def test_an_op_without_a_gradient_is_named(self, monkeypatch):
        from dataclasses import replace

        from surogate_core import ops

        real = ops.get
        monkeypatch.setattr(ops, "get", lambda name: replace(real(name), vjp=None) if name == "glu" else real(name))
        with pytest.raises(ValueError, match="op glu has no gradient rule"):
            autodiff(loss_graph(models.model()))

    def test_frozen_layers_below_what_learns_have_no_backward(self):
        """Only the head learns: nothing is carried back into the stack."""
        graph = loss_graph(models.model(), trainable=False)
        graph.epilogue.params["lm_head.weight"].trainable = True
        autodiff(graph)
        assert not graph.layer_regions()[0].backward and not graph.prologue.backward

    def test_only_what_learns_has_a_gradient(self):
        graph = loss_graph(models.model(), trainable=False)
        for value in graph.layer_regions()[0].params.values():
            value.trainable = value.role == "norm"
        autodiff(graph)
        assert {v.role for v in graph.grads} == {"norm"}

    def test_gradients_are_the_slope_of_the_loss(self):
        """Along a random direction of every parameter, by differences in fp32."""
        loaded = models.model()
        graph = gradient_graph(loaded)
        program = models.program_of(graph)
        session = models.open_session(graph, program, loaded)
        for name, array in models.batch().items():
            session.tensor(name)[:] = array

        def loss() -> float:
            session.run("begin")
            session.run("micro_step")
            return float(session.tensor("loss")[0])

        loss()
        gradient = session.tensor("gradients").copy()
        master = session.tensor("master")
        start = master.copy()
        width = 3e-3 / np.linalg.norm(gradient)
        values = []
        for sign in (1, -1):
            master[:] = start + np.float32(sign * width) * gradient
            values.append(loss())
        assert (values[0] - values[1]) / (2 * width) == pytest.approx(float(gradient @ gradient), rel=5e-3)


def test_bf16_casts_a_residual_value_once_a_list():
    graph = gradient_graph(models.model(), recipe="bf16")
    for region in graph.ordered_regions():
        for nodes in (region.forward, region.backward):
            cast = [n.inputs[0] for n in nodes if n.op == "cast"]
            assert len(cast) == len(set(cast))
        assert all(v.dtype not in ("compute", "residual") for n in region.nodes() for v in n.outputs if v is not None)


def test_threads_change_no_bit(loaded):
    graph = gradient_graph(loaded, fuse, recipe="bf16")
    one, two = (loss_and_gradients(graph, loaded, "bf16", threads=n) for n in (1, 2))
    assert_same_bits(one, two)


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_what_is_recomputed_is_the_same_whatever_the_addresses_of_values(share):
    """Values and nodes hash by address: no choice may follow the order of a set of them."""
    texts, held = set(), []
    for round_number in range(8):
        held.append([object() for _ in range(round_number * 37)])  # moves what is allocated next
        graph = gradient_graph(models.model())
        recompute(graph, int(share * saved_bytes(graph, models.BINDINGS)), models.BINDINGS)
        texts.add(models.program_of(graph).text())
    assert len(texts) == 1
