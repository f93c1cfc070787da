"""Programs that must be refused, each for its own reason, and files that aren't programs."""

from __future__ import annotations

import random
import struct

import pytest

from surogate_core import engine
from surogate_core.engine import EngineError, Session

from .programs import ABSENT, FIXED, INPUT, PERSISTENT, Draft, adding


def refused(draft: Draft | bytes, reason: str) -> None:
    data = draft if isinstance(draft, bytes) else draft.to_bytes()
    with pytest.raises(EngineError, match=reason):
        engine.plan(data, threads=1)


def vectors(*offsets: int, flags: int = 0, size: int = 64) -> tuple[Draft, list[int]]:
    """A draft with an arena and a storage of 16 bytes, with a tensor of four, at each offset; storage 0 is an input."""
    draft = Draft()
    arena = draft.arena("main", size)
    tensors = []
    for i, offset in enumerate(offsets):
        storage = draft.storage(f"s{i}", arena, offset, 16, INPUT if i == 0 else flags)
        tensors.append(draft.tensor(f"t{i}", storage, [4]))
    return draft, tensors


def test_the_good_one_passes(fake):
    engine.plan(adding().to_bytes(), threads=1)


def test_versions_and_magic():
    refused(adding().to_bytes(magic=b"NOTAPROG"), "not a program")
    refused(adding().to_bytes(version=2), "format version 2, this engine reads 1")
    refused(adding().to_bytes(abi=(3, 1)), r"ABI 3\.1, this engine speaks 1\.3")
    refused(b"", "shorter than its header")


def test_storage_outside_arena():
    draft, _ = vectors(0, 56)
    refused(draft, "storage 's1'.*doesn't fit into arena 'main' of 64 bytes")
    draft, _ = vectors(0, 2**64 - 8)
    refused(draft, "doesn't fit into arena")


@pytest.mark.parametrize(
    "tensor, reason",
    [
        ({"shape": [5]}, r"f32\[5\] \(20 bytes at 0\) doesn't fit into storage 's'"),
        ({"shape": [4], "offset": 4}, "doesn't fit into storage"),
        ({"shape": [2], "offset": 2**64 - 4}, "doesn't fit into storage"),
        ({"shape": [2, 2], "strides": [3, 1]}, "doesn't fit into storage"),
        ({"shape": [2**62, 2**62]}, "overflows"),
        ({"shape": [-1]}, "negative size"),
        ({"shape": [4], "strides": [-1]}, "negative size or stride"),
        ({"shape": [3], "offset": 2}, "isn't aligned"),
        ({"shape": [4], "dtype": 77}, "unknown dtype code 77"),
        ({"shape": [16], "dtype": "q4_1"}, "multiple of 32"),
    ],
)
def test_tensor_that_cannot_be(tensor, reason):
    draft = Draft()
    storage = draft.storage("s", draft.arena("main", 64), 0, 16, PERSISTENT)
    draft.tensor("t", storage, **tensor)
    refused(draft, reason)


@pytest.mark.parametrize("alignment", [0, 3, 8192])
def test_alignment_of_an_arena(alignment):
    draft = Draft()
    draft.arena("main", 64, alignment)
    refused(draft, "power of two")


def test_indices_that_lead_nowhere():
    draft = adding()
    draft.operands[0] = 99
    refused(draft, "names tensor 99, which isn't there")
    draft = adding()
    draft.operands[0] = -2
    refused(draft, "names tensor -2")
    draft = adding()
    draft.storages[0] = (draft.storages[0][0], 7, *draft.storages[0][2:])
    refused(draft, "names arena 7, which isn't there")
    draft = adding()
    draft.entry("more", first=1, count=2)
    refused(draft, "the instructions of entry 1 lie outside their table")
    draft = adding()
    draft.instruction("fake_add", [0, 1], [2], waits=[5])
    refused(draft, "waits for instruction 5, which doesn't come before it")


def test_what_is_fixed_is_not_written(fake):
    draft = adding()
    for index, allowed in ((0, True), (3, True), (1, False), (2, False)):
        marked = adding()
        *storage, flags, reserved = marked.storages[index]
        marked.storages[index] = (*storage, flags | FIXED, reserved)
        if allowed:
            engine.plan(marked.to_bytes(), threads=1)
        else:
            refused(marked, "lies in a storage that is marked as fixed")
    draft.storages[3] = (*draft.storages[3][:4], 8, 0)
    refused(draft, "unknown flags")


def test_names():
    draft = adding()
    draft.entry("step")
    refused(draft, "'step', which another has already")
    draft = adding()
    draft.entry("")
    refused(draft, "entry 1 has no name")
    draft = adding()
    draft.arenas[0] = (10_000, *draft.arenas[0][1:])
    refused(draft, "name of arena 0 lies outside the strings")


def test_attributes_must_be_sorted(fake):
    draft = adding()
    draft.instruction("fake_fail", [], [], {"a": 1, "b": 2.0})
    engine.plan(draft.to_bytes(), threads=1)
    draft.attrs.reverse()
    refused(draft, "aren't sorted by name")


