"""GGUF files: a mapped reader that checks every count and offset against the file's size, and a writer.

A file is: magic ``GGUF``, u32 version, u64 number of tensors, u64 number of metadata entries, the entries (key, type,
value), the tensor table (name, dimensions, ggml type, offset), padding to ``general.alignment``, and the data, each tensor
at an aligned offset. Dimensions are written innermost first; shapes here are in numpy's order, ``[out, in]``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WeightError
from ..files import replacing
from .files import map_file, write_array
from .formats import BY_GGUF_CODE, FORMATS, byte_count, data_shape
from .tensor import AnyTensor, StoredTensor

MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
_AGAIN = "copy or download the file again"

# metadata type code -> (name, struct letter); strings and arrays are read apart
_SCALARS = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"), 6: ("f32", "f"),
    7: ("bool", "?"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NUMPY_CODES = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12,
}  # fmt: skip
# ggml types that this reader does not decode: known by name so that the refusal can say what the file holds
_OTHER_TYPES = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl",
    21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 25: "i16", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file; from the beginning of the data until the table is whole


class _Cursor:
    """Reads values one after another and refuses to go past the end of the file."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.at, self.size = path, 0, len(data)
        self.view = memoryview(data)

    def take(self, count: int, what: str) -> memoryview:
        if count > self.size - self.at:
            raise WeightError(
                f"{self.path}: {what} needs {count:,} bytes at byte {self.at:,}, but the file has {self.size:,}; "
                f"it is truncated or damaged; {_AGAIN}"
            )
        self.at += count
        return self.view[self.at - count : self.at]

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of things that take at least ``smallest`` bytes each, so a giant one is refused before any loop."""
        count = self.number("Q", what)
        if count * smallest > self.size - self.at:
            raise WeightError(
                f"{self.path}: announces {count:,} for the {what}, more than the {self.size:,} bytes of the file can hold; "
                f"it is truncated or damaged; {_AGAIN}"
            )
        return count

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.count(f"length of {what}", 1), what))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise WeightError(f"{self.path}: {what} is not UTF-8 text ({error.reason}); {_AGAIN}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """As many `string`s, with the same checks in one loop: a vocabulary has a hundred thousand."""
        length_at, view, found = struct.Struct("<Q").unpack_from, self.view, []
        for _ in range(count):
            start = self.at + 8
            stop = start + length_at(view, self.at)[0] if start <= self.size else self.size + 1
            if stop > self.size:
                self.string(what)  # says what is wrong
            try:
                found.append(str(view[start:stop], "utf-8"))
            except UnicodeDecodeError:
                self.string(what)
            self.at = stop
        return found


class GGUFFile:
    """One mapped file. ``metadata`` (plain Python values, arrays as lists), ``names()``, ``get(name)``.

    ``types`` keeps each entry's type as written (``"u32"``, ``"[i32]"`` ...), so that a copy can be written as it was.
    """

    def __init__(self, path: str | Path) -> None:
        """Maps the file and checks header, metadata and tensor table; raises WeightError naming file, key or tensor."""
        self.path = Path(path)
        self._bytes = map_file(self.path)
        cursor = _Cursor(self.path, self._bytes)
        self.metadata: dict[str, Any] = {}
        self.types: dict[str, str] = {}
        if bytes(cursor.take(4, "the magic")) != b"GGUF":
            raise WeightError(f"{self.path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
        self.version = cursor.number("I", "the version")
        if self.version not in (2, 3):
            raise WeightError(
                f"{self.path}: GGUF version {self.version} cannot be read, only 2 and 3; convert the file again"
            )
        num_tensors = cursor.count("number of tensors", 24)
        num_entries = cursor.count("number of metadata entries", 13)
        for _ in range(num_entries):
            self._read_entry(cursor)
        self.alignment = self._check_alignment()
        self._entries: dict[str, _Entry] = {}
        for _ in range(num_tensors):
            self._read_tensor(cursor)
        data_start = -(-cursor.at // self.alignment) * self.alignment
        self._entries = {name: self._place(name, entry, data_start) for name, entry in self._entries.items()}
        self._check_overlaps()

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def get(self, name: str) -> StoredTensor:
        """The tensor as a view into the mapped file. KeyError if absent."""
        entry = self._entries[name]
        form = FORMATS[entry.dtype]
        raw = self._bytes[entry.offset : entry.offset + byte_count(entry.dtype, entry.shape)]
        if raw.ctypes.data % form.numpy.itemsize:
            raw = raw.copy()
        return StoredTensor(
            name, entry.dtype, entry.shape, raw.view(form.numpy).reshape(data_shape(entry.dtype, entry.shape))
        )

    def _read_entry(self, cursor: _Cursor) -> None:
        key = cursor.string("a metadata key")
        if key in self.metadata:
            raise WeightError(f"{self.path}: metadata key {key!r} is given twice; write the file again")
        code = cursor.number("I", f"the type of {key!r}")
        if code == _ARRAY:
            self.metadata[key], element = self._read_array(cursor, key)
            self.types[key] = f"[{element}]"
        else:
            self.metadata[key], self.types[key] = self._read_scalar(cursor, key, code)

    def _read_scalar(self, cursor: _Cursor, key: str, code: int) -> tuple[Any, str]:
        if code == _STRING:
            return cursor.string(f"the value of {key!r}"), "str"
        if code not in _SCALARS:
            raise WeightError(f"{self.path}: metadata key {key!r} has unknown type {code}; {_AGAIN}")
        name, letter = _SCALARS[code]
        return cursor.number(letter, f"the value of {key!r}"), name

    def _read_array(self, cursor: _Cursor, key: str) -> tuple[list[Any], str]:
        code = cursor.number("I", f"the element type of {key!r}")
        if code == _STRING:
            count = cursor.count(f"length of {key!r}", 8)
            return cursor.strings(count, f"an element of {key!r}"), "str"
        if code not in _SCALARS:
            kind = "an array of arrays" if code == _ARRAY else f"an array of unknown type {code}"
            raise WeightError(f"{self.path}: metadata key {key!r} is {kind}, which cannot be read; {_AGAIN}")
        name, letter = _SCALARS[code]
        dtype = np.dtype("<" + letter)
        count = cursor.count(f"length of {key!r}", dtype.itemsize)
        return np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype).tolist(), name

    def _check_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise WeightError(
                f"{self.path}: general.alignment is {alignment!r}, not a power of two from 8 up; {_AGAIN}"
            )
        return alignment

    def _read_tensor(self, cursor: _Cursor) -> None:
        name = cursor.string("a tensor's name")
        where = f"{self.path}: tensor {name!r}"
        if name in self._entries:
            raise WeightError(f"{where} is listed twice; write the file again")
        num_dims = cursor.number("I", f"the number of dimensions of {name!r}")
        if num_dims > MAX_DIMS:
            raise WeightError(f"{where} has {num_dims} dimensions, but at most {MAX_DIMS} are allowed; {_AGAIN}")
        shape = tuple(cursor.number("Q", f"the shape of {name!r}") for _ in range(num_dims))[::-1]
        code = cursor.number("I", f"the type of {name!r}")
        offset = cursor.number("Q", f"the offset of {name!r}")
        if code not in BY_GGUF_CODE:
            known = ", ".join(form.name for form in BY_GGUF_CODE.values())
            raise WeightError(
                f"{where} has type {_OTHER_TYPES.get(code, code)}, which cannot be read; choose a file with {known}"
            )
        self._entries[name] = _Entry(BY_GGUF_CODE[code].name, shape, offset)

    def _place(self, name: str, entry: _Entry, data_start: int) -> _Entry:
        where = f"{self.path}: tensor {name!r}"
        form = FORMATS[entry.dtype]
        if form.is_block and (not entry.shape or entry.shape[-1] % form.block):
            raise WeightError(
                f"{where}: rows of shape {list(entry.shape)} are not whole {entry.dtype} blocks of {form.block}; {_AGAIN}"
            )
        size = byte_count(entry.dtype, entry.shape)
        if entry.offset % self.alignment:
            raise WeightError(f"{where}: offset {entry.offset:,} is not a multiple of {self.alignment}; {_AGAIN}")
        start = data_start + entry.offset
        if start + size > len(self._bytes):
            raise WeightError(
                f"{where}: ends at byte {start + size:,}, but the file has {len(self._bytes):,}; it is truncated; {_AGAIN}"
            )
        return _Entry(entry.dtype, entry.shape, start)

    def _check_overlaps(self) -> None:
        spans = sorted((e.offset, e.offset + byte_count(e.dtype, e.shape), name) for name, e in self._entries.items())
        last_end, last = 0, ""
        for start, end, name in spans:
            if start < last_end and end > start:
                raise WeightError(f"{self.path}: tensors {last!r} and {name!r} share bytes; write the file again")
            if end > last_end:
                last_end, last = end, name


# -- writing -----------------------------------------------------------------------------------------------------------


def _string_bytes(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _scalar_code(key: str, value: Any) -> int:
    if isinstance(value, np.generic):
        return _NUMPY_CODES[value.dtype.str[1:]]
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise WeightError(f"GGUF metadata {key!r}: {value} does not fit 64 bits")
        if value < 0:
            return 5 if value >= -(1 << 31) else 11
        return 4 if value < 1 << 32 else 10
    if isinstance(value, float):
        return 6
    raise WeightError(
        f"GGUF metadata {key!r}: a {type(value).__name__} cannot be stored; use numbers, strings, bools, lists"
    )


def _value_bytes(key: str, value: Any) -> bytes:
    """Type code and value. Python ints become u32 (i32 when negative, 64 bits when large), floats f32; a numpy scalar or
    array keeps its own type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string_bytes(value)
    if isinstance(value, list | tuple | np.ndarray):
        return struct.pack("<I", _ARRAY) + _array_bytes(key, value)
    code = _scalar_code(key, value)
    return struct.pack("<I" + _SCALARS[code][1], code, value)


