"""Block formats against the `gguf` package, and what rounding must do."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants as reference

from surogate_core.errors import WeightError
from surogate_core.weights.formats import FORMATS, byte_count
from surogate_core.weights.quants import bf16_to_f32, dequantize, f32_to_bf16, quantize

BLOCK_FORMATS = [name for name, form in FORMATS.items() if form.is_block]
HALF_FIELDS = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
               "q6_k": (208,)}  # fmt: skip


def random_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes are a valid block once its f16 fields are finite."""
    rng = np.random.default_rng(seed)
    form = FORMATS[name]
    data = rng.integers(0, 256, (rows * blocks, form.block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[name]:
        data[:, at : at + 2] = rng.normal(0, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, blocks * form.block_bytes)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_decoding_equals_the_gguf_package_bit_for_bit(name):
    data = random_blocks(name, 7, 3)
    expected = reference.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(dequantize(data, name), expected)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("kind", ["normal", "zeros", "constant", "outlier"])
def test_encoding_equals_the_gguf_package(name, kind):
    rng = np.random.default_rng(1)
    values = rng.normal(0, 0.05, (9, 96)).astype(np.float32)
    if kind == "zeros":
        values[:] = 0
    elif kind == "constant":
        values[:] = 0.37
    elif kind == "outlier":
        values[:, 5] = -60
    expected = reference.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(quantize(values, name), expected)


@pytest.mark.parametrize("name,bound", [("q4_k", 0.10), ("q5_k", 0.05), ("q6_k", 0.025)])
def test_k_encoders_round_trip_within_their_step(name, bound):
    values = np.random.default_rng(2).normal(0, 1, (4, 512)).astype(np.float32)
    values[0] = 0
    values[1] += 3  # all positive: the min clamps at zero
    decoded = dequantize(quantize(values, name), name)
    assert np.array_equal(decoded[0], values[0])
    error = np.sqrt(np.mean((decoded - values)[2:] ** 2))
    assert 0 < error < bound
    assert np.sqrt(np.mean((decoded - values)[1] ** 2)) < 2 * bound


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_quantize_gives_the_declared_number_of_bytes(name):
    data = quantize(np.ones((3, 512), np.float32), name)
    assert data.nbytes == byte_count(name, (3, 512))


def test_bf16_rounds_to_nearest_even_and_keeps_specials():
    values = np.array([1.0, 1.00390625, 1.01171875, -0.0, np.inf, -np.inf, 3.4e38, 1e-40], np.float32)
    bits = f32_to_bf16(values)
    assert bits[:4].tolist() == [0x3F80, 0x3F80, 0x3F82, 0x8000]  # both halves go to the even neighbour
    assert bits[4:7].tolist() == [0x7F80, 0xFF80, 0x7F80]
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.array([np.nan, -np.nan], np.float32)))).all()
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(signalling))).all()


def test_every_bf16_pattern_survives_a_round_trip():
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = (bits & 0x7F80) != 0x7F80
    np.testing.assert_array_equal(f32_to_bf16(bf16_to_f32(bits))[finite], bits[finite])


def test_refusals_name_the_format_and_the_cure():
    with pytest.raises(WeightError, match="blocks of 256"):
        quantize(np.zeros((2, 640), np.float32), "q4_k")
    with pytest.raises(WeightError, match="NaN or infinity"):
        quantize(np.full((1, 32), np.nan, np.float32), "q8_0")
    with pytest.raises(WeightError, match="65504"):
        quantize(np.full((1, 2), 1e6, np.float32), "f16")
    with pytest.raises(WeightError, match="known formats"):
        byte_count("q9_9", (1, 32))
    with pytest.raises(WeightError, match="34-byte blocks"):
        dequantize(np.zeros((1, 33), np.uint8), "q8_0")
