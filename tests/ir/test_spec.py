"""The executable specification: it accepts what is traced, and refuses each kind of broken graph by its reason."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.ir import Builder, Graph, Node, SpecError, check
from surogate_core.ir.graph import ACTIVATION, GRAD
from surogate_core.passes import autodiff, dead_code, fuse, fuse_projections, precision
from surogate_core.passes.precision import RECIPES

from ..passes import models


@pytest.fixture
def graph() -> Graph:
    return autodiff(models.loss_graph(models.model()))


def body(graph: Graph):
    return graph.layer_regions()[0]


def index_of(region, op: str) -> int:
    return next(i for i, n in enumerate(region.forward) if n.op == op)


def refused(graph: Graph, reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        check(graph)
    assert "after pass autodiff" in str(caught.value)


def test_what_is_traced_and_differentiated_is_accepted(graph):
    assert check(graph) is graph


def test_a_node_before_what_it_reads(graph):
    nodes = body(graph).forward
    nodes[0], nodes[1] = nodes[1], nodes[0]
    refused(graph, "region full.*is used before it is made")


def test_backward_nodes_out_of_order(graph):
    body(graph).backward.reverse()
    refused(graph, "is used before it is made")


def test_a_value_made_twice(graph):
    region = body(graph)
    region.forward.insert(1, region.forward[0])
    refused(graph, "is defined twice")


def test_a_view_that_makes_a_value_again(graph):
    region = body(graph)
    at = index_of(region, "view")
    region.forward.insert(at, region.forward[at])
    refused(graph, "is defined twice")


def test_an_unknown_op(graph):
    body(graph).forward[0].op = "rms_nrom"
    refused(graph, "rms_nrom")


def test_an_operand_that_is_not_there(graph):
    node = body(graph).forward[0]
    node.inputs = node.inputs[:1]
    refused(graph, "wrong number of operands")


def test_a_required_output_that_is_absent(graph):
    region = body(graph)
    node = region.forward[index_of(region, "linear")]
    node.outputs = (None,)
    refused(graph, "output y is absent|is used before it is made")


def test_attributes_that_are_missing_or_unknown(graph):
    node = body(graph).forward[0]
    whole = dict(node.attrs)
    del node.attrs["unit_offset"]
    refused(graph, "attributes are not complete")
    node.attrs = {**whole, "epsilon": 1.0}
    refused(graph, "has no attribute 'epsilon'")


def test_shapes_that_the_op_does_not_take(graph):
    region = body(graph)
    node = region.forward[index_of(region, "linear")]
    weight = next(v for v in region.params.values() if v.role == "mlp.down")
    node.inputs = (node.inputs[0], weight, *node.inputs[2:])
    refused(graph, "region full, .*linear")


def test_an_output_of_another_type_than_the_op_makes(graph):
    region = body(graph)
    region.forward[index_of(region, "linear")].outputs[0].dtype = "f32"
    refused(graph, "the op makes")


def test_a_parameter_of_another_region(graph):
    region = body(graph)
    node = region.forward[0]
    node.inputs = (node.inputs[0], graph.epilogue.params["final_norm.weight"])
    refused(graph, "is not a parameter of this region")


def test_writing_into_something_that_is_no_storage(graph):
    region = body(graph)
    node = next(n for n in region.backward if n.op == "linear_weight_grad")
    node.outputs = (graph.value("loose", node.outputs[0].shape, "f32", ACTIVATION),)
    refused(graph, "read-write output dweight is activation, not storage")


def test_a_fresh_result_in_a_gradient(graph):
    region = body(graph)
    node = region.forward[index_of(region, "glu")]
    node.outputs = (graph.value("g", node.outputs[0].shape, node.outputs[0].dtype, GRAD),)
    refused(graph, "is defined twice|is used before it is made")


def test_a_view_that_changes_the_number_of_elements(graph):
    region = body(graph)
    region.forward[index_of(region, "view")].outputs[0].shape = ("T", 4, 9)
    refused(graph, "a view keeps elements and dtype")


def test_a_region_that_hands_on_what_it_never_makes(graph):
    region = body(graph)
    region.carry_out = (graph.value("nothing", region.carry_out[0].shape, region.carry_out[0].dtype),)
    refused(graph, "hands on .* which it never makes")


def test_layers_that_do_not_fit_each_other(graph):
    graph.epilogue.carry_in[0].shape = ("T", 31)
    with pytest.raises(SpecError):
        check(graph)


def test_a_layer_of_an_unknown_region(graph):
    graph.layers = ("full", "fuel")
    refused(graph, "layer 1 is of region 'fuel', which does not exist")


def test_a_gradient_of_another_shape_than_its_parameter(graph):
    next(iter(graph.grads.values())).shape = (3, 3)
    with pytest.raises(SpecError):
        check(graph)


def test_a_carried_gradient_that_fits_nothing(graph):
    region = body(graph)
    region.grad_out = (graph.value("d", (1,), "f32"),)
    refused(graph, "is not a gradient of")


def test_an_output_that_nothing_makes(graph):
    graph.outputs["extra"] = graph.value("extra", (1,), "f32")
    refused(graph, "output 'extra' .* is not made in the epilogue")


class TestBuilder:
    @pytest.fixture
    def b(self):
        graph = Graph()
        return Builder(graph, graph.prologue, graph.prologue.forward)

    def test_too_many_inputs(self, b):
        x = b.graph.input("x", ("T", 4), "f32")
        with pytest.raises(ValueError, match="op cast takes 1 inputs, got 2"):
            b.op("cast", x, x)

    def test_a_missing_input(self, b):
        with pytest.raises(ValueError, match="op add needs its input 'b'"):
            b.op("add", b.graph.input("x", ("T", 4), "f32"))

    def test_a_read_write_output_without_storage(self, b):
        with pytest.raises(ValueError, match="name it in inout"):
            b.op("accumulate", b.graph.input("x", ("T", 4), "f32"))

    def test_an_output_that_may_not_be_absent(self, b):
        with pytest.raises(ValueError, match="output 'y' is not optional"):
            b.op("scale", b.graph.input("x", ("T", 4), "f32"), factor=2.0, absent=("y",))

    def test_an_input_asked_for_as_something_else(self, b):
        b.graph.input("x", ("T", 4), "f32")
        with pytest.raises(ValueError, match="input 'x' is"):
            b.graph.input("x", ("T",), "i32")

    def test_two_parameters_of_one_name(self, b):
        b.graph.param(b.region, "w", (4,), "norm")
        with pytest.raises(ValueError, match="two parameters named 'w'"):
            b.graph.param(b.region, "w", (4,), "norm")


@st.composite
def elementwise_graphs(draw):
    """A graph of one region: a trainable vector through a random net of sums, scalings and gates, to a loss."""
    graph = Graph()
    region = graph.epilogue
    b = Builder(graph, region, region.forward)
    width = draw(st.sampled_from([4, 16]))
    weight = graph.param(region, "w", (96, width), "embed")
    weight.trainable = True
    tokens = graph.input("tokens", ("T",), "i32")
    values = [b.op("embedding", tokens, weight, out_dtype="residual")]
    for kind in draw(st.lists(st.sampled_from(["add", "scale", "glu", "softcap"]), max_size=10)):
        pick = st.sampled_from(values)
        if kind == "add":
            values.append(b.op("add", draw(pick), draw(pick), out_dtype="residual"))
        elif kind == "glu":
            values.append(b.op("glu", draw(pick), draw(pick), activation="silu"))
        elif kind == "scale":
            values.append(b.op("scale", draw(pick), factor=draw(st.sampled_from([-0.5, 0.25, 1.5]))))
        else:
            values.append(b.op("softcap", draw(pick), cap=2.0))
    head = graph.param(region, "head", (96, width), "lm_head")
    token_loss = b.op("linear_cross_entropy", values[-1], head, graph.input("targets", ("T",), "i32"))
    loss = graph.value("loss", (1,), "f32", "state")
    region.states["loss"] = loss
    b.op("token_sum", token_loss, graph.input("token_weights", ("T",), "f32"), inout={"loss": loss})
    graph.outputs = {"loss": loss}
    return graph


def run(graph: Graph) -> tuple[float, np.ndarray]:
    from surogate_core.engine import Session

    program = models.program_of(graph)
    session = Session(program.to_bytes(), threads=1)
    names = {t.name for t in program.tensors}
    generator = np.random.default_rng(3)
    width = next(iter(graph.epilogue.params.values())).shape[1]
    session.tensor("master.w")[...] = generator.standard_normal((96, width), np.float32)
    session.bind("weight.head", generator.standard_normal((96, width), np.float32))
    for name, array in models.batch().items():
        if name in names:
            session.tensor(name)[:] = array
    for name, (_, array) in graph.constants.items():
        if name in names:
            session.tensor(name)[...] = array
    session.run("begin")
    session.run("micro_step")
    return float(session.tensor("loss")[0]), session.tensor("gradients").copy()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_passes_hold_their_laws_on_random_graphs(data):
    """fuse to rounding, dead_code to the bit, on nets with shared, unused and repeated operands."""
    first = data.draw(elementwise_graphs())
    replayed = copy.deepcopy(first)
    fused = copy.deepcopy(first)
    plain = run(precision(autodiff(first), RECIPES["fp32"]))
    clean = run(dead_code(precision(autodiff(replayed), RECIPES["fp32"])))
    assert plain[0] == clean[0] and np.array_equal(plain[1], clean[1])
    after = run(dead_code(precision(fuse(autodiff(fused)), RECIPES["fp32"])))
    assert after[0] == pytest.approx(plain[0], rel=1e-5)
    assert np.linalg.norm(after[1] - plain[1]) <= 1e-5 * np.linalg.norm(plain[1]) + 1e-8


def test_a_node_prints_itself():
    graph = Graph()
    x, y = graph.value("x", ("T", 4), "f32"), graph.value("y", ("T", 4), "bf16")
    assert repr(Node("cast", (x, None), (y,))) == "%1:y<bf16[T,4]> = cast(%0, -)"


def test_instances_name_layers_and_shared_weights_once():
    names = [name for name, _, _ in models.loss_graph(models.model(tie_word_embeddings=True)).instances()]
    assert len(names) == len(set(names)) == 2 + 2 * 9
    assert names[0] == "embed.weight" and "layers.1.mlp.down.weight" in names


class TestPlacements:
    """Slices, joins and joined parameters."""

    @pytest.fixture
    def fused(self) -> Graph:
        graph = models.loss_graph(models.model())
        fuse_projections(graph, {})
        return autodiff(graph)

    @staticmethod
    def first(graph: Graph, op: str) -> Node:
        return next(n for n in body(graph).nodes() if n.op == op)

    def test_what_the_pass_makes_is_accepted(self, fused):
        assert check(fused) is fused

    def test_columns_that_are_not_there(self, fused):
        self.first(fused, "slice").attrs["stop"] = 1000
        refused(fused, "there are no columns 0 to 1000")

    def test_a_slice_of_another_width(self, fused):
        self.first(fused, "slice").outputs[0].shape = ("T", 31)
        refused(fused, "there are no columns")

    def test_a_slice_of_another_dtype(self, fused):
        self.first(fused, "slice").outputs[0].dtype = "f32"
        refused(fused, "a slice keeps the dtype")

    def test_a_join_of_one_value_twice(self, fused):
        node = self.first(fused, "join")
        node.inputs = (node.inputs[0],) * 2
        refused(fused, "a join has the columns of its inputs, each once")

    def test_a_value_in_two_joins(self, fused):
        region = body(fused)
        node = next(n for n in region.backward if n.op == "join")
        Builder(fused, region, region.backward).join(node.inputs, "again")
        refused(fused, "a value is joined twice")

    def test_a_slice_for_an_op_that_wants_dense_rows(self, fused):
        region = body(fused)
        at = next(i for i, n in enumerate(region.forward) if n.op == "glu")
        nodes = []
        Builder(fused, region, nodes).op("softcap", region.forward[at].inputs[0], cap=1.0)
        region.forward[at:at] = nodes
        refused(fused, "rows of x lie apart, which softcap does not take")

    def test_a_joined_parameter_of_other_rows(self, fused):
        next(iter(body(fused).joined.values())).shape = (7, 32)
        with pytest.raises(SpecError):
            check(fused)

    def test_parameters_that_differ_are_not_joined(self):
        graph = models.loss_graph(models.model())
        region = body(graph)
        params = [region.params["attn.q.weight"], region.params["mlp.down.weight"]]
        with pytest.raises(ValueError, match="they differ in more than their number of rows"):
            graph.join_params(region, "both", params)
        with pytest.raises(ValueError, match="two parameters named 'attn.q.weight'"):
            graph.join_params(region, "attn.q.weight", params)
