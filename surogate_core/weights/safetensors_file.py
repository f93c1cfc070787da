"""safetensors files: a mapped reader that trusts nothing it reads, and a writer that replaces files whole.

A file is an 8-byte little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}`` and the data. A
model may be split into shards beside ``model.safetensors.index.json``, whose ``weight_map`` names each tensor's file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WeightError
from ..files import replacing
from .files import map_file, read_json, write_array, write_json
from .formats import BY_SAFETENSORS_CODE, FORMATS, element_count
from .tensor import AnyTensor, StoredTensor

MAX_HEADER_BYTES = 100_000_000
MAX_SHARD_BYTES = 5_000_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# element types that the format knows and that no kernel of ours reads: listed, sized, refused only when asked for
_OTHER_SIZES = {"BOOL": 1, "U16": 2, "I16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
_AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class _Entry:
    code: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


class SafetensorsFile:
    """One mapped file. ``names``, ``metadata``, ``get(name)``."""

    def __init__(self, path: str | Path) -> None:
        """Maps the file and checks its whole header; raises WeightError naming the file, the tensor and the cure."""
        self.path = Path(path)
        self._bytes = map_file(self.path)
        header, data_start = self._read_header()
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise WeightError(f"{self.path}: __metadata__ must be an object of strings; {_AGAIN}")
        self.metadata: dict[str, str] = metadata
        self._entries = {name: self._check_entry(name, entry, data_start) for name, entry in header.items()}
        self._check_overlaps()

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def get(self, name: str) -> StoredTensor:
        """The tensor as a view into the mapped file (a copy only where the file left it unaligned). KeyError if absent."""
        entry = self._entries[name]
        form = BY_SAFETENSORS_CODE.get(entry.code)
        if form is None:
            known = ", ".join(BY_SAFETENSORS_CODE)
            raise WeightError(
                f"{self.path}: tensor {name!r} has element type {entry.code}, which cannot be used; known: {known}"
            )
        raw = self._bytes[entry.start : entry.end]
        if raw.ctypes.data % form.numpy.itemsize:
            raw = raw.copy()
        return StoredTensor(name, form.name, entry.shape, raw.view(form.numpy).reshape(entry.shape))

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = len(self._bytes)
        if size < 8:
            raise WeightError(f"{self.path}: {size} bytes is too short for a safetensors file; {_AGAIN}")
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise WeightError(
                f"{self.path}: announces a header of {length:,} bytes, but the file has {size:,} (limit {MAX_HEADER_BYTES:,}); "
                f"it is truncated or not a safetensors file; {_AGAIN}"
            )
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes(), object_pairs_hook=self._no_duplicates)
        except (ValueError, RecursionError) as error:
            raise WeightError(f"{self.path}: the header is not valid JSON ({error}); {_AGAIN}") from error
        if not isinstance(header, dict):
            raise WeightError(f"{self.path}: the header must be a JSON object, not a {type(header).__name__}; {_AGAIN}")
        return header, 8 + length

    def _no_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightError(f"{self.path}: the header names {twice!r} twice; write the file again")
        return found

    def _check_entry(self, name: str, entry: Any, data_start: int) -> _Entry:
        where = f"{self.path}: tensor {name!r}"
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise WeightError(f"{where}: its header entry must have dtype, shape and data_offsets; {_AGAIN}")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise WeightError(f"{where}: shape {shape!r} or data_offsets {offsets!r} are not counts; {_AGAIN}")
        form = BY_SAFETENSORS_CODE.get(code) if isinstance(code, str) else None
        width = form.block_bytes if form else _OTHER_SIZES.get(code) if isinstance(code, str) else None
        if width is None:
            raise WeightError(f"{where}: unknown element type {code!r}; a newer version may know it, or {_AGAIN}")
        start, end = offsets
        if end - start != element_count(shape) * width:
            raise WeightError(
                f"{where}: {code} of shape {shape} needs {element_count(shape) * width:,} bytes, but its offsets hold "
                f"{end - start:,}; {_AGAIN}"
            )
        if data_start + end > len(self._bytes):
            raise WeightError(
                f"{where}: ends at byte {data_start + end:,}, but the file has {len(self._bytes):,}; it is truncated; {_AGAIN}"
            )
        return _Entry(code, tuple(shape), data_start + start, data_start + end)

    def _check_overlaps(self) -> None:
        end, last = 0, ""
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start < end and entry.end > entry.start:
                raise WeightError(f"{self.path}: tensors {last!r} and {name!r} share bytes; write the file again")
            if entry.end > end:
                end, last = entry.end, name


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """``{tensor name: its file}`` of a folder with model.safetensors or an index and shards; {} when it has neither."""
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        single = folder / SINGLE_NAME
        if not single.exists():
            return {}
        file = SafetensorsFile(single)
        return dict.fromkeys(file.names(), file)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightError(f"{index_path}: weight_map must be an object of file names; {_AGAIN}")
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise WeightError(
                f"{index_path}: shard {shard!r} lies outside the folder; only plain file names are accepted"
            )
        if not (folder / shard).exists():
            raise WeightError(f"{index_path} names shard {shard!r}, which is not in the folder; copy all shards")
        shards[shard] = SafetensorsFile(folder / shard)
    held = {shard: set(file.names()) for shard, file in shards.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise WeightError(
                f"{index_path}: tensor {name!r} is not in {shard!r} as the index says; copy all shards again"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def write_file(path: str | Path, tensors: Iterable[AnyTensor], metadata: dict[str, str] | None = None) -> None:
    """Writes one safetensors file, reading one tensor at a time; block formats are refused (convert them first).

    Wide element types come first, so that every tensor is aligned for its type and can be used where it lies.
    """
    tensors = sorted(tensors, key=lambda tensor: -FORMATS[tensor.dtype].numpy.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for tensor in tensors:
        code = FORMATS[tensor.dtype].safetensors_code
        if code is None:
            raise WeightError(
                f"{path}: tensor {tensor.name!r} is {tensor.dtype}, which safetensors cannot hold; convert it to bf16, f16 or f32"
            )
        if tensor.name in header:
            raise WeightError(f"{path}: tensor {tensor.name!r} is given twice")
        header[tensor.name] = {
            "dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]
        }  # fmt: skip
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned for every element type
    with replacing(path, WeightError) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_array(file, tensor.read())


def write_model(folder: str | Path, tensors: Iterable[AnyTensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Writes model.safetensors, or shards of at most ``max_shard_bytes`` with their index; returns the files written."""
    folder = Path(folder)
    shards: list[list[AnyTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(held.nbytes for held in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    index = folder / INDEX_NAME
    if len(shards) == 1:
        write_file(folder / SINGLE_NAME, shards[0])
        index.unlink(missing_ok=True)  # an index left by an earlier, sharded save would win over the new file
        return [folder / SINGLE_NAME]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    (folder / SINGLE_NAME).unlink(missing_ok=True)  # of an earlier save: `transformers` would take it before the index
    return [folder / name for name in names]
