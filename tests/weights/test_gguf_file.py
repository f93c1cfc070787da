"""GGUF: equal to the `gguf` package both ways, and a clear error for whatever else a file can hold."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.weights.gguf_file import GGUFFile, typed, write_gguf_file
from surogate_core.weights.store import WeightStore
from surogate_core.weights.tensor import StoredTensor, from_f32

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "a.negative": -3,
    "a.big": 1 << 40,
    "a.float": 0.5,
    "a.bool": True,
    "a.text": "Zürich",
    "a.texts": ["x", "", "yy"],
    "a.ints": [1, 2, 3],
    "a.mixed": [1, 1.5],
    "a.types": np.array([1, 3], np.int32),
    "a.byte": np.uint8(7),
    "a.none": [],
}


def sample_tensors() -> list[StoredTensor]:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 64)).astype(np.float32)
    formats = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0")
    return [from_f32(f"blk.0.{name}", values, name) for name in formats] + [
        from_f32("cube", rng.normal(size=(2, 3, 5)).astype(np.float32)),
        from_f32("norm", rng.normal(size=(5,)).astype(np.float32)),
    ]


@pytest.fixture
def whole(tmp_path):
    write_gguf_file(tmp_path / "whole.gguf", METADATA, sample_tensors())
    return tmp_path / "whole.gguf"


def test_the_package_reads_what_we_write(whole):
    reader = gguf.GGUFReader(whole)
    tensors = {tensor.name: tensor for tensor in sample_tensors()}
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for read in reader.tensors:
        expected = tensors[read.name]
        assert tuple(int(dim) for dim in read.shape) == expected.shape[::-1]
        assert np.asarray(read.data).tobytes() == expected.data.tobytes()
        assert read.data_offset % 32 == 0
    assert reader.get_field("a.text").contents() == "Zürich"
    assert reader.get_field("a.types").types[-1] == gguf.GGUFValueType.INT32


def test_we_read_what_the_package_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint64("a.big", 1 << 50)
    writer.add_array("a.texts", ["x", "é"])
    writer.add_array("a.floats", [0.5, 1.5])
    values = np.random.default_rng(1).normal(size=(4, 96)).astype(np.float32)
    writer.add_tensor("w", values)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    store = WeightStore.open(tmp_path / "x.gguf")
    assert store.kind == "gguf" and store.config["a.big"] == 1 << 50 and store.config["a.texts"] == ["x", "é"]
    np.testing.assert_array_equal(store.get("w").data, values)
    assert store.get("q").dtype == "q8_0" and store.get("q").shape == (4, 96)
    np.testing.assert_array_equal(store.get("q").data, packed)


def test_a_round_trip_keeps_values_types_and_bytes(whole, tmp_path):
    file = GGUFFile(whole)
    for key, value in METADATA.items():
        assert file.metadata[key] == (value.tolist() if isinstance(value, np.ndarray) else value)
    assert file.types["a.byte"] == "u8" and file.types["a.types"] == "[i32]" and file.types["a.big"] == "u64"
    metadata = {key: typed(value, file.types[key]) for key, value in file.metadata.items()}
    write_gguf_file(tmp_path / "again.gguf", metadata, [file.get(name) for name in file.names()])
    assert (tmp_path / "again.gguf").read_bytes() == whole.read_bytes()
    assert np.shares_memory(file.get("blk.0.q4_1").data, file._bytes)


def test_another_alignment_is_written_and_read(tmp_path):
    write_gguf_file(tmp_path / "x.gguf", {**METADATA, "general.alignment": 128}, sample_tensors())
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.alignment == 128
    np.testing.assert_array_equal(file.get("norm").data, sample_tensors()[-1].data)


def test_every_truncation_is_a_weight_error(whole, tmp_path):
    data = whole.read_bytes()
    head = next(entry.offset for entry in [GGUFFile(whole)._entries["blk.0.f32"]])
    for length in [*range(head + 1), len(data) - 100]:
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(WeightError, match="cut"):
            GGUFFile(tmp_path / "cut")


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_head_byte_is_read_or_refused(whole, tmp_path, flip):
    data = whole.read_bytes()
    for at in range(GGUFFile(whole)._entries["blk.0.f32"].offset):
        changed = bytearray(data)
        changed[at] ^= flip
        (tmp_path / "changed").write_bytes(changed)
        try:
            file = GGUFFile(tmp_path / "changed")
            for name in file.names():
                file.get(name).to_f32()
        except WeightError:
            pass


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor_info(name="w", dims=(32, 2), code=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def head(entries: list[bytes] = (), tensors: list[bytes] = (), version=3, magic=b"GGUF", counts=None) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    return magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)


ALIGNMENT = text("general.alignment")


@pytest.mark.parametrize(
    "data,message",
    [
        (head(magic=b"GGML"), "not a GGUF file"),
        (head(version=1), "version 1 cannot be read"),
        (head(version=0x03000000), "version 50331648"),
        (head(counts=(1 << 60, 0)), "number of tensors"),
        (head(counts=(0, 1 << 63)), "number of metadata entries"),
        (head([struct.pack("<Q", 1 << 62) + b"abc"]), "length of a metadata key"),
        (head([text("k") + struct.pack("<I", 99)]), "'k' has unknown type 99"),
        (head([text("k") + struct.pack("<IIQ", 9, 9, 1)]), "'k' is an array of arrays"),
        (head([text("k") + struct.pack("<IIQ", 9, 77, 1)]), "array of unknown type 77"),
        (head([text("k") + struct.pack("<IIQ", 9, 4, 1 << 61)]), "length of 'k'"),
        (head([text("k") + struct.pack("<IIQ", 9, 8, 1 << 40)]), "length of 'k'"),
        (head([text("k") + struct.pack("<I", 8) + text(b"\xff\xfe")]), "not UTF-8"),
        (head([text("k") + struct.pack("<II", 4, 1)] * 2), "'k' is given twice"),
        (head([ALIGNMENT + struct.pack("<II", 4, 48)]), "power of two"),
        (head([ALIGNMENT + struct.pack("<II", 4, 0)]), "power of two"),
        (head([ALIGNMENT + struct.pack("<I", 8) + text("32")]), "power of two"),
        (head(tensors=[tensor_info(dims=(2,) * 5)]), "5 dimensions"),
        (head(tensors=[tensor_info(code=99)]), "has type 99, which cannot be read; choose a file with f32"),
        (head(tensors=[tensor_info(code=16)]), "has type iq2_xxs"),
        (head(tensors=[tensor_info(code=12)]), "whole q4_k blocks of 256"),
        (head(tensors=[tensor_info(dims=(), code=2)]), "whole q4_0 blocks"),
        (head(tensors=[tensor_info(offset=7)]), "not a multiple of 32"),
        (head(tensors=[tensor_info(offset=1 << 63)]), "'w': ends at byte"),
        (head(tensors=[tensor_info(dims=(1 << 62, 1 << 62))]), "'w': ends at byte"),
        (head(tensors=[tensor_info(), tensor_info()]), "listed twice"),
        (head(tensors=[tensor_info(), tensor_info(name="v", offset=32)]), "'w' and 'v' share bytes"),
    ],
)
def test_hostile_files(tmp_path, data, message):
    (tmp_path / "bad.gguf").write_bytes(data + bytes(1024))
    with pytest.raises(WeightError, match=message) as caught:
        GGUFFile(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(caught.value)


def test_a_part_of_a_split_file_is_refused(tmp_path):
    write_gguf_file(tmp_path / "x.gguf", {**METADATA, "split.count": np.uint16(3)}, sample_tensors())
    with pytest.raises(WeightError, match="one of 3 parts"):
        WeightStore.open(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "metadata,tensors,message",
    [
        ({}, [], "needs general.architecture"),
        ({"general.architecture": "x", "k": None}, [], "NoneType cannot be stored"),
        ({"general.architecture": "x", "k": 1 << 70}, [], "does not fit 64 bits"),
        ({"general.architecture": "x", "k": [1, "a"]}, [], "'k'"),
        ({"general.architecture": "x"}, sample_tensors()[:1] * 2, "given twice"),
        ({"general.architecture": "x"}, [from_f32("w", np.zeros((1,) * 5, np.float32))], "5 dimensions"),
    ],
)
def test_writer_refusals(tmp_path, metadata, tensors, message):
    with pytest.raises(WeightError, match=message):
        write_gguf_file(tmp_path / "x.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []
