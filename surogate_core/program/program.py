"""The program: what the engine verifies and runs. Plain tables; see `format` for the file and `text` for the dump."""

from __future__ import annotations

from dataclasses import dataclass, field

PERSISTENT, HOST_WRITTEN, FIXED = 1, 2, 4
"""Storage flags: contents survive between entries; the host writes it before a run; nothing writes it while programs run."""

DTYPE_CODES = {
    "f32": 1, "f16": 2, "bf16": 3, "f64": 4, "i8": 8, "u8": 9, "i32": 10, "i64": 11,
    "q4_0": 64, "q4_1": 65, "q5_0": 66, "q5_1": 67, "q8_0": 68, "q4_k": 69, "q5_k": 70, "q6_k": 71,
}
"""As in native/include/surogate/abi.h; a test keeps the two equal."""


@dataclass(frozen=True)
class Arena:
    """One allocation. Storages lie in it at fixed offsets."""

    name: str
    bytes: int
    alignment: int = 64


@dataclass(frozen=True)
class Storage:
    """A range of bytes: of an arena, or (arena None) of memory that the session's owner binds by name."""

    name: str
    arena: str | None
    offset: int
    bytes: int
    flags: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """A typed view of a storage. Strides count elements."""

    name: str
    storage: str
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One kernel call. Operands are tensor names, None where absent; ``kernel`` "" lets the registry choose."""

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    attrs: tuple[tuple[str, int | float | str], ...] = ()
    kernel: str = ""
    stream: int = 0
    waits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A named range of instructions that `Session.run` runs."""

    name: str
    first: int
    count: int


@dataclass
class Program:
    """Tables by name, in file order. ``fingerprint``: SHA-256 of the file with zeros in its place, so equal
    programs have equal ones."""

    fingerprint: bytes = bytes(32)
    arenas: list[Arena] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    _by_name: dict[str, TensorEntry] = field(default_factory=dict, init=False, repr=False, compare=False)

    def tensor(self, name: str) -> TensorEntry:
        """The tensor of that name. KeyError where there is none."""
        if len(self._by_name) > len(self.tensors):
            self._by_name.clear()
        self._by_name.update((t.name, t) for t in self.tensors[len(self._by_name):])
        return self._by_name[name]

    def external(self) -> list[Storage]:
        """Storages that must be bound before a run."""
        return [s for s in self.storages if s.arena is None]

    def to_bytes(self) -> bytes:
        from .format import to_bytes

        return to_bytes(self)

    def text(self) -> str:
        from .text import dump

        return dump(self)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))
