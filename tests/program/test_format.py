"""Programs as bytes and as text: both give back what they were made of."""

from __future__ import annotations

import functools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.program import Arena, Entry, Instruction, Program, Storage, TensorEntry
from surogate_core.program.format import HEADER, from_bytes
from surogate_core.program.program import DTYPE_CODES, dense_strides
from surogate_core.program.text import parse

from ..passes import models

NAMES = st.text(string.ascii_letters + string.digits + "._:", min_size=1, max_size=12)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
ATTRS = st.dictionaries(st.text(string.ascii_lowercase + "_", min_size=1), INTEGERS | st.floats(allow_nan=False) | TEXTS,
                        max_size=4)


@st.composite
def programs(draw) -> Program:
    """Tables whose names resolve; whether they make sense is the engine's question."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    arenas = [Arena(n, draw(st.integers(0, 2**40)), draw(st.sampled_from([1, 64, 4096])))
              for n in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))]
    where = st.sampled_from([None, *(a.name for a in arenas)])
    storages = []
    for name in names:
        arena = draw(where)
        offset = 0 if arena is None else draw(st.integers(0, 2**40))
        storages.append(Storage(name, arena, offset, draw(st.integers(0, 2**40)), draw(st.integers(0, 3))))
    tensors = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 1000), max_size=6)))
        dense = draw(st.booleans())
        strides = dense_strides(shape) if dense else tuple(draw(st.integers(0, 2**31)) for _ in shape)
        tensors.append(TensorEntry(name, draw(st.sampled_from(names)), draw(st.integers(0, 2**40)),
                                   draw(st.sampled_from(sorted(DTYPE_CODES))), shape, strides))
    operands = st.lists(st.sampled_from([None, *(t.name for t in tensors)]), max_size=4).map(tuple)
    instructions = [
        Instruction(draw(NAMES), draw(operands), draw(operands), tuple(draw(ATTRS).items()), draw(st.just("") | NAMES),
                    draw(st.integers(0, 3)), tuple(draw(st.lists(st.integers(0, 99), max_size=3))))
        for _ in range(draw(st.integers(0, 4)))
    ]
    count = len(instructions)
    entries = [Entry(n, draw(st.integers(0, count)), draw(st.integers(0, count)))
               for n in draw(st.lists(NAMES, max_size=4, unique=True))]
    return Program(draw(st.binary(min_size=32, max_size=32)), arenas, storages, tensors, instructions, entries)


@settings(max_examples=150, deadline=None)
@given(programs())
def test_bytes_and_text_lose_nothing(program):
    assert from_bytes(program.to_bytes()) == program
    assert parse(program.text()) == program


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_a_value_error_or_another_program(data):
    """Nothing else: no other exception and no endless loop."""
    good = program_bytes()
    damaged = bytearray(good[:data.draw(st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        from_bytes(bytes(damaged))
    except ValueError:
        pass


@functools.cache
def program_bytes() -> bytes:
    return models.program_of(models.gradient_graph(models.model(num_hidden_layers=1))).to_bytes()


def test_another_version_names_both():
    data = bytearray(Program().to_bytes())
    data[8] = 9
    with pytest.raises(ValueError, match="format 1 .*format 9"):
        from_bytes(bytes(data))


def test_the_header_is_as_documented():
    assert HEADER.size == 8 + 16 + 32 + 8 * 16
    assert Program().to_bytes()[:8] == b"SGPROGRM"


def test_a_tensor_of_no_storage_cannot_be_written():
    program = Program(tensors=[TensorEntry("x", "nowhere", 0, "f32", (1,), (1,))])
    with pytest.raises(KeyError, match="nowhere"):
        program.to_bytes()


@pytest.mark.parametrize("line", ["arena a bytes=x align=64", "nonsense", "tensor t s+0 f32", "  op () -> ", "entry a"])
def test_a_line_that_is_no_part_of_a_program_is_named(line):
    with pytest.raises(ValueError, match="line 2: "):
        parse(f"program {bytes(32).hex()}\n{line}\n")
