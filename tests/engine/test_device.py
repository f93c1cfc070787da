"""Sessions on a device, which here is fake_device.c: copies, sharing, order, recordings, and what goes wrong."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError, Memory, Session

from .programs import ABSENT, INPUT, PERSISTENT, Draft

MIB = 1 << 20


def summing(n: int = 8, op: str = "fake_add") -> bytes:
    """total = x + weight (external), y = total + x."""
    draft = Draft()
    arena = draft.arena("main", 3 * 256 * n, 256)
    x = draft.tensor("x", draft.storage("x", arena, 0, 4 * n, INPUT), [n])
    total = draft.tensor("total", draft.storage("total", arena, 256 * n, 4 * n), [n])
    y = draft.tensor("y", draft.storage("y", arena, 512 * n, 4 * n, PERSISTENT), [n])
    weight = draft.tensor("weight", draft.storage("weight", -1, 0, 4 * n), [n])
    draft.instruction(op, [x, weight], [total])
    draft.instruction("fake_add", [total, x], [y])
    draft.entry("step")
    return draft.to_bytes()


def forked(rounds: int = 1) -> bytes:
    """Each round: b = x + a on stream 1 beside c = a + a on stream 0, then y = b + c and a = y + x."""
    draft = Draft()
    arena = draft.arena("main", 2048, 256)
    x, a, y = (draft.tensor(s, draft.storage(s, arena, 256 * i, 16, flag), [4])
               for i, (s, flag) in enumerate({"x": INPUT, "a": PERSISTENT, "y": PERSISTENT}.items()))
    b, c = (draft.tensor(s, draft.storage(s, arena, 1024 + 256 * i, 16), [4]) for i, s in enumerate("bc"))
    last = []
    for _ in range(rounds):
        beside = draft.instruction("fake_add", [x, a], [b], stream=1, waits=last)
        draft.instruction("fake_add", [a, a], [c])
        draft.instruction("fake_add", [b, c], [y], waits=[beside])
        last = [draft.instruction("fake_add", [y, x], [a])]
    draft.entry("step")
    return draft.to_bytes()


def after(rounds: int, x: float, a: float) -> tuple[float, float]:
    """(y, a) after as many rounds of `forked`."""
    y = 0.0
    for _ in range(rounds):
        y = x + a + 2 * a
        a = y + x
    return y, a


def bound(n: int = 8, value: float = 3.0, **options) -> Session:
    session = Session(summing(n), backend="fake", **options)
    weight = Memory("fake", 4 * n, options.get("device", 0))
    weight.write(np.full(n, value, np.float32))
    session.bind("weight", weight)
    return session


def test_devices(device):
    info = engine.device_info("fake", 1)
    assert (info["name"], info["versions"]) == ("Fake 1", "driver 1.2, runtime 3")
    assert (info["num_units"], info["architecture"], info["total_bytes"]) == (3, 7, 8192 * MIB)
    before = info["free_bytes"]
    memory = Memory("fake", MIB, 1)
    assert engine.device_info("fake", 1)["free_bytes"] == before - MIB
    del memory
    assert engine.device_info("fake", 1)["free_bytes"] == before
    for index in (2, -1):
        with pytest.raises(EngineError, match=rf"no device {index} of backend 'fake'\nit has 2 devices, counted"):
            Session(summing(), backend="fake", device=index)
    with pytest.raises(EngineError, match="no device for backend 'tpu'\navailable backends: cpu, .*fake"):
        engine.device_info("tpu")
    with pytest.raises(EngineError, match="the host is no device"):
        engine.device_info("cpu")


def test_runs_on_each_device(device):
    for index in (0, 1):
        session = bound(device=index)
        session.write("x", np.full(8, 100, np.float32))
        session.run("step")
        np.testing.assert_array_equal(session.read("y"), 203)
        assert [row["kernel"] for row in session.explain()] == ["plain", "plain"]
        with pytest.raises(EngineError, match="'y' lies on device 'fake'\nread or write it"):
            session.tensor("y")


def test_memory_is_zeroed_and_given_back(device):
    blocks = device.blocks  # the devices' staging may be among them, and stays
    session = Session(forked(), backend="fake")
    np.testing.assert_array_equal(session.read("y"), 0)
    staged = device.blocks
    del session
    gc.collect()
    assert device.blocks <= max(blocks, staged - 1)
    streams, events, graphs = device.streams, device.events, device.graphs
    session = Session(forked(), backend="fake")
    for _ in range(3):
        session.run("step")
    assert (device.streams, device.graphs) == (streams + 2, graphs + 1) and device.events > events
    del session
    gc.collect()
    assert (device.streams, device.events, device.graphs) == (streams, events, graphs)


@pytest.mark.parametrize("size", [0, 1, 2 * MIB, 2 * MIB + 1, 40 * MIB - 3])
def test_copies_through_staging(device, size):
    """Staging has 16 slots of 2 MiB: large copies come back to slots that are still in use."""
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory, back = Memory("fake", size), np.zeros(size, np.uint8)
    copies = device.copies
    memory.write(values)
    assert device.copies - copies == -(-size // (2 * MIB))
    kept = values.copy()
    values[:] = 7  # what was written is what was there when `write` returned
    memory.read(back)
    np.testing.assert_array_equal(back, kept)


def test_parts_of_memory(device):
    memory = Memory("fake", 64)
    memory.write(np.arange(8, dtype=np.uint8), 56)
    back = np.zeros(4, np.uint8)
    memory.read(back, 60)
    np.testing.assert_array_equal(back, [4, 5, 6, 7])
    for offset in (57, 1 << 63):
        with pytest.raises(EngineError, match="reach past the end of memory of 64 bytes"):
            memory.write(np.zeros(8, np.uint8), offset)
    session = Session(summing(4), backend="fake")
    session.write("x", np.arange(2, dtype=np.float32), first=2)
    np.testing.assert_array_equal(session.read("x"), [0, 0, 0, 1])
    np.testing.assert_array_equal(session.read("x", first=3, count=1), [1])
    with pytest.raises(EngineError, match="reach past its end"):
        session.write("x", np.zeros(2, np.float32), first=3)


def test_binding(device):
    session = Session(summing(), backend="fake")
    with pytest.raises(EngineError, match="uses storage 'weight', which isn't bound"):
        session.run("step")
    with pytest.raises(EngineError, match="a program on a device reads memory of that device\ncopy the array"):
        session.bind("weight", np.zeros(8, np.float32))
    with pytest.raises(EngineError, match="the memory is of another device"):
        session.bind("weight", Memory("fake", 32, 1))
    with pytest.raises(EngineError, match="takes 32 bytes, the buffer has 28"):
        session.bind("weight", Memory("fake", 28))
    with pytest.raises(EngineError, match="'x' lies in an arena"):
        session.bind("x", Memory("fake", 32))


def test_sessions_share_memory(device):
    writer = Session(forked(), backend="fake")
    draft = Draft()
    arena = draft.arena("main", 256, 256)
    a = draft.tensor("a", draft.storage("shared", -1, 0, 16), [4])
    copy = draft.tensor("copy", draft.storage("copy", arena, 0, 16, PERSISTENT), [4])
    draft.instruction("fake_add", [a, ABSENT], [copy])
    draft.entry("look")
    reader = Session(draft.to_bytes(), backend="fake")
    reader.bind("shared", writer.share("a"))
    writer.write("x", np.full(4, 2, np.float32))
    for rounds in range(1, 4):
        writer.run("step")
        writer.synchronize()
        reader.run("look")
        np.testing.assert_array_equal(reader.read("copy"), after(rounds, 2, 0)[1])
    del writer  # its memory stays as long as somebody reads it
    gc.collect()
    reader.run("look")
    np.testing.assert_array_equal(reader.read("copy"), after(3, 2, 0)[1])


def test_writes_and_reads_take_their_place_among_runs(device):
    session = bound()
    results = []
    for i in range(6):
        session.write("x", np.full(8, i, np.float32))
        session.run("step")
        if i % 2:
            results.append(session.read("y"))
    np.testing.assert_array_equal(results, [np.full(8, 2 * i + 3) for i in (1, 3, 5)])


def test_nothing_waits_until_somebody_asks(device):
    session = bound()
    ran = device.launches
    session.run("step")
    assert device.launches == ran
    session.synchronize()
    assert device.launches == ran + 2


@pytest.mark.parametrize("graphs", [True, False])
def test_recorded_at_the_second_run(device, graphs):
    session = bound(graphs=graphs)
    session.write("x", np.full(8, 1, np.float32))
    made, launched = device.graphs, device.graph_launches
    for i in range(4):
        session.run("step")
        assert device.graphs - made == int(graphs and i > 0)
        assert device.graph_launches - launched == (i if graphs else 0)
        session.write("x", np.full(8, 2 + i, np.float32))  # the recording reads memory, not values
        np.testing.assert_array_equal(session.read("y"), 2 * (1 + i) + 3)
    assert session.why_not_recorded("step") == ("" if graphs else "graphs are switched off")


def test_binding_drops_recordings(device):
    session = bound(value=3)
    session.write("x", np.full(8, 1, np.float32))
    for _ in range(3):
        session.run("step")
    other, made = Memory("fake", 32), device.graphs
    other.write(np.full(8, 30, np.float32))
    session.bind("weight", other)
    assert device.graphs == made - 1
    for _ in range(2):
        launched = device.graph_launches
        session.run("step")
        assert device.graph_launches == launched + 1  # recorded anew at once: its kernels ran before
        np.testing.assert_array_equal(session.read("y"), 32)


def test_a_kernel_that_cannot_be_recorded(device):
    session = Session(summing(op="fake_shy"), backend="fake")
    session.bind("weight", Memory("fake", 32))
    made = device.graphs
    for _ in range(3):
        session.run("step")
    assert device.graphs == made
    assert session.why_not_recorded("step") == "instruction 0 (fake_shy) runs kernel 'plain', which cannot be recorded"
    assert [row["capturable"] for row in session.explain()] == [False, True]
    assert Session(Draft().to_bytes()).why_not_recorded("step") == "the host runs kernels as functions"


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("graphs", [True, False])
def test_two_streams(device, rounds, graphs):
    session = Session(forked(rounds), backend="fake", graphs=graphs)
    session.write("x", np.full(4, 1, np.float32))
    expected = 0.0
    for _ in range(4):
        session.run("step")
        y, expected = after(rounds, 1, expected)
        np.testing.assert_array_equal(session.read("y"), np.float32(y))
        np.testing.assert_array_equal(session.read("a"), np.float32(expected))


def test_two_streams_back_to_back(device):
    """An entry's work on stream 1 follows what was on stream 0 before, and the next run follows all of it."""
    session = Session(forked(), backend="fake", graphs=False)
    session.write("x", np.full(4, 1, np.float32))
    for _ in range(5):
        session.run("step")
    np.testing.assert_array_equal(session.read("a"), after(5, 1, 0)[1])


