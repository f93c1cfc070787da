"""The element and block formats a stored tensor can have: names, sizes, and the codes files use for them.

A *block* format stores ``block`` consecutive elements of a row in ``block_bytes`` bytes; a plain format has blocks of
one element. A tensor ``[N, K]`` in a block format is N rows of K / block blocks, which is exactly what a GGUF holds.
numpy has no bfloat16: arrays of ``bf16`` travel as ``uint16`` with the format's name beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import WeightError


@dataclass(frozen=True)
class Format:
    """One storage format. ``numpy`` is the dtype of the arrays that carry it (uint8 for the block formats)."""

    name: str
    block: int  # elements in a block
    block_bytes: int
    numpy: np.dtype
    gguf_code: int | None = None  # ggml_type in a GGUF's tensor table
    gguf_file_type: int | None = None  # general.file_type of a GGUF whose matrices mostly have this format
    safetensors_code: str | None = None

    @property
    def is_block(self) -> bool:
        return self.block > 1


def _plain(name: str, numpy_name: str, gguf: int | None = None, file_type: int | None = None, st: str | None = None):
    dtype = np.dtype(numpy_name)
    return Format(name, 1, dtype.itemsize, dtype, gguf, file_type, st)


def _blocks(name: str, block: int, block_bytes: int, gguf: int, file_type: int) -> Format:
    return Format(name, block, block_bytes, np.dtype("u1"), gguf, file_type)


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        _plain("f32", "<f4", 0, 0, "F32"),
        _plain("f16", "<f2", 1, 1, "F16"),
        _plain("bf16", "<u2", 30, 32, "BF16"),
        _plain("f64", "<f8", 28, None, "F64"),
        _plain("i8", "i1", 24, None, "I8"),
        _plain("u8", "u1", None, None, "U8"),
        _plain("i32", "<i4", 26, None, "I32"),
        _plain("i64", "<i8", 27, None, "I64"),
        _blocks("q4_0", 32, 18, 2, 2),  # f16 d, 16 bytes of nibbles
        _blocks("q4_1", 32, 20, 3, 3),  # f16 d, f16 m, 16 bytes of nibbles
        _blocks("q5_0", 32, 22, 6, 8),  # f16 d, u32 of fifth bits, 16 bytes of nibbles
        _blocks("q5_1", 32, 24, 7, 9),  # f16 d, f16 m, u32 of fifth bits, 16 bytes of nibbles
        _blocks("q8_0", 32, 34, 8, 7),  # f16 d, 32 int8
        _blocks("q4_k", 256, 144, 12, 14),  # f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles
        _blocks("q5_k", 256, 176, 13, 16),  # as q4_k, with 32 bytes of fifth bits before the nibbles
        _blocks("q6_k", 256, 210, 14, 18),  # 128 bytes of nibbles, 64 of high bits, 16 int8 scales, f16 d
    )
}
BY_GGUF_CODE = {form.gguf_code: form for form in FORMATS.values() if form.gguf_code is not None}
BY_SAFETENSORS_CODE = {form.safetensors_code: form for form in FORMATS.values() if form.safetensors_code is not None}
FLOAT_FORMATS = ("f32", "f16", "bf16", "f64")


def format_of(name: str) -> Format:
    """The format called ``name``; raises WeightError listing the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise WeightError(f"unknown tensor format {name!r}; known formats: {', '.join(FORMATS)}") from None


def element_count(shape: Sequence[int]) -> int:
    """The product of the dimensions (1 for a scalar), in Python integers, which do not overflow."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def byte_count(name: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor of this format and logical shape; raises WeightError when rows are not whole blocks."""
    form = format_of(name)
    if form.is_block and (not shape or shape[-1] % form.block):
        raise WeightError(
            f"format {name} stores rows in blocks of {form.block} elements, so a tensor of shape {list(shape)} cannot have it"
        )
    return element_count(shape) // form.block * form.block_bytes


def data_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the numpy array that carries a tensor: the logical shape, or rows of bytes for a block format."""
    form = format_of(name)
    if not form.is_block:
        return tuple(shape)
    byte_count(name, shape)  # refuses rows that are not whole blocks
    return (*shape[:-1], shape[-1] // form.block * form.block_bytes)