def _array_bytes(key: str, values: Any) -> bytes:
    if not isinstance(values, np.ndarray):
        if len(values) == 0 or all(isinstance(value, str) for value in values):
            return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string_bytes, values))
        kinds = {_scalar_code(key, value) for value in values}
        code = kinds.pop() if len(kinds) == 1 else 11 if kinds <= {4, 5, 10, 11} else 6 if kinds <= {4, 5, 6} else None
        if code is None:
            raise WeightError(f"GGUF metadata {key!r}: an array must hold values of one type")
        values = np.array(values, "<" + _SCALARS[code][1])
    if values.ndim != 1:
        raise WeightError(f"GGUF metadata {key!r}: an array must have one dimension, not {values.ndim}")
    code = _NUMPY_CODES[values.dtype.str[1:]]
    return struct.pack("<IQ", code, len(values)) + values.astype(values.dtype.newbyteorder("<")).tobytes()


def typed(value: Any, type_name: str) -> Any:
    """A metadata value as ``GGUFFile`` returned it, made to be written with the type that ``GGUFFile.types`` recorded."""
    letters = {name: letter for name, letter in _SCALARS.values()}
    if type_name.startswith("["):
        element = type_name[1:-1]
        return list(value) if element == "str" else np.array(value, "<" + letters[element])
    return value if type_name == "str" else np.dtype("<" + letters[type_name]).type(value)