def test_profile(device):
    for program, graphs in ((forked(2), True), (forked(2), False)):
        session = Session(program, backend="fake", graphs=graphs)
        session.write("x", np.full(4, 1, np.float32))
        rows = session.profile("step")
        assert [row[:2] for row in rows] == [("fake_add", "plain")] * 8
        assert sum(row[2] for row in rows) >= 8e-6  # the device's clock counts kernels
        np.testing.assert_array_equal(session.read("a"), np.float32(after(4, 1, 0)[1]))  # the first run came before it
        session.profile("step")
        session.run("step")
        np.testing.assert_array_equal(session.read("a"), np.float32(after(8, 1, 0)[1]))


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
@pytest.mark.parametrize("graphs", [True, False])
def test_errors_leave_the_session_usable(device, refused, graphs):
    """A kernel that fails in the first run, in the second, which is recorded, and while it is profiled."""
    session = Session(forked(), backend="fake", graphs=graphs)
    session.write("x", np.full(4, 1, np.float32))
    failed = rf"instruction {refused - 1} \(fake_add\): in entry 'step'.*the device is out of order"
    expected = 0.0
    for i, run in enumerate((session.run, session.run, session.profile)):
        made, ran = device.graphs, device.launches
        session.write("a", np.full(4, expected, np.float32))
        device.refuse(refused)
        with pytest.raises(EngineError, match=failed):
            run("step")
        # What was on the streams is over; what was to be recorded is gone.
        assert device.launches - ran == (0 if graphs and i > 0 else refused - 1)
        assert device.graphs == made
        if refused == 4 and not (graphs and i > 0):
            np.testing.assert_array_equal(session.read("y"), np.float32(after(1, 1, expected)[0]))
        run("step")
        expected = after(1, 1, expected)[1]
        np.testing.assert_array_equal(session.read("a"), np.float32(expected))