def test_no_kernel(fake):
    draft = adding()
    draft.instruction("never_heard_of", [0], [1])
    refused(draft, r"instruction 2 \(never_heard_of\): no kernel for op")
    draft = adding()
    draft.instruction("fake_add", [0, 1], [2], kernel="avx9000")
    refused(draft, "kernel 'avx9000' cannot run op 'fake_add'")


def test_stream_that_the_backend_lacks(fake):
    draft = adding()
    draft.instruction("fake_add", [0, 1], [2], stream=1)
    refused(draft, "stream 1, the backend has 1")


def test_read_before_written(fake):
    draft, (x, a, b) = vectors(0, 16, 32)
    draft.instruction("fake_add", [x, a], [b])
    draft.entry("step")
    refused(draft, r"instruction 0 \(fake_add\): entry 'step' reads 't1' before anything wrote it")
    draft, (x, a, b) = vectors(0, 16, 32)
    draft.instruction("fake_add", [x, ABSENT], [a])
    draft.instruction("fake_add", [x, a], [b])
    draft.entry("first", 0, 1)
    draft.entry("second", 1, 1)
    refused(draft, "entry 'second' reads 't1'")  # what another entry wrote is gone
    draft, (x, a, b) = vectors(0, 16, 32, flags=PERSISTENT)
    draft.instruction("fake_add", [x, a], [b])
    draft.entry("step")
    engine.plan(draft.to_bytes(), threads=1)


def chain(*offsets: int) -> Draft:
    """t1 = t0; t2 = t1; t3 = t2; ..."""
    draft, tensors = vectors(*offsets)
    for source, target in zip(tensors, tensors[1:], strict=False):
        draft.instruction("fake_add", [source, ABSENT], [target])
    draft.entry("step")
    return draft


def test_memory_is_shared_only_by_what_is_not_live_together(fake):
    engine.plan(chain(0, 16, 32, 16).to_bytes(), threads=1)
    refused(chain(0, 16, 24), "storages 's1' and 's2' overlap in arena 'main' and are both live at instruction 1")
    refused(chain(0, 16, 16), "'s1' and 's2' overlap")
    refused(chain(0, 16, 32, 8), "'s0' and 's3' overlap")  # an input is always live
    refused(chain(0, 16, 32, 40, 16), "'s2' and 's3' overlap")


def test_outputs_over_inputs(fake):
    draft, (x, a) = vectors(0, 16)
    half = draft.tensor("half", 1, [2], offset=8)
    front = draft.tensor("front", 1, [2])
    shifted = draft.tensor("shifted", 1, [2], offset=4)
    draft.instruction("fake_add", [x, ABSENT], [a])
    ok = list(draft.instructions)
    draft.instruction("fake_add", [a, x], [a])  # in place of input 0, as the kernel may
    draft.instruction("fake_add", [half, x], [front])
    draft.entry("step")
    engine.plan(draft.to_bytes(), threads=1)
    for inputs, outputs, kernel in [([x, a], [a], ""), ([a, x], [a], "low"), ([front, x], [shifted], "")]:
        draft.instructions = list(ok)
        draft.instruction("fake_add", inputs, outputs, kernel=kernel)
        draft.entries.clear()
        refused(draft, "output '.*' overlaps input '.*' doesn't work in place of it")
    draft.instructions = list(ok)
    draft.instruction("fake_fail", [], [a, half])
    refused(draft, "outputs 't1' and 'half' overlap")


def test_output_with_elements_on_top_of_each_other(fake):
    draft, (x, _) = vectors(0, 16)
    draft.instruction("fake_add", [x, ABSENT], [draft.tensor("flat", 1, [4], strides=[0])])
    refused(draft, "'flat' has several elements in one place")


def test_truncated_file(fake):
    data = adding().to_bytes()
    for length in range(len(data)):
        with pytest.raises(EngineError):
            engine.plan(data[:length] if length < len(data) - 8 else data[: len(data) - 9], threads=1)


def test_damaged_files_never_crash(fake):
    """Every field set to extremes, and random bytes changed: an error or a program, nothing else."""
    good = adding().to_bytes()
    extremes = [0, 1, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    files = []
    for at in range(0, len(good) - 8, 4):
        for value in extremes:
            files.append(good[:at] + struct.pack("<Q", value) + good[at + 8 :])
            files.append(good[:at] + struct.pack("<I", value & 0xFFFFFFFF) + good[at + 4 :])
    chance = random.Random(7)
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 2, 255, chance.randrange(256)])
        files.append(bytes(damaged))
    refusals = 0
    for file in files:
        try:
            engine.plan(file, threads=1)
        except EngineError:
            refusals += 1
    assert refusals > len(files) // 2


def test_program_without_anything():
    session = Session(Draft().to_bytes(), threads=1)
    assert session.entries() == {} and session.explain() == []
