"""Rows with their file and line, whatever the kind of file; bad rows named and shown, or set aside."""

from __future__ import annotations

import gzip
import json
import sys
import types

import pytest

from surogate_core.data import DatasetSpec, read_rows
from surogate_core.data.sources import BadRows
from surogate_core.errors import DataError


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return DatasetSpec(str(path))


def test_a_line_cut_in_half_names_file_and_line_and_shows_the_row(jsonl):
    spec = jsonl(['{"text": "a"}', '{"text": "b"}', '{"text": "cut in ha'])
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON") as error:
        read_rows(spec)
    assert '{"text": "cut in ha' in error.value.message and "quarantine" in error.value.hint


def test_bad_rows_can_be_set_aside_and_are_counted(jsonl, tmp_path):
    bad = BadRows(tmp_path / "out" / "bad.jsonl")
    rows = read_rows(jsonl(['{"text": "a"}', "[1]", "{", '{"text": "b"}']), bad)
    assert [(row.data["text"], row.line) for row in rows] == [("a", 1), ("b", 4)] and bad.count == 2
    kept = [json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()]
    assert [entry["where"].rsplit(":", 1)[1] for entry in kept] == ["2", "3"] and kept[1]["row"] == "{"
    again = BadRows(bad.quarantine)  # as a resumed run reads the same file, and then another data set
    read_rows(jsonl(['{"text": "a"}', "[1]", "{", '{"text": "b"}']), again)
    read_rows(jsonl(["[2]", '{"text": "a"}'], "other.jsonl"), again)
    assert again.count == 3 and len(bad.quarantine.read_text().splitlines()) == 3


def test_a_long_bad_row_is_shortened(jsonl):
    with pytest.raises(DataError) as error:
        read_rows(jsonl(["x" * 10_000]))
    assert len(error.value.message) < 500