def write_gguf_file(path: str | Path, metadata: Mapping[str, Any], tensors: Iterable[AnyTensor]) -> None:
    """Writes a version 3 file, reading one tensor at a time. ``metadata`` must hold ``general.architecture``.

    Raises WeightError for a name given twice, a value or format that GGUF cannot hold, or a file that cannot be written.
    """
    tensors = list(tensors)
    if "general.architecture" not in metadata:
        raise WeightError(f"{path}: a GGUF needs general.architecture in its metadata")
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_string_bytes(key) + _value_bytes(key, value) for key, value in metadata.items()]
    names: set[str] = set()
    offset = 0
    for tensor in tensors:
        code = FORMATS[tensor.dtype].gguf_code
        if code is None or len(tensor.shape) > MAX_DIMS or tensor.name in names:
            reason = (
                "is given twice" if tensor.name in names else f"is {tensor.dtype} of {len(tensor.shape)} dimensions"
            )
            raise WeightError(f"{path}: tensor {tensor.name!r} {reason}, which a GGUF cannot hold")
        names.add(tensor.name)
        dims = tensor.shape[::-1]
        parts.append(_string_bytes(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset))
        offset += -(-tensor.nbytes // alignment) * alignment
    head = b"".join(parts)
    with replacing(path, WeightError) as file:
        file.write(head + bytes(-len(head) % alignment))
        for tensor in tensors:
            write_array(file, tensor.read())
            file.write(bytes(-tensor.nbytes % alignment))
