"""Programs on several streams: what must wait for what, and that the engine refuses a program in which it doesn't."""

from __future__ import annotations

import time

import pytest

from surogate_core import engine
from surogate_core.engine import EngineError

from .programs import ABSENT, INPUT, PERSISTENT, Draft


class Streams:
    """A draft under construction: storages of four floats in one arena, at offsets that count storages."""

    def __init__(self) -> None:
        self.draft = Draft()
        self.arena = self.draft.arena("main", 4096, 256)
        self.x = self.vector("x", 0, flags=INPUT)

    def vector(self, name: str, at: float, flags: int = 0, arena: int | None = None) -> int:
        arena = self.arena if arena is None else arena
        storage = self.draft.storage(name, arena, 0 if arena < 0 else int(16 * at), 16, flags)
        return self.draft.tensor(name, storage, [4])

    def add(self, inputs, output: int, stream: int = 0, waits=()) -> int:
        return self.draft.instruction("fake_add", [*inputs, ABSENT][:2], [output], stream=stream, waits=waits)

    def accepted(self) -> None:
        if not self.draft.entries:
            self.draft.entry("step")
        engine.plan(self.draft.to_bytes(), backend="fake")

    def refused(self, reason: str) -> None:
        if not self.draft.entries:
            self.draft.entry("step")
        with pytest.raises(EngineError, match=reason):
            engine.plan(self.draft.to_bytes(), backend="fake")


def test_a_read_follows_the_write(device):
    for waits in ([], [0]):
        s = Streams()
        a, b = s.vector("a", 1), s.vector("b", 2)
        s.add([s.x], a)
        s.add([a], b, stream=1, waits=waits)
        if waits:
            s.accepted()
        else:
            s.refused(
                r"instruction 1 \(fake_add\): in entry 'step' it reads 'a' on stream 1 in storage 'a', and nothing "
                r"makes it follow instruction 0 \(fake_add\), which writes 'a' on stream 0"
                r"[^!]*let it wait for instruction 0, or for "
            )


def test_a_write_follows_reads_and_writes(device):
    for waits in ([], [1], [2], [1, 2]):
        s = Streams()
        a, b, c = s.vector("a", 1), s.vector("b", 2), s.vector("c", 3)
        s.add([s.x], a)
        s.add([a], b, stream=1, waits=[0])
        s.add([a], c, stream=2, waits=[0])
        s.add([s.x], a, waits=waits)
        if waits == [1, 2]:
            s.accepted()
        else:
            late = 2 if 1 in waits else 1
            s.refused(rf"instruction 3 .*writes 'a' on stream 0.* instruction {late} .*reads 'a' on stream {late}")
    s = Streams()
    a = s.vector("a", 1)
    s.add([s.x], a)
    s.add([s.x], a, stream=1)
    s.refused("writes 'a' on stream 1.*which writes 'a' on stream 0")


def test_reads_need_no_order(device):
    s = Streams()
    for stream in range(4):
        s.add([s.x], s.vector(f"a{stream}", 1 + stream), stream=stream)
    s.accepted()


def test_order_is_handed_on(device):
    """0 on stream 0 -> 1 and 2 on stream 1 -> 3 on stream 2 -> 4 on stream 0."""
    s = Streams()
    a, b, c, d = (s.vector(name, 1 + i) for i, name in enumerate("abcd"))
    s.add([s.x], a)
    s.add([a], b, stream=1, waits=[0])
    s.add([s.x], c, stream=1)
    s.add([c], d, stream=2, waits=[2])
    s.add([b, d], a, waits=[3])
    s.accepted()
    s.draft.instructions[4] = (*s.draft.instructions[4][:8], s.draft.instructions[4][8], 0, 0)
    s.refused("instruction 4 .*reads 'b' on stream 0.*which writes 'b' on stream 1")


