"""Where rows come from: local files, folders and (through `datasets`) the hub, each row with its file and line.

Text is UTF-8 whatever the locale, a JSONL line ends only at a line feed (so U+2028 inside a string is text), and a CSV
cell is always a string ("NA" and "" stay what they are).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet")
_SHOWN_CHARACTERS = 160
_SPLIT = re.compile(r"^(?P<name>[\w.-]*)(?:\[(?P<start>(\d+%?)?):(?P<stop>(\d+%?)?)\])?$")


@dataclass(frozen=True)
class DatasetSpec:
    """One entry of the config's `datasets`.

    path: a file, a folder or a hub id. type: a registered format or `auto`. split: `train`, `train[:10]`,
    `train[10%:]`. subset: the hub's configuration name. samples: at most so many rows, chosen by the seed, in their
    order. weight: passes over the rows in an epoch (2 = every row twice, 0.5 = half of them). columns: name that the
    format knows -> name in the file.
    """

    path: str
    type: str = "auto"
    split: str | None = None
    subset: str | None = None
    samples: int | None = None
    weight: float = 1.0
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row as it was read. `data`: column -> value. `source`, `line`: the file and its line (or row), from 1."""

    data: dict[str, Any]
    source: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


class BadRow(DataError):
    """One row that cannot be used. `where` names file and line; `shown` is the row's beginning."""

    def __init__(self, where: str, reason: str, shown: Any, hint: str | None = None) -> None:
        self.where, self.reason = where, reason
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False, default=str)
        self.shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
        super().__init__(f"{where}: {reason}\n    {self.shown}", hint)


@dataclass
class BadRows:
    """What happens to bad rows: raised at once, or counted and added to the JSONL file `quarantine`, each row once."""

    quarantine: Path | None = None
    count: int = 0
    _written: set[str] | None = None

    def add(self, error: BadRow) -> None:
        if self.quarantine is None:
            hint = error.hint or "Repair the row, or set `bad_rows: quarantine` to set such rows aside and go on."
            raise DataError(error.message, hint) from error
        self.count += 1
        entry = json.dumps({"where": error.where, "reason": error.reason, "row": error.shown}, ensure_ascii=False)
        try:
            if self._written is None:  # a resumed run, or another data set of this one, may have written before
                self.quarantine.parent.mkdir(parents=True, exist_ok=True)
                exists = self.quarantine.exists()
                self._written = set(self.quarantine.read_text("utf-8").split("\n")) if exists else set()
            if entry not in self._written:
                self._written.add(entry)
                with self.quarantine.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(entry + "\n")
        except OSError as failure:
            raise DataError(f"{self.quarantine}: the file for bad rows cannot be written: {failure}") from failure


def read_rows(spec: Any, bad_rows: BadRows | None = None, seed: int = 0) -> list[Row]:
    """All rows that `spec` (a DatasetSpec or anything with its attributes) selects, in the order of the source.

    Raises DataError where the source does not exist, is of no known kind, or holds no row or no such split.
    """
    split = Split.parse(spec)
    rows = split.part(list(_from_anywhere(spec, split, bad_rows or BadRows())))
    if spec.samples is not None and spec.samples < len(rows):
        chosen = random.Random(f"{seed} {spec.path}").sample(range(len(rows)), spec.samples)
        rows = [rows[i] for i in sorted(chosen)]
    if not rows:
        raise DataError(f"dataset {spec.path}: no rows" + (f" in split {spec.split}" if spec.split else ""))
    if spec.columns:
        rows = [Row(_rename(row, spec), row.source, row.line) for row in rows]
    return rows


@dataclass(frozen=True)
class Split:
    """What `split: name[start:stop]` asks for; `name` may be empty. Bounds are counts or percentages."""

    name: str
    start: str | None = None
    stop: str | None = None

    @classmethod
    def parse(cls, spec: Any) -> Split:
        match = _SPLIT.match(spec.split or "")
        if match is None:
            raise DataError(f"dataset {spec.path}: split {spec.split!r} is not `name`, `name[start:stop]` or "
                            "`name[:10%]`")
        return cls(match["name"], match["start"], match["stop"])

    def part(self, rows: list[Row]) -> list[Row]:
        def at(text: str | None, default: int) -> int:
            if not text:
                return default
            return len(rows) * int(text[:-1]) // 100 if text.endswith("%") else int(text)

        return rows[at(self.start, 0):at(self.stop, len(rows))]


