"""safetensors: equal to the `safetensors` package both ways, and a clear error for whatever else a file can hold."""

from __future__ import annotations

import json
import resource
import struct

import numpy as np
import pytest
import safetensors.numpy

from surogate_core.errors import WeightError
from surogate_core.files import replacing
from surogate_core.weights.quants import f32_to_bf16
from surogate_core.weights.safetensors_file import SafetensorsFile, open_folder, write_file, write_model
from surogate_core.weights.store import WeightStore
from surogate_core.weights.tensor import LazyTensor, StoredTensor, converted, from_f32


def sample_tensors() -> list[StoredTensor]:
    rng = np.random.default_rng(0)
    return [
        from_f32("a", rng.normal(size=(3, 5)).astype(np.float32)),
        from_f32("b", rng.normal(size=(7,)).astype(np.float32), "bf16"),
        from_f32("c", rng.normal(size=(2, 2, 2)).astype(np.float32), "f16"),
        StoredTensor("ids", "i64", (2,), np.array([1, -1])),
        StoredTensor("scalar", "f32", (), np.array(2.5, np.float32)),
        StoredTensor("empty", "f32", (0, 4), np.zeros((0, 4), np.float32)),
    ]


def raw_file(path, header: dict | bytes, data: bytes = bytes(64)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_the_package_reads_what_we_write(tmp_path):
    tensors = sample_tensors()
    write_file(tmp_path / "x.safetensors", [t for t in tensors if t.dtype != "bf16"])
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    for tensor in tensors:
        if tensor.dtype != "bf16":
            np.testing.assert_array_equal(loaded[tensor.name], tensor.data)


def test_we_read_what_the_package_writes(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(3, np.float16), "z": np.int8([1, 2])}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"} and set(file.names()) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.get(name).data, array)


def test_a_round_trip_is_the_identity_and_views_are_mapped(tmp_path):
    tensors = sample_tensors()
    write_file(tmp_path / "x.safetensors", tensors)
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for tensor in tensors:
        got = file.get(tensor.name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(got.data, tensor.data)
        assert not got.data.flags.writeable
    assert np.shares_memory(file.get("a").data, file._bytes)


@pytest.mark.parametrize("limit", [1, 70, 10_000])
def test_shards_hold_every_tensor_once(tmp_path, limit):
    tensors = sample_tensors()
    write_model(tmp_path, tensors, max_shard_bytes=limit)
    files = open_folder(tmp_path)
    assert set(files) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        np.testing.assert_array_equal(files[tensor.name].get(tensor.name).data, tensor.data)
    assert (tmp_path / "model.safetensors").exists() == (limit == 10_000)


def test_a_single_file_removes_the_index_of_an_earlier_save(tmp_path):
    write_model(tmp_path, sample_tensors(), max_shard_bytes=1)
    write_model(tmp_path, sample_tensors()[:1])
    assert list(open_folder(tmp_path)) == ["a"]


def test_shards_remove_the_single_file_of_an_earlier_save(tmp_path):
    write_model(tmp_path, sample_tensors()[:1])
    write_model(tmp_path, sample_tensors(), max_shard_bytes=1)
    assert not (tmp_path / "model.safetensors").exists() and len(open_folder(tmp_path)) == len(sample_tensors())


def test_every_truncation_is_a_weight_error(tmp_path):
    write_file(tmp_path / "whole", sample_tensors())
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(WeightError, match="cut"):
            SafetensorsFile(tmp_path / "cut")


def test_every_changed_header_byte_is_read_or_refused(tmp_path):
    write_file(tmp_path / "whole", sample_tensors()[:2])
    whole = bytearray((tmp_path / "whole").read_bytes())
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        changed = bytearray(whole)
        changed[at] ^= 0x15
        (tmp_path / "changed").write_bytes(changed)
        try:
            file = SafetensorsFile(tmp_path / "changed")
            for name in file.names():
                file.get(name)
        except WeightError:
            pass


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header,message",
    [
        (b"[]", "JSON object"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', "'a' twice"),
        ({"a": 3}, "must have dtype"),
        ({"a": {**ENTRY, "dtype": "F99"}}, "unknown element type 'F99'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unknown element type"),
        ({"a": {**ENTRY, "shape": [2, -2]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [True, 4]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [2.0, 2]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}, "needs .* bytes"),
        ({"a": {**ENTRY, "data_offsets": [0, 20]}}, "needs 16 bytes"),
        ({"a": {**ENTRY, "data_offsets": [16, 0]}}, "needs 16 bytes"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "not counts"),
        ({"a": {**ENTRY, "data_offsets": [1 << 63, (1 << 63) + 16]}}, "truncated"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 24]}}, "'a' and 'b' share bytes"),
        ({"__metadata__": 1}, "__metadata__"),
    ],
)
def test_hostile_headers(tmp_path, header, message):
    raw_file(tmp_path / "bad.safetensors", header)
    with pytest.raises(WeightError, match=message) as caught:
        SafetensorsFile(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)


def test_a_giant_header_length_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "bad").write_bytes(struct.pack("<Q", 1 << 62) + bytes(100))
    with pytest.raises(WeightError, match="announces a header"):
        SafetensorsFile(tmp_path / "bad")