def test_a_wait_for_an_instruction_too_early(device):
    s = Streams()
    a, b, c = s.vector("a", 1), s.vector("b", 2), s.vector("c", 3)
    s.add([s.x], a)
    s.add([s.x], b)
    s.add([b], c, stream=1, waits=[0])
    s.refused("reads 'b' on stream 1.* follow instruction 1")


def test_storages_that_take_each_others_place(device):
    """b lies where a lay, which is read on another stream: they are never live together, and yet."""
    for waits in ([], [1]):
        s = Streams()
        a, b, other = s.vector("a", 1), s.vector("b", 1.5), s.vector("other", 3)
        s.add([s.x], a)
        s.add([a], other, stream=1, waits=[0])
        s.add([s.x], b, waits=waits)
        if waits:
            s.accepted()
        else:
            s.refused("writes 'b' on stream 0 in storage 'b', which shares memory with storage 'a'.*instruction 1")


@pytest.mark.parametrize("arena, flags", [(-1, 0), (None, PERSISTENT)])
def test_external_and_persistent_storages(device, arena, flags):
    s = Streams()
    state = s.vector("state", 1, flags, arena)
    s.add([state], s.vector("old", 2), stream=1)
    s.add([s.x], state)
    s.refused("writes 'state' on stream 0.*reads 'state' on stream 1")


def test_parts_of_a_storage(device):
    s = Streams()
    half = [s.draft.tensor(f"half{i}", s.draft.tensors[s.x][1], [2], offset=8 * i) for i in range(2)]
    whole = s.vector("whole", 1)
    parts = [s.draft.tensor(f"part{i}", 1, [2], offset=8 * i) for i in range(2)]
    s.add([half[0]], parts[0])
    s.add([half[1]], parts[1], stream=1)
    s.add([whole], s.vector("out", 2), waits=[1])
    s.add([half[0]], parts[0], stream=1)
    s.refused("instruction 3 .*writes 'part0' on stream 1.* instruction 0 .*writes 'part0' on stream 0")


def test_columns_of_one_matrix(device):
    def columns(second_waits) -> Streams:
        s = Streams()
        source = s.draft.tensor("source", s.draft.tensors[s.x][1], [2, 2])
        storage = s.draft.storage("wide", s.arena, 64, 32)
        left, right = (s.draft.tensor(name, storage, [2, 2], offset=offset, strides=[4, 1])
                       for name, offset in (("left", 0), ("right", 8)))
        whole = s.draft.tensor("whole", storage, [2, 4])
        s.add([source], left)
        s.add([source], right, stream=1)
        s.add([whole], s.draft.tensor("out", s.draft.storage("out", s.arena, 128, 32), [2, 4]), waits=second_waits)
        return s

    columns([1]).accepted()
    columns([]).refused("reads 'whole' on stream 0.*which writes 'right' on stream 1")
    s = columns([1])
    s.add([s.x], 3, stream=1)  # right again: it was read by stream 0
    s.refused("writes 'right' on stream 1.*which reads 'whole' on stream 0")


def test_entries_begin_anew(device):
    s = Streams()
    a, b = s.vector("a", 1, PERSISTENT), s.vector("b", 2)
    s.add([s.x], a)
    s.add([a], b, stream=1)
    s.draft.entry("first", 0, 1)
    s.draft.entry("second", 1, 1)
    s.accepted()
    s.add([a], b, waits=[0])
    s.draft.entry("third", 2, 1)
    s.refused(r"instruction 2 \(fake_add\): it waits for instruction 0, which is not one of entry 'third'")


def test_a_long_program_is_verified_quickly(device):
    """20,000 instructions on two streams over eight buffers that take turns."""
    s = Streams()
    buffers = [s.vector(f"b{i}", 1 + i) for i in range(8)]
    s.add([s.x], buffers[0])
    for i in range(1, 20_000):
        s.add([buffers[(i - 1) % 8]], buffers[i % 8], stream=i % 2, waits=[i - 1])
    start = time.perf_counter()
    s.accepted()
    assert time.perf_counter() - start < 5