def _from_anywhere(spec: Any, split: Split, bad_rows: BadRows) -> Iterator[Row]:
    path = Path(spec.path).expanduser()
    if path.is_dir():
        for file in _files_of_folder(path, spec, split):
            yield from _from_file(file, bad_rows)
    elif path.exists():
        if split.name not in ("", "train"):
            raise DataError(f"dataset {spec.path}: one file has no split {split.name!r}",
                            "Name the split's own file as `path`; `split: [start:stop]` takes a part of a file.")
        yield from _from_file(path, bad_rows)
    elif path.suffix in SUFFIXES or path.is_absolute() or spec.path.startswith(".") or spec.path.count("/") > 1:
        raise DataError(f"dataset {spec.path}: no such file or folder")
    else:
        yield from _from_hub(spec, split)


def _files_of_folder(folder: Path, spec: Any, split: Split) -> list[Path]:
    """Those of the split; all where none is named, and for `train` where no file's name tells splits apart."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _kind(file) is not None)
    if not files:
        raise DataError(f"dataset {spec.path}: no file of a known kind in this folder",
                        f"Known: {', '.join(SUFFIXES)}.")
    named = [file for file in files if file.name.startswith(split.name)]  # all of them for an empty name
    if not named and split.name != "train":
        raise DataError(f"dataset {spec.path}: no file of split {split.name!r}: none has a name that begins so",
                        f"It holds {', '.join(str(file.relative_to(folder)) for file in files[:5])}.")
    return named or files


def _kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else None


def _from_file(path: Path, bad_rows: BadRows) -> Iterator[Row]:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"dataset {path}: files of this kind are not known", f"Known: {', '.join(SUFFIXES)}.")
    if kind == ".parquet":
        yield from _from_parquet(path)
        return
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:  # the last two: gzip data cut short, or damaged inside
        raise DataError(f"dataset {path}: cannot be read: {error}") from error
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    yield from _READERS.get(kind, _text)(raw, path, bad_rows)


def _json_lines(raw: bytes, path: Path, bad_rows: BadRows) -> Iterator[Row]:
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError(f"a row is a JSON object, this is a {type(value).__name__}")
        except (ValueError, RecursionError) as error:
            shown = line.decode("utf-8", errors="replace").strip()
            bad_rows.add(BadRow(f"{path}:{number}", _json_reason(error), shown))
            continue
        yield Row(value, str(path), number)


def _json_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start} of the line)"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.colno}"
    return str(error) or type(error).__name__


def _json(raw: bytes, path: Path, bad_rows: BadRows) -> Iterator[Row]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{getattr(error, 'lineno', 1)}: {_json_reason(error)}") from error
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 and len(value) == 1 else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: holds a {type(value).__name__}; a list of objects is wanted")
    for number, item in enumerate(value, start=1):
        if isinstance(item, dict):
            yield Row(item, str(path), number)
        else:
            reason = f"row {number} is a {type(item).__name__}, not an object"
            bad_rows.add(BadRow(f"{path}:{number}", reason, str(item)))


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text (byte {error.start} of the file)",
                        "Convert the file to UTF-8.") from error


def _csv(raw: bytes, path: Path, bad_rows: BadRows) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_decode(raw, path), newline=""), delimiter="\t" if ".tsv" in path.suffixes else ",")
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            bad_rows.add(BadRow(f"{path}:{line}", f"not valid CSV: {error}", ""))
            continue
        if cells is None:
            return
        if header is None:
            header = cells
        elif len(cells) == len(header):
            yield Row(dict(zip(header, cells, strict=True)), str(path), line)
        elif cells:
            bad_rows.add(BadRow(f"{path}:{line}", f"{len(cells)} cells, the header has {len(header)}", ",".join(cells)))


def _text(raw: bytes, path: Path, bad_rows: BadRows) -> Iterator[Row]:
    text = _decode(raw, path)
    if text.strip():
        yield Row({"text": text}, str(path), 1)


_READERS = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv}


def _from_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"dataset {path}: reading Parquet needs the package pyarrow", "pip install pyarrow") from error
    try:
        items: Iterable[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.lib.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    for number, item in enumerate(items, start=1):
        yield Row(item, str(path), number)


def _from_hub(spec: Any, split: Split) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"dataset {spec.path}: no such file or folder, and reading it from the hub needs the package "
                        "datasets", "Correct the path, or pip install datasets.") from error
    try:
        table = datasets.load_dataset(spec.path, spec.subset, split=split.name or "train")
    except Exception as error:  # the library raises many kinds, all of which mean that the user's name did not work
        raise DataError(f"dataset {spec.path}: neither a local file nor loaded from the hub: {error}") from error
    for number, item in enumerate(table, start=1):
        yield Row(dict(item), spec.path, number)


def _rename(row: Row, spec: Any) -> dict[str, Any]:
    data = dict(row.data)
    for known, actual in spec.columns.items():
        if actual not in data:
            raise DataError(f"{row.where}: `columns` maps {known} to {actual!r}, which this row does not have",
                            f"Its columns: {', '.join(map(repr, row.data))}.")
        data[known] = data.pop(actual)
    return data
