from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError, Session

from .programs import FIXED, INPUT, PERSISTENT, Draft, adding


def one(op: str, attrs: dict | None = None, outputs: int = 1) -> bytes:
    """A program of one instruction that writes `outputs` vectors of four."""
    draft = Draft()
    arena = draft.arena("main", 16 * outputs)
    tensors = [draft.tensor(f"y{i}", draft.storage(f"y{i}", arena, 16 * i, 16), [4]) for i in range(outputs)]
    draft.instruction(op, [], tensors, attrs)
    draft.entry("step")
    return draft.to_bytes()


def test_runs_a_program(fake):
    session = Session(adding().to_bytes(), threads=2)
    weight = np.arange(8, dtype=np.float32)
    session.bind("weight", weight)
    session.tensor("x")[:] = 100
    session.run("step")
    np.testing.assert_array_equal(session.tensor("y"), 200 + weight)
    weight += 1  # shared, not copied
    session.run("step")
    np.testing.assert_array_equal(session.tensor("y"), 200 + weight)


def test_kernels_are_told_which_operands_are_fixed(fake):
    draft = Draft()
    arena = draft.arena("main", 64)
    y = draft.tensor("y", draft.storage("y", arena, 0, 16), [4])
    x = draft.tensor("x", draft.storage("x", arena, 16, 16, PERSISTENT), [4])
    weight = draft.storage("weight", -1, 0, 32, FIXED)
    half = draft.tensor("half", weight, [4], offset=16)
    draft.instruction("fake_flags", [draft.tensor("weight", weight, [8]), x, half, -1], [y])
    draft.entry("step")
    session = Session(draft.to_bytes(), threads=1)
    session.bind("weight", np.zeros(8, np.float32))
    session.run("step")
    assert session.tensor("y").tolist() == [1.0, 0.0, 1.0, 0.0]


def test_what_it_says_about_itself(fake):
    session = Session(adding().to_bytes(), threads=2)
    first, second = session.explain()
    assert (first["op"], first["kernel"], first["library"], first["score"]) == ("fake_add", "plain", "fake", 10)
    assert first["candidates"] == [("plain", "fake", 10), ("low", "fake", 1)] and first["requested"] is None
    assert (second["kernel"], second["requested"], second["score"]) == ("low", "low", 1)
    assert second["inputs"] == ["total", "x"] and second["outputs"] == ["y"]
    assert session.memory() == {"arenas": {"main": 96}, "workspace": 0, "external": {"weight": 32}}
    assert session.entries() == {"step": range(0, 2)}
    session.bind("weight", np.zeros(8, np.float32))
    profile = session.profile("step")
    assert [row[:2] for row in profile] == [("fake_add", "plain"), ("fake_add", "low")]
    assert all(0 <= seconds < 1 for *_, seconds in profile)
    assert session.threads == 2


def test_plan_allocates_nothing(fake):
    draft = adding(1 << 45)  # a petabyte
    planned = engine.plan(draft.to_bytes(), threads=1)
    assert planned["arenas"]["main"] == 12 << 45 and len(planned["instructions"]) == 2
    with pytest.raises(EngineError, match="bytes for arena 'main' could not be had"):
        Session(draft.to_bytes(), threads=1)


def test_workspace_is_shared_and_large_enough(fake):
    draft = Draft()
    arena = draft.arena("main", 4096)
    for i, n in enumerate((3, 100)):
        x = draft.tensor(f"x{i}", draft.storage(f"x{i}", arena, 1024 * i, 4 * n, INPUT), [n])
        y = draft.tensor(f"y{i}", draft.storage(f"y{i}", arena, 1024 * i + 512, 4 * n), [n])
        draft.instruction("fake_scratch", [x], [y])
    draft.entry("step")
    assert engine.plan(draft.to_bytes(), threads=1)["workspace"] == 400
    session = Session(draft.to_bytes(), threads=1)
    session.tensor("x1")[:] = np.arange(100)
    session.run("step")
    np.testing.assert_array_equal(session.tensor("y1"), np.arange(100))


def test_state_is_prepared_and_released(fake):
    before = fake.live_states()
    session = Session(one("fake_state"), threads=1)
    assert fake.live_states() == before + 1
    session.run("step")
    assert session.tensor("y0")[0] == 42
    del session
    gc.collect()
    assert fake.live_states() == before
    with pytest.raises(EngineError, match=r"instruction 0 \(fake_state\).*failed to prepare: nothing to prepare with"):
        Session(one("fake_state", {"refuse": 1}), threads=1)
    assert fake.live_states() == before