def test_operands_must_be_the_devices(device):
    """What the session hands to kernels is memory of its own device: the fake kernels look."""
    other = bound(device=1)
    session = bound()
    for each in (other, session, other):
        each.write("x", np.zeros(8, np.float32))
        each.run("step")
        np.testing.assert_array_equal(each.read("y"), 3)


def test_memory_that_is_not_there(device):
    draft = Draft()
    draft.arena("activations", 9000 * MIB, 256)
    free = engine.device_info("fake")["free_bytes"]
    blocks = device.blocks
    with pytest.raises(
        EngineError,
        match=rf"{9000 * MIB} bytes for arena 'activations' could not be had on device 'fake': out of memory; "
        rf"{free} are free\nuse a smaller batch",
    ):
        Session(draft.to_bytes(), backend="fake")
    assert device.blocks == blocks
    assert engine.plan(draft.to_bytes(), backend="fake")["arenas"] == {"activations": 9000 * MIB}
    with pytest.raises(EngineError, match=f"{9000 * MIB} bytes for a tensor could not be had"):
        Memory("fake", 9000 * MIB)


def test_each_stream_has_a_workspace(device):
    draft = Draft()
    arena = draft.arena("main", 2048, 256)
    x = draft.tensor("x", draft.storage("x", arena, 0, 400, INPUT), [100])
    names = []
    for i, n in enumerate((100, 3)):
        part = draft.tensor(f"x{i}", 0, [n])
        y = draft.tensor(f"y{i}", draft.storage(f"y{i}", arena, 512 * (1 + i), 4 * n, PERSISTENT), [n])
        draft.instruction("fake_scratch", [part if n < 100 else x], [y], stream=i)
        names.append(f"y{i}")
    draft.entry("step")
    session = Session(draft.to_bytes(), backend="fake")
    assert session.memory()["workspace"] == 412
    session.write("x", np.arange(100, dtype=np.float32))
    for _ in range(2):
        session.run("step")
        for name in names:
            np.testing.assert_array_equal(session.read(name), np.arange(session.shape(name)[0]))


def test_tuning_is_told_by_the_kernel(device):
    draft = Draft()
    arena = draft.arena("main", 512, 256)
    x = draft.tensor("x", draft.storage("x", arena, 0, 16, INPUT), [4])
    y = draft.tensor("y", draft.storage("y", arena, 256, 16), [4])
    for op in ("fake_tuned", "fake_scratch"):
        draft.instruction(op, [x], [y])
    draft.entry("step")
    assert [row["tuning"] for row in Session(draft.to_bytes(), backend="fake").explain()] == ["tile 3", ""]
    assert [row["tuning"] for row in engine.plan(draft.to_bytes(), backend="fake")["instructions"]] == ["", ""]


def test_more_streams_than_a_device_has(device):
    draft = Draft()
    arena = draft.arena("main", 512, 256)
    x = draft.tensor("x", draft.storage("x", arena, 0, 16, INPUT), [4])
    y = draft.tensor("y", draft.storage("y", arena, 256, 16), [4])
    draft.instruction("fake_add", [x, ABSENT], [y], stream=8)
    with pytest.raises(EngineError, match="it runs on stream 8, the backend has 8"):
        engine.plan(draft.to_bytes(), backend="fake")