def test_an_unaligned_tensor_is_copied(tmp_path):
    raw_file(tmp_path / "x", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}, bytes(16))
    assert SafetensorsFile(tmp_path / "x").get("a").data.flags.aligned


def test_a_type_no_kernel_reads_is_listed_and_refused_when_asked_for(tmp_path):
    safetensors.numpy.save_file({"mask": np.ones(3, bool), "x": np.ones(2, np.float32)}, tmp_path / "x")
    file = SafetensorsFile(tmp_path / "x")
    assert set(file.names()) == {"mask", "x"}
    with pytest.raises(WeightError, match="'mask' has element type BOOL"):
        file.get("mask")


@pytest.mark.parametrize(
    "weight_map,message",
    [
        ({"a": "../a.safetensors"}, "outside the folder"),
        ({"a": "gone.safetensors"}, "not in the folder"),
        ({"zz": "model.safetensors"}, "'zz' is not in"),
        ({"a": 5}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_hostile_indexes(tmp_path, weight_map, message):
    write_model(tmp_path, sample_tensors())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightError, match=message):
        open_folder(tmp_path)


def test_a_failing_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    write_model(tmp_path, sample_tensors()[:1])
    before = (tmp_path / "model.safetensors").read_bytes()

    def fails() -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightError, match="No space left on device; what was there before is untouched"):
        write_model(tmp_path, [LazyTensor("x", "f32", (4,), fails)])
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_the_system_will_not_let_grow_leaves_the_old_one(tmp_path):
    write_model(tmp_path, sample_tensors())
    before = (tmp_path / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(WeightError, match="cannot write .*model.safetensors: File too large"):
            write_model(tmp_path, [from_f32("w", np.ones((300, 300), np.float32))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_other_exceptions_pass_and_leave_no_rubbish(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "x", WeightError):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_writers_refuse_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(WeightError, match="q8_0, which safetensors cannot hold"):
        write_file(tmp_path / "x", [from_f32("w", np.ones((1, 32), np.float32), "q8_0")])
    with pytest.raises(WeightError, match="'a' is given twice"):
        write_file(tmp_path / "x", sample_tensors()[:1] * 2)
    with pytest.raises(WeightError, match="tensor 'w': f32 of shape"):
        write_file(tmp_path / "x", [LazyTensor("w", "f32", (3,), lambda: np.zeros(4, np.float32))])


def test_conversion_rounds_once_and_only_when_read():
    values = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)
    lazy = converted(from_f32("w", values), "bf16")
    np.testing.assert_array_equal(lazy.read(), f32_to_bf16(values))
    same = from_f32("w", values)
    assert converted(same, "f32") is same


def test_the_store_opens_a_folder(tmp_path):
    write_model(tmp_path, sample_tensors())
    with pytest.raises(WeightError, match="no config.json"):
        WeightStore.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    store = WeightStore.open(tmp_path)
    assert store.kind == "hf" and store.config == {"model_type": "llama"} and "a" in store
    assert store.shape("a") == (3, 5)
    with pytest.raises(WeightError, match=r"no tensor 'scaler' \(6 tensors; nearest: scalar\)"):
        store.get("scaler")
    (tmp_path / "config.json").write_text('{"model_type":\n "llama"')
    with pytest.raises(WeightError, match=r"config.json:2: not valid JSON"):
        WeightStore.open(tmp_path)


def test_the_store_may_give_tensors_other_names(tmp_path):
    values = {"inner.a.w": 1.0, "inner.b": 2.0, "c": 3.0}
    write_model(tmp_path, [from_f32(name, np.float32([value])) for name, value in values.items()])
    (tmp_path / "config.json").write_text("{}")
    store = WeightStore.open(tmp_path)
    store.rename({"inner.a.": "a.", "inner.": ""})
    assert sorted(store.names()) == ["a.w", "b", "c"] and "inner.b" not in store
    assert [store.get(name).to_f32().item() for name in ("a.w", "b", "c")] == [1.0, 2.0, 3.0] and store.shape("b") == (1,)
    with pytest.raises(WeightError, match="both 'inner.b' and 'c' are the tensor 'b'"):
        store.rename({"c": "b"})


@pytest.mark.parametrize(
    "file,message",
    [
        ("adapter_config.json", "LoRA adapter"),
        ("metrics.jsonl", "a run that is not done"),
        ("model.gguf", "GGUF files; give one of them: model.gguf"),
        ("pytorch_model.bin", "never loaded"),
        ("other.safetensors", "copy the index too"),
        ("readme.txt", "no model.safetensors"),
    ],
)
def test_a_folder_without_a_model_says_what_it_is(tmp_path, file, message):
    (tmp_path / file).write_text("{}")
    with pytest.raises(WeightError, match=message):
        WeightStore.open(tmp_path)


def test_paths_that_are_not_models(tmp_path):
    with pytest.raises(WeightError, match="does not exist"):
        WeightStore.open(tmp_path / "nothing")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(WeightError, match="give its folder"):
        WeightStore.open(tmp_path / "x.safetensors")
    with pytest.raises(WeightError, match="is empty"):
        SafetensorsFile(tmp_path / "x.safetensors")