def test_kernel_error_names_the_instruction(fake):
    draft = Draft()
    arena = draft.arena("main", 32)
    x = draft.tensor("hidden", draft.storage("x", arena, 0, 16, INPUT), [2, 2])
    y = draft.tensor("loss", draft.storage("y", arena, 16, 16), [4])
    draft.instruction("fake_add", [x, -1], [y])
    draft.instruction("fake_fail", [x, -1], [y])
    draft.entry("step")
    session = Session(draft.to_bytes(), threads=1)
    with pytest.raises(EngineError, match=r"instruction 1 \(fake_fail\): in entry 'step'.*the moon is in") as caught:
        session.run("step")
    assert caught.value.op == "fake_fail" and caught.value.instruction == 1
    assert caught.value.operands == ["input 0 hidden: f32[2, 2]", "input 1: absent", "output 0 loss: f32[4]"]


def test_binding(fake, tmp_path):
    session = Session(adding().to_bytes(), threads=1)
    with pytest.raises(EngineError, match="entry 'step' uses storage 'weight', which isn't bound"):
        session.run("step")
    with pytest.raises(EngineError, match="'weight' has no memory yet"):
        session.tensor("weight")
    with pytest.raises(EngineError, match="takes 32 bytes, the buffer has 28"):
        session.bind("weight", np.zeros(7, np.float32))
    with pytest.raises(EngineError, match="no storage 'wieght'\nit has: total, weight, x, y"):
        session.bind("wieght", np.zeros(8, np.float32))
    with pytest.raises(EngineError, match="'x' lies in an arena"):
        session.bind("x", np.zeros(8, np.float32))
    with pytest.raises(EngineError, match="not dense"):
        session.bind("weight", np.zeros(16, np.float32)[::2])
    with pytest.raises(EngineError, match="isn't aligned"):
        session.bind("weight", np.zeros(33, np.uint8)[1:])
    with pytest.raises(EngineError, match="object has no buffer|no buffer that the engine can use"):
        session.bind("weight", [1.0] * 8)

    path = tmp_path / "weight.bin"
    path.write_bytes(np.full(8, 3, np.float32).tobytes())
    with path.open("rb") as file:
        session.bind("weight", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    gc.collect()
    session.run("step")
    np.testing.assert_array_equal(session.tensor("y"), 3)
    assert not session.tensor("weight").flags.writeable


def test_read_only_buffer_is_not_written(fake):
    draft = Draft()
    draft.tensor("y", draft.storage("y", -1, 0, 16), [4])
    draft.instruction("fake_state", [], [0])
    draft.entry("step")
    session = Session(draft.to_bytes(), threads=1)
    with pytest.raises(EngineError, match="written by the program, the buffer is read-only"):
        session.bind("y", bytes(16))
    session.bind("y", bytearray(16))
    session.run("step")
    assert session.tensor("y")[0] == 42


def test_views_keep_their_memory(fake):
    session = Session(adding().to_bytes(), threads=1)
    session.bind("weight", np.full(8, 5, np.float32))
    weight = session.tensor("weight")
    session.bind("weight", np.full(8, 6, np.float32))
    x = session.tensor("x")
    x[:] = 7
    del session
    gc.collect()
    np.testing.assert_array_equal(weight, 5)
    np.testing.assert_array_equal(x, 7)


def test_views_of_every_kind():
    draft = Draft()
    arena = draft.arena("main", 4096)
    draft.tensor("bf16", draft.storage("a", arena, 0, 64, PERSISTENT), [2, 4], "bf16", offset=2, strides=[8, 1])
    draft.tensor("q4_1", draft.storage("b", arena, 64, 240, PERSISTENT), [3, 64], "q4_1", strides=[96, 1][:2])
    draft.tensor("scalar", draft.storage("c", arena, 304, 4, PERSISTENT), [], "i32")
    draft.tensor("empty", draft.storage("d", arena, 308, 0, PERSISTENT), [0, 3])
    session = Session(draft.to_bytes(), threads=1)
    bf16, blocks = session.tensor("bf16"), session.tensor("q4_1")
    assert bf16.dtype == np.uint16 and bf16.shape == (2, 4) and bf16.strides == (16, 2)
    assert blocks.dtype == np.uint8 and blocks.shape == (3, 40) and blocks.strides == (60, 1)
    assert session.tensor("scalar").shape == () and session.tensor("empty").shape == (0, 3)


def test_runs_from_several_threads_take_turns(fake):
    draft = Draft()
    draft.tensor("y", draft.storage("y", draft.arena("main", 64), 0, 64, PERSISTENT), [16], "i32")
    draft.instruction("fake_tasks", [], [0], {"repeat": 20, "work": 20})
    draft.entry("step")
    session = Session(draft.to_bytes(), threads=2)
    runners = [threading.Thread(target=lambda: [session.run("step") for _ in range(25)]) for _ in range(4)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    np.testing.assert_array_equal(session.tensor("y"), 4 * 25 * 20)


def test_unknown_names(fake):
    session = Session(adding().to_bytes(), threads=1)
    with pytest.raises(EngineError, match="no entry 'stpe'\nit has: step"):
        session.run("stpe")
    with pytest.raises(EngineError, match="no tensor 'z'"):
        session.tensor("z")
    with pytest.raises(EngineError, match="no device for backend 'tpu'"):
        Session(adding().to_bytes(), backend="tpu", threads=1)
