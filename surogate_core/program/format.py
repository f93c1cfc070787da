"""The program file: little endian, a header, eight tables and a string pool.

    header       char magic[8] "SGPROGRM"; u32 format version, ABI major, ABI minor, 0; u8 fingerprint[32];
                 8 x {u64 offset, u64 count}: strings (bytes), arenas, storages, tensors, instructions, operands, attrs, entries
    arena        u32 name, 0; u64 bytes, alignment
    storage      u32 name; i32 arena (-1: bound by the caller); u64 offset, bytes; u32 flags, 0
    tensor       u32 name; i32 storage; u64 byte offset; i32 dtype, rank; i64 shape[6], strides[6]
    instruction  u32 op, kernel, first operand; u16 inputs, outputs; u32 first attr, attrs, stream, first wait, waits, 0
    operands     i32: tensor of each input, then of each output, -1 absent; waits are instruction indices
    attr         u32 name; i32 kind (1 int, 2 float, 3 string); i64 i; f64 f; u32 s, 0
    entry        u32 name, first instruction, instructions, 0

Names are offsets into the pool of NUL-terminated UTF-8 strings; offset 0 is the empty string.
"""

from __future__ import annotations

import struct

from .program import DTYPE_CODES, Arena, Entry, Instruction, Program, Storage, TensorEntry

MAGIC, VERSION, ABI = b"SGPROGRM", 1, (1, 3)
HEADER = struct.Struct("<8s4I32s16Q")
ARENA, STORAGE = struct.Struct("<2I2Q"), struct.Struct("<Ii2Q2I")
TENSOR, INSTRUCTION = struct.Struct("<IiQ2i12q"), struct.Struct("<3I2H6I")
ATTR, ENTRY, OPERAND = struct.Struct("<IiqdII"), struct.Struct("<4I"), struct.Struct("<i")
MAX_RANK = 6
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}


class _Strings:
    def __init__(self) -> None:
        self.pool, self.offsets = bytearray(b"\0"), {"": 0}

    def __call__(self, text: str) -> int:
        if text not in self.offsets:
            self.offsets[text] = len(self.pool)
            self.pool += text.encode() + b"\0"
        return self.offsets[text]


def to_bytes(program: Program) -> bytes:
    """The file's bytes. KeyError when an instruction or tensor names something that is not in the tables."""
    s = _Strings()
    arena_index = {a.name: i for i, a in enumerate(program.arenas)}
    storage_index = {x.name: i for i, x in enumerate(program.storages)}
    tensor_index: dict[str | None, int] = {t.name: i for i, t in enumerate(program.tensors)}
    tensor_index[None] = -1
    arenas = b"".join(ARENA.pack(s(a.name), 0, a.bytes, a.alignment) for a in program.arenas)
    storages = b"".join(
        STORAGE.pack(s(x.name), -1 if x.arena is None else arena_index[x.arena], x.offset, x.bytes, x.flags, 0)
        for x in program.storages
    )
    tensors = b"".join(
        TENSOR.pack(s(t.name), storage_index[t.storage], t.byte_offset, DTYPE_CODES[t.dtype], len(t.shape),
                    *_padded(t.shape), *_padded(t.strides))
        for t in program.tensors
    )
    operands: list[int] = []
    attrs: list[bytes] = []
    instructions = []
    for ins in program.instructions:
        first_operand, first_attr = len(operands), len(attrs)
        operands += [tensor_index[n] for n in (*ins.inputs, *ins.outputs)]
        first_wait = len(operands)
        operands += ins.waits
        attrs += [_attr(s, name, value) for name, value in ins.attrs]
        instructions.append(INSTRUCTION.pack(
            s(ins.op), s(ins.kernel), first_operand, len(ins.inputs), len(ins.outputs), first_attr, len(ins.attrs),
            ins.stream, first_wait, len(ins.waits), 0,
        ))
    entries = b"".join(ENTRY.pack(s(e.name), e.first, e.count, 0) for e in program.entries)
    sections = [
        (bytes(s.pool), len(s.pool)), (arenas, len(program.arenas)), (storages, len(program.storages)),
        (tensors, len(program.tensors)), (b"".join(instructions), len(instructions)),
        (struct.pack(f"<{len(operands)}i", *operands), len(operands)), (b"".join(attrs), len(attrs)),
        (entries, len(program.entries)),
    ]
    body, table, offset = bytearray(), [], HEADER.size
    for data, count in sections:
        padding = -offset % 8
        body += b"\0" * padding
        offset += padding
        table += [offset, count]
        body += data
        offset += len(data)
    return HEADER.pack(MAGIC, VERSION, *ABI, 0, program.fingerprint, *table) + bytes(body)


def _padded(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims, *(0,) * (MAX_RANK - len(dims)))


def _attr(s: _Strings, name: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return ATTR.pack(s(name), 3, 0, 0.0, s(value), 0)
    if isinstance(value, float):
        return ATTR.pack(s(name), 2, 0, value, 0, 0)
    return ATTR.pack(s(name), 1, value, 0.0, 0, 0)


def from_bytes(data: bytes) -> Program:
    """The inverse of `to_bytes`. ValueError for anything that is no program file of this version; the engine has its own,
    stricter reader."""
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a valid program file: {error}") from error


def _read(data: bytes) -> Program:
    magic, version, _, _, _, fingerprint, *table = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not a program file of format {VERSION} (magic {magic!r}, format {version})")
    pool = data[table[0]:table[0] + table[1]]

    def text(offset: int) -> str:
        return pool[offset:pool.index(b"\0", offset)].decode()

    def rows(section: int, layout: struct.Struct):
        offset, count = table[2 * section], table[2 * section + 1]
        if offset + count * layout.size > len(data):
            raise ValueError(f"section {section} reaches past the end of the file")
        return [layout.unpack_from(data, offset + i * layout.size) for i in range(count)]

    arenas = [Arena(text(n), size, align) for n, _, size, align in rows(1, ARENA)]
    storages = [Storage(text(n), None if a < 0 else arenas[a].name, offset, size, flags)
                for n, a, offset, size, flags, _ in rows(2, STORAGE)]
    tensors = [TensorEntry(text(n), storages[st].name, offset, DTYPE_NAMES[dtype], dims[:rank], dims[6:6 + rank])
               for n, st, offset, dtype, rank, *dims in rows(3, TENSOR) for dims in (tuple(dims),)]
    operands = [row[0] for row in rows(5, OPERAND)]
    attrs = [(text(n), {1: i, 2: f, 3: text(st)}[kind]) for n, kind, i, f, st, _ in rows(6, ATTR)]

    def names(first: int, count: int) -> tuple[str | None, ...]:
        return tuple(None if i < 0 else tensors[i].name for i in operands[first:first + count])

    instructions = [
        Instruction(text(op), names(first, inputs), names(first + inputs, outputs),
                    tuple(attrs[first_attr:first_attr + num_attrs]), text(kernel), stream,
                    tuple(operands[first_wait:first_wait + num_waits]))
        for op, kernel, first, inputs, outputs, first_attr, num_attrs, stream, first_wait, num_waits, _
        in rows(4, INSTRUCTION)
    ]
    entries = [Entry(text(n), first, count) for n, first, count, _ in rows(7, ENTRY)]
    return Program(fingerprint, arenas, storages, tensors, instructions, entries)
