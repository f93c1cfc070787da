"""prefetch: products of quantised weights read copies made ahead of them, and no bit changes."""

from __future__ import annotations

from collections import Counter

import pytest

from surogate_core.engine import Session
from surogate_core.program import Program

from . import models
from .models import assert_same_bits, batch
from .quantised import model, outcome, planned, program_of, stored


def run(graph, program: Program, loaded):
    session: Session = models.open_session(graph, program, loaded, 2.0, stored=stored(graph))
    for name, array in batch().items():
        session.write(name, array)
    return outcome(session, program)


def micro_step(program: Program):
    entry = next(e for e in program.entries if e.name == "micro_step")
    return list(enumerate(program.instructions))[entry.first:entry.first + entry.count]


PRODUCTS = ("linear", "linear_input_grad")
PLANS = [(recipe, join, share) for recipe in ("bf16", "fp32") for join in (False, True) for share in (None, 0.5, 0.0)]


@pytest.mark.parametrize("recipe, join, share", PLANS)
def test_no_bit_changes(recipe, join, share):
    loaded = model()
    graph = planned(loaded, join, recipe, share)
    in_place, ahead = program_of(graph, None, recipe), program_of(graph, 0, recipe)
    assert "dequantize" not in {i.op for i in in_place.instructions}
    assert all(i.stream == 0 and not i.waits for i in ahead.instructions)
    assert_same_bits(run(graph, in_place, loaded), run(graph, ahead, loaded))


@pytest.mark.parametrize("recipe, join, share", PLANS)
def test_products_read_plain_weights(recipe, join, share):
    graph = planned(model(), join, recipe, share)
    program = program_of(graph, 1, recipe)
    compute = {"bf16": "bf16", "fp32": "f32"}[recipe]
    made = {}
    for _, instruction in micro_step(program):
        if instruction.op == "dequantize":
            copy = program.tensor(instruction.outputs[0])
            assert copy.dtype == compute and program.tensor(instruction.inputs[0]).dtype in ("q8_0", "q4_1", "q4_0")
            made[instruction.outputs[0]] = instruction.inputs[0]
        elif instruction.op in PRODUCTS:
            weight = program.tensor(instruction.inputs[1])
            assert weight.dtype in (compute, "f32")
            part = instruction.inputs[1]
            assert part in made or weight.storage.startswith(("weight.", "trained", "master"))
    assert "layers.1.mlp.down.weight" not in made.values()  # it is plain
    assert len(made) > 3 * (4 if join else 7)


def test_joined_parts_are_decoded_at_once():
    program = program_of(planned(model(), join=True), 1)
    decoded = Counter(i.inputs[0] for _, i in micro_step(program) if i.op == "dequantize")
    assert set(decoded) == {
        f"layers.{i}.{name}.weight" for i in range(3) for name in ("attn.q_k_v", "attn.o", "mlp.gate_up", "mlp.down")
    } - {"layers.1.mlp.down.weight"}


def test_products_that_follow_one_another_share_a_copy():
    """Where everything is recomputed, a layer's backward pass reads what it has just read forwards."""
    for share, shared in ((None, 0), (0.0, 4)):
        steps = micro_step(program_of(planned(model(), join=True, share=share), 1))
        products = sum(i.op in PRODUCTS and ".decoded." in i.inputs[1] for _, i in steps)
        assert sum(i.op == "dequantize" for _, i in steps) == products - shared


def test_no_copy_is_held_while_the_head_runs():
    for share in (None, 0.0):
        steps = micro_step(program_of(planned(model(), join=True, share=share), 1))
        head = next(i for i, step in steps if step.op == "linear_cross_entropy_grad")
        made = {step.outputs[0]: i for i, step in steps if step.op == "dequantize"}
        last_read = {name: i for i, step in steps for name in step.inputs if name in made}
        assert not [name for name in made if made[name] <= head <= last_read[name]]


@pytest.mark.parametrize("join", [False, True])
def test_each_is_made_while_the_product_before_runs(join):
    program = program_of(planned(model(), join), 1)
    steps = micro_step(program)
    products = [i for i, step in steps if step.op in PRODUCTS and ".decoded." in step.inputs[1]]
    head = next(i for i, step in steps if step.op == "linear_cross_entropy_grad")
    first_reader = {}
    for i in products:
        first_reader.setdefault(program.instructions[i].inputs[1], i)
    for i, step in steps:
        if step.op != "dequantize":
            continue
        reader = first_reader[step.outputs[0]]
        before = max((p for p in products if p < reader), default=None)
        if before is not None and not before < head < reader:
            assert i < before
        assert i < reader
        assert step.stream == 1 and program.instructions[reader].stream == 0
        assert i in program.instructions[reader].waits
        # All that it may wait for is over when the product before begins.
        assert all(waited < i for waited in step.waits)


def test_two_copies_at_a_time():
    """Next to what the program holds anyway; alignment aside."""
    graph = planned(model(), join=True)
    arenas = [{a.name: a.bytes for a in program_of(graph, stream).arenas} for stream in (None, 1)]
    sizes = sorted(2 * rows * columns for rows, columns in ((128, 64), (64, 64), (192, 64), (64, 96)))
    assert 0 < arenas[1]["activations"] - arenas[0]["activations"] <= sizes[-1] + sizes[-2]


def test_the_same_program_twice():
    graph = planned(model(), join=True)
    assert program_of(graph, 1) == program_of(graph, 1)
