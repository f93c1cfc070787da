"""A small writer of program files, apart from the product's own, so that each can be wrong in its own way."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "u8": 9, "i32": 10, "q4_1": 65}
ABSENT, PERSISTENT, INPUT, FIXED = -1, 1, 2, 4


def dense_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


@dataclass
class Draft:
    """Tables of a program file. The methods return the index of what they add."""

    arenas: list[tuple] = field(default_factory=list)
    storages: list[tuple] = field(default_factory=list)
    tensors: list[tuple] = field(default_factory=list)
    instructions: list[tuple] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    attrs: list[tuple] = field(default_factory=list)
    entries: list[tuple] = field(default_factory=list)
    blob: bytes = b"\0"

    def name(self, text: str) -> int:
        if not text:
            return 0
        offset = len(self.blob)
        self.blob += text.encode() + b"\0"
        return offset

    def arena(self, name: str, size: int, alignment: int = 64) -> int:
        self.arenas.append((self.name(name), 0, size, alignment))
        return len(self.arenas) - 1

    def storage(self, name: str, arena: int, offset: int, size: int, flags: int = 0) -> int:
        self.storages.append((self.name(name), arena, offset, size, flags, 0))
        return len(self.storages) - 1

    def tensor(self, name, storage, shape, dtype="f32", offset=0, strides=None) -> int:
        pad = [0] * (6 - len(shape))
        strides = list(dense_strides(shape) if strides is None else strides)
        code = DTYPES.get(dtype, dtype)
        self.tensors.append((self.name(name), storage, offset, code, len(shape), *shape, *pad, *strides, *pad))
        return len(self.tensors) - 1

    def instruction(self, op, inputs=(), outputs=(), attrs=None, kernel="", stream=0, waits=()) -> int:
        first_operand, first_attr = len(self.operands), len(self.attrs)
        self.operands += [*inputs, *outputs]
        for key in sorted(attrs or {}):
            value = attrs[key]
            kind, i, f, s = (2, 0, value, 0) if isinstance(value, float) else (1, int(value), 0.0, 0)
            self.attrs.append((self.name(key), kind, i, f, s, 0))
        first_wait = len(self.operands)
        self.operands += waits
        self.instructions.append(
            (self.name(op), self.name(kernel), first_operand, len(inputs), len(outputs), first_attr,
             len(attrs or {}), stream, first_wait, len(waits), 0)
        )  # fmt: skip
        return len(self.instructions) - 1

    def entry(self, name: str, first: int = 0, count: int | None = None) -> int:
        count = len(self.instructions) - first if count is None else count
        self.entries.append((self.name(name), first, count, 0))
        return len(self.entries) - 1

    def to_bytes(self, version: int = 1, abi: tuple[int, int] = (1, 0), magic: bytes = b"SGPROGRM") -> bytes:
        def table(layout: str, rows: list) -> bytes:
            return b"".join(struct.pack("<" + layout, *row) for row in rows)

        parts = [
            (self.blob, len(self.blob)),
            (table("IIQQ", self.arenas), len(self.arenas)),
            (table("IiQQII", self.storages), len(self.storages)),
            (table("IiQii12q", self.tensors), len(self.tensors)),
            (table("IIIHHIIIIII", self.instructions), len(self.instructions)),
            (struct.pack(f"<{len(self.operands)}i", *self.operands), len(self.operands)),
            (table("IiqdII", self.attrs), len(self.attrs)),
            (table("IIII", self.entries), len(self.entries)),
        ]
        header = struct.pack("<8sIIII32s", magic, version, *abi, 0, bytes(32))
        offset, body = len(header) + 16 * len(parts), b""
        for data, count in parts:
            header += struct.pack("<QQ", offset + len(body), count)
            body += data + bytes(-len(data) % 8)
        return header + body


def adding(n: int = 8) -> Draft:
    """total = x + weight (external), then y = total + x: the smallest program with every kind of storage."""
    draft = Draft()
    arena = draft.arena("main", 12 * n)
    x = draft.tensor("x", draft.storage("x", arena, 0, 4 * n, INPUT), [n])
    total = draft.tensor("total", draft.storage("total", arena, 4 * n, 4 * n), [n])
    y = draft.tensor("y", draft.storage("y", arena, 8 * n, 4 * n, PERSISTENT), [n])
    weight = draft.tensor("weight", draft.storage("weight", -1, 0, 4 * n), [n])
    draft.instruction("fake_add", [x, weight], [total])
    draft.instruction("fake_add", [total, x], [y], kernel="low")
    draft.entry("step")
    return draft
