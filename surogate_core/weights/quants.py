"""Block formats to float32 and back, in numpy: the definition that kernels are compared with.

Decoding follows ggml's reference to the last bit (each product and sum rounded to float32, in the same order).
Encoding follows ggml's reference for the formats of 32 elements; the K formats are encoded from the plain range of each
sub-block, without ggml's search for a better scale, so their error is a little larger.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import WeightError
from .formats import FORMATS, data_shape, format_of

Array = np.ndarray
_CHUNK_BLOCKS = 1 << 16  # blocks decoded at once: bounds the temporaries of a large tensor


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bit patterns of bfloat16 -> float32 of the same shape; exact."""
    words = np.asarray(bits, np.uint16).astype(np.uint32)
    words <<= np.uint32(16)
    return words.view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """float32 -> uint16 bit patterns of bfloat16, rounding to nearest even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def dequantize(data: Array, dtype: str) -> Array:
    """A tensor of any float or block format -> float32.

    ``data``: the array that carries it (bytes ``[..., row bytes]`` for a block format). Returns ``[..., K]``, float32.
    """
    form = format_of(dtype)
    if not form.is_block:
        return _plain_to_f32(data, dtype)
    if data.dtype != np.uint8 or data.shape[-1] % form.block_bytes:
        raise WeightError(
            f"{dtype} data must be uint8 rows of {form.block_bytes}-byte blocks, not {data.dtype} of shape {data.shape}"
        )
    blocks = np.ascontiguousarray(data).reshape(-1, form.block_bytes)
    out = np.empty((len(blocks), form.block), np.float32)
    decode = _DECODERS[dtype]
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        out[start : start + _CHUNK_BLOCKS] = decode(blocks[start : start + _CHUNK_BLOCKS])
    return out.reshape(*data.shape[:-1], data.shape[-1] // form.block_bytes * form.block)


def quantize(values: Array, dtype: str) -> Array:
    """float32 ``[..., K]`` -> the array that carries it in ``dtype``; K must be whole blocks for a block format."""
    form = format_of(dtype)
    values = np.ascontiguousarray(values, np.float32)
    if not form.is_block:
        return _f32_to_plain(values, dtype)
    shape = data_shape(dtype, values.shape)
    if not np.isfinite(values).all():
        raise WeightError(
            f"cannot store NaN or infinity in {dtype}; choose f32, f16 or bf16, or find where it comes from"
        )
    blocks = values.reshape(-1, form.block)
    out = np.empty((len(blocks), form.block_bytes), np.uint8)
    encode = _ENCODERS[dtype]
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        out[start : start + _CHUNK_BLOCKS] = encode(blocks[start : start + _CHUNK_BLOCKS])
    return out.reshape(shape)


def _plain_to_f32(data: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return bf16_to_f32(data)
    if dtype in ("f32", "f16", "f64"):
        return np.asarray(data, np.float32)
    raise WeightError(f"a tensor of {dtype} holds no floating-point values")


def _f32_to_plain(values: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return f32_to_bf16(values)
    if dtype not in ("f32", "f16", "f64"):
        raise WeightError(f"float values cannot be stored as {dtype}")
    with np.errstate(over="ignore"):
        out = values.astype(FORMATS[dtype].numpy)
    if dtype == "f16" and not np.isfinite(out).all() and np.isfinite(values).all():
        raise WeightError(f"a value of {np.abs(values).max():g} is beyond float16's largest, 65504; choose bf16 or f32")
    return out


# -- pieces shared by the formats ------------------------------------------------------------------------------------


def _half(blocks: Array, at: int) -> Array:
    """The f16 at byte ``at`` of each block -> float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _half_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32).astype("<f2").view(np.uint8).reshape(len(values), 2)