def test_text_is_utf8_whatever_the_locale_and_lines_end_only_at_line_feeds(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    text = "ä€😀\u2028\x85 end"
    first = b"\xef\xbb\xbf" + json.dumps({"text": text}, ensure_ascii=False).encode()
    rows = read_rows(write(tmp_path / "a.jsonl", first + b'\r\n\n{"text": "b"}'))
    assert [(row.data["text"], row.line) for row in rows] == [(text, 1), ("b", 3)]
    assert rows[1].where.endswith("a.jsonl:3")


def test_bytes_that_are_no_utf8_name_the_line(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8"):
        read_rows(write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'))
    with pytest.raises(DataError, match=r"a\.csv:2: not UTF-8"):
        read_rows(write(tmp_path / "a.csv", b"text\n\xff\n"))


def test_csv_cells_stay_strings(tmp_path):
    rows = read_rows(write(tmp_path / "a.csv", 'instruction,output\nNA,""\n"two\nlines",007\n'))
    assert [row.data for row in rows] == [{"instruction": "NA", "output": ""},
                                          {"instruction": "two\nlines", "output": "007"}]
    assert [row.line for row in rows] == [2, 3]


def test_csv_row_with_too_few_cells(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv:3: 1 cells, the header has 2"):
        read_rows(write(tmp_path / "a.csv", "a,b\n1,2\n3\n"))


def test_other_kinds_of_file(tmp_path):
    assert read_rows(write(tmp_path / "a.tsv", "a\tb\n1\t2\n"))[0].data == {"a": "1", "b": "2"}
    assert len(read_rows(write(tmp_path / "a.json", '[{"text": "a"}, {"text": "b"}]'))) == 2
    assert len(read_rows(write(tmp_path / "b.json", '{"data": [{"text": "a"}, {"text": "b"}]}'))) == 2
    assert read_rows(write(tmp_path / "a.txt", "whole\n\nfile\n"))[0].data == {"text": "whole\n\nfile\n"}
    assert read_rows(write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "z"}\n')))[0].data == {"text": "z"}
    with pytest.raises(DataError, match="b.json: holds a int"):
        read_rows(write(tmp_path / "b.json", "1"))


def test_a_folder_gives_its_files_in_order_and_a_split_by_name(tmp_path):
    for name in ("validation.jsonl", "train-2.jsonl", "train-1.jsonl", "notes.pdf"):
        write(tmp_path / name, json.dumps({"text": name}))
    assert [row.data["text"] for row in read_rows(DatasetSpec(str(tmp_path)))] == [
        "train-1.jsonl", "train-2.jsonl", "validation.jsonl"]
    assert len(read_rows(DatasetSpec(str(tmp_path), split="train"))) == 2
    with pytest.raises(DataError, match="no file of split 'test'"):
        read_rows(DatasetSpec(str(tmp_path), split="test"))


def test_train_is_all_of_a_folder_that_names_no_splits(tmp_path):
    write(tmp_path / "part.jsonl", '{"text": "a"}')
    assert len(read_rows(DatasetSpec(str(tmp_path), split="train[:5]"))) == 1


def test_one_file_has_no_other_split_than_train(jsonl):
    with pytest.raises(DataError, match="one file has no split 'test'"):
        read_rows(jsonl([{"text": "a"}], split="test"))


def test_a_compressed_file_that_is_cut_short_or_damaged(tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(999)))
    damaged = whole[:40] + bytes(40) + whole[80:]
    for raw in (whole[:-30], whole[:30], damaged, b"not gzip"):
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
            read_rows(write(tmp_path / "a.jsonl.gz", raw))


@pytest.mark.parametrize("split, wanted", [
    ("train", range(20)), ("train[:10]", range(10)), ("train[15:]", range(15, 20)), ("[5:7]", range(5, 7)),
    ("train[:10%]", range(2)), ("train[90%:]", range(18, 20))])
def test_split_slices_local_files(jsonl, split, wanted):
    rows = read_rows(jsonl([{"text": str(i)} for i in range(20)], split=split))
    assert [int(row.data["text"]) for row in rows] == list(wanted)


def test_samples_are_a_seeded_choice_in_order(jsonl):
    spec = jsonl([{"text": str(i)} for i in range(50)], samples=10)
    chosen = [[int(row.data["text"]) for row in read_rows(spec, seed=seed)] for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] == sorted(chosen[0]) and len(chosen[0]) == 10 and chosen[0] != chosen[2]


def test_columns_are_renamed(jsonl):
    rows = read_rows(jsonl([{"q": "a", "b": 1}], columns={"instruction": "q"}))
    assert rows[0].data == {"instruction": "a", "b": 1}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: `columns` maps instruction to 'x'"):
        read_rows(jsonl([{"q": "a"}], columns={"instruction": "x"}))


@pytest.mark.parametrize("path, message", [
    ("./none.jsonl", "no such file"), ("/none", "no such file"), ("some.xyz", "not known")])
def test_what_does_not_exist_is_said_plainly(tmp_path, path, message):
    if path == "some.xyz":
        write(tmp_path / path, "x")
        path = str(tmp_path / path)
    with pytest.raises(DataError, match=message):
        read_rows(DatasetSpec(path))


def test_an_empty_file_or_split_is_an_error(jsonl):
    with pytest.raises(DataError, match="no rows"):
        read_rows(jsonl([]))
    with pytest.raises(DataError, match=r"no rows in split train\[5:\]"):
        read_rows(jsonl([{"text": "a"}], split="train[5:]"))
    for split in ("train[1", "train[%:5]"):
        with pytest.raises(DataError, match="is not `name`"):
            read_rows(jsonl([{"text": "a"}], split=split))


def test_parquet_and_the_hub_say_which_package_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package pyarrow"):
        read_rows(write(tmp_path / "a.parquet", b"PAR1"))
    with pytest.raises(DataError, match="org/notes: no such file or folder, and .* the package datasets"):
        read_rows(DatasetSpec("org/notes"))


def test_a_hub_name_is_loaded_by_subset_and_split_and_sliced_here(monkeypatch):
    asked = []

    def load_dataset(path, subset, split):
        asked.append((path, subset, split))
        return [{"text": str(i)} for i in range(5)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows = read_rows(DatasetSpec("org/notes", subset="en", split="test[1:3]"))
    assert asked == [("org/notes", "en", "test")] and [row.where for row in rows] == ["org/notes:2", "org/notes:3"]
