"""A whole training program on two streams of the fake device, whose kernels are the CPU's: the bits of the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError, Memory, Session
from surogate_core.model.programs import evaluation_bytes, loss_program, training_program
from surogate_core.passes import LoraSpec
from surogate_core.passes.precision import RECIPES
from surogate_core.program import Program
from surogate_core.train.optimizers import AdamW

from ..passes import models
from ..passes.models import BINDINGS, MAX_POSITIONS, assert_same_bits, batch
from ..passes.quantised import model, outcome, planned, program_of, stored


def on_device(program: Program, host: Session, graphs: bool = True) -> Session:
    """A session on the fake device that holds what ``host`` holds: weights, masters, constants and the batch."""
    session = Session(program.to_bytes(), backend="fake", graphs=graphs)
    for storage in program.external():
        name = next(t.name for t in program.tensors if t.storage == storage.name)
        values = np.ascontiguousarray(host.tensor(name))
        memory = Memory("fake", values.nbytes)
        memory.write(values)
        session.bind(storage.name, memory)
    arenas = {s.name: s for s in program.storages if s.arena is not None and s.arena != "activations"}
    for tensor in program.tensors:
        if tensor.name in arenas:
            session.write(tensor.name, host.read(tensor.name))
    return session


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("join, share", [(False, None), (True, None), (True, 0.5), (True, 0.0)])
def test_same_bits_as_the_cpu(device, join, share, graphs):
    loaded = model()
    graph = planned(loaded, join, share=share)
    in_place, ahead = program_of(graph, None), program_of(graph, 1)
    host = models.open_session(graph, in_place, loaded, 2.0, stored=stored(graph))
    for name, array in batch().items():
        host.write(name, array)
    session = on_device(ahead, host, graphs)
    expected = outcome(host, in_place)
    launched = device.graph_launches
    for _ in range(3):
        assert_same_bits(expected, outcome(session, ahead))
    assert device.graph_launches - launched == (4 if graphs else 0)  # begin and micro_step, twice each
    for each in (host, session):
        each.write("hyper", np.array([1e-2, 1, 0, 0], np.float32))
        each.run("update")
    after = outcome(host, in_place)
    assert after[0] != expected[0]
    assert_same_bits(after, outcome(session, ahead))


def test_no_wait_is_one_too_many(device):
    program = program_of(planned(model(), join=True), 1)
    waiting = [i for i, instruction in enumerate(program.instructions) if instruction.waits]
    assert len(waiting) > 20
    engine.plan(program.to_bytes(), "fake")
    for i in waiting:
        instructions = list(program.instructions)
        instructions[i] = replace(instructions[i], waits=())
        with pytest.raises(EngineError, match=rf"instruction \d+ .*nothing makes it follow instruction \d+ "):
            engine.plan(replace(program, instructions=instructions).to_bytes(), "fake")


class Stored:
    """What is asked of `FrozenWeights` while programs are planned."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def dtypes(self, graph) -> dict[str, str]:
        return stored(graph)

    def dtype(self, name: str, shape: tuple[int, ...]) -> str:
        return self.dtypes_of_all[name]


@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_programs_of_a_model(device, backend):
    """Training and evaluation decode ahead on devices, and what evaluation takes is told beforehand."""
    weights, adapter = Stored(backend), LoraSpec(4, 8.0)
    plan = training_program(
        model(), RECIPES["bf16"], weights, BINDINGS, max_positions=MAX_POSITIONS, adapter=adapter, optimizer=AdamW(),
        memory_budget=None, backend=backend, join_projections=True,
    )
    graph, evaluation = loss_program(model(), RECIPES["bf16"], weights, BINDINGS, max_positions=MAX_POSITIONS,
                                     adapter=adapter, join_projections=True)
    for program in (plan.program, evaluation):
        streams = {i.stream for i in program.instructions if i.op == "dequantize"}
        assert streams == ({1} if backend == "fake" else set())
    weights.dtypes_of_all = stored(graph)
    planned_bytes = engine.plan(evaluation.to_bytes(), backend)
    told = evaluation_bytes(model(), RECIPES["bf16"], weights, BINDINGS, max_positions=MAX_POSITIONS, adapter=adapter,
                            backend=backend, join_projections=True)
    assert sum(planned_bytes["arenas"].values()) + planned_bytes["workspace"] == told