def _nibbles(packed: Array) -> Array:
    """16 bytes -> 32 values: the low nibbles are elements 0-15, the high nibbles 16-31."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _pack_nibbles(values: Array) -> Array:
    half = values.shape[1] // 2
    return (values[:, :half] | (values[:, half:] << 4)).astype(np.uint8)


def _fifth_bits(packed: Array) -> Array:
    """4 bytes -> 32 values of 0 or 16; bit i belongs to element i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _inverse(scale: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


def _signed_extreme(blocks: Array) -> Array:
    """The element of largest magnitude of each block with its sign (the first on a tie) -> [blocks, 1]."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)


# -- the formats of 32 elements --------------------------------------------------------------------------------------


def _decode_q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _decode_q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).astype(np.float32) + _half(blocks, 2)


def _decode_q5_0(blocks: Array) -> Array:
    levels = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (levels.astype(np.int8) - np.int8(16)).astype(np.float32)


def _decode_q5_1(blocks: Array) -> Array:
    levels = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * levels.astype(np.float32) + _half(blocks, 2)


def _decode_q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def _encode_symmetric(blocks: Array, half_range: int) -> tuple[Array, Array]:
    """Levels 0 .. 2 * half_range - 1 around a zero at half_range; the extreme element maps to level 0."""
    scale = _signed_extreme(blocks) / np.float32(-half_range)
    levels = (blocks * _inverse(scale) + np.float32(half_range + 0.5)).astype(np.int32)
    return scale, np.minimum(levels, 2 * half_range - 1).astype(np.uint8)


def _encode_affine(blocks: Array, top: int) -> tuple[Array, Array, Array]:
    """Levels 0 .. top between the block's smallest and largest element."""
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(top)
    levels = ((blocks - low) * _inverse(scale) + np.float32(0.5)).astype(np.int32)
    return scale, low, np.minimum(levels, top).astype(np.uint8)


def _pack_fifth_bits(levels: Array) -> Array:
    return np.packbits(levels >> 4, axis=1, bitorder="little")


def _encode_q4_0(blocks: Array) -> Array:
    scale, levels = _encode_symmetric(blocks, 8)
    return np.concatenate([_half_bytes(scale), _pack_nibbles(levels)], axis=1)


def _encode_q4_1(blocks: Array) -> Array:
    scale, low, levels = _encode_affine(blocks, 15)
    return np.concatenate([_half_bytes(scale), _half_bytes(low), _pack_nibbles(levels)], axis=1)


def _encode_q5_0(blocks: Array) -> Array:
    scale, levels = _encode_symmetric(blocks, 16)
    return np.concatenate([_half_bytes(scale), _pack_fifth_bits(levels), _pack_nibbles(levels & 15)], axis=1)


def _encode_q5_1(blocks: Array) -> Array:
    scale, low, levels = _encode_affine(blocks, 31)
    parts = [_half_bytes(scale), _half_bytes(low), _pack_fifth_bits(levels), _pack_nibbles(levels & 15)]
    return np.concatenate(parts, axis=1)


def _encode_q8_0(blocks: Array) -> Array:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # halves round away from zero, as C's roundf does
    levels = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([_half_bytes(scale), levels.view(np.uint8)], axis=1)


# -- the K formats of 256 elements -----------------------------------------------------------------------------------


def _scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """12 bytes -> eight 6-bit scales and eight 6-bit mins, float32 [blocks, 8, 1] each."""
    first, middle, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([middle & 63, (last >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], mins.astype(np.float32)[:, :, None]


def _pack_scales_and_mins(scales: Array, mins: Array) -> Array:
    """uint8 [blocks, 8] of 6-bit scales and mins -> 12 bytes; the inverse of ``_scales_and_mins``."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    last = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    return np.concatenate([first, middle, last], axis=1).astype(np.uint8)


def _k_nibbles(packed: Array) -> Array:
    """128 bytes -> [blocks, 8, 32]: of each 32 bytes the low nibbles are one sub-block, the high nibbles the next."""
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _k_affine(blocks: Array, levels: Array) -> Array:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    step = _half(blocks, 0)[:, :, None] * scales
    offset = _half(blocks, 2)[:, :, None] * mins
    return (step * levels.astype(np.float32) - offset).reshape(-1, 256)


def _decode_q4_k(blocks: Array) -> Array:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:144]))


def _decode_q5_k(blocks: Array) -> Array:
    # bit j of byte l is the fifth bit of element l of sub-block j
    high = np.unpackbits(blocks[:, 16:48].reshape(-1, 1, 32), axis=1, bitorder="little")
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:176]) | (high << 4))


def _decode_q6_k(blocks: Array) -> Array:
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    levels = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * levels.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _k_encode_affine(blocks: Array, top: int) -> tuple[Array, Array]:
    """-> the 16 header bytes (d, dmin, scales, mins) and the levels [blocks, 8, 32], for q4_k and q5_k."""
    parts = blocks.reshape(-1, 8, 32)
    low = np.minimum(parts.min(axis=2), 0)  # a min is stored as its negative, so it cannot be above zero
    step = (parts.max(axis=2) - low) / np.float32(top)
    d = (step.max(axis=1, keepdims=True) / np.float32(63)).astype("<f2").astype(np.float32)
    dmin = ((-low).max(axis=1, keepdims=True) / np.float32(63)).astype("<f2").astype(np.float32)
    scales = np.clip(np.rint(step * _inverse(d)), 0, 63).astype(np.uint8)
    mins = np.clip(np.rint(-low * _inverse(dmin)), 0, 63).astype(np.uint8)
    real_step = (d * scales)[:, :, None]
    offset = (dmin * mins)[:, :, None]
    levels = np.clip(np.rint((parts + offset) * _inverse(real_step)), 0, top).astype(np.uint8)
    return np.concatenate([_half_bytes(d), _half_bytes(dmin), _pack_scales_and_mins(scales, mins)], axis=1), levels


def _pack_k_nibbles(levels: Array) -> Array:
    pairs = levels.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)


def _encode_q4_k(blocks: Array) -> Array:
    header, levels = _k_encode_affine(blocks, 15)
    return np.concatenate([header, _pack_k_nibbles(levels)], axis=1)


def _encode_q5_k(blocks: Array) -> Array:
    header, levels = _k_encode_affine(blocks, 31)
    high = np.packbits(levels >> 4, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([header, high, _pack_k_nibbles(levels & 15)], axis=1)


def _encode_q6_k(blocks: Array) -> Array:
    parts = blocks.reshape(-1, 16, 16)
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    step = extreme / np.float32(-32)
    d = (_signed_extreme(step) / np.float32(-128)).astype("<f2").astype(np.float32)
    scales = np.clip(np.rint(step * _inverse(d)), -128, 127).astype(np.int8)
    levels = np.clip(np.rint(parts * _inverse(d * scales)[:, :, None]), -32, 31).astype(np.int8) + np.int8(32)
    levels = levels.view(np.uint8).reshape(-1, 2, 4, 32)  # [block, half, group, element]
    low = (levels[:, :, :2] & 15) | ((levels[:, :, 2:] & 15) << 4)
    high = levels >> 4
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), _half_bytes(d)]
    return np.concatenate(packed, axis=1)


_DECODERS: dict[str, Callable[[Array], Array]] = {
    "q4_0": _decode_q4_0, "q4_1": _decode_q4_1, "q5_0": _decode_q5_0, "q5_1": _decode_q5_1,
    "q8_0": _decode_q8_0, "q4_k": _decode_q4_k, "q5_k": _decode_q5_k, "q6_k": _decode_q6_k,
}  # fmt: skip
_ENCODERS: dict[str, Callable[[Array], Array]] = {
    "q4_0": _encode_q4_0, "q4_1": _encode_q4_1, "q5_0": _encode_q5_0, "q5_1": _encode_q5_1,
    "q8_0": _encode_q8_0, "q4_k": _encode_q4_k, "q5_k": _encode_q5_k, "q6_k": _encode_q6_k,
}  # fmt: skip
