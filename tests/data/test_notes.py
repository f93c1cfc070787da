"""The demo's data set: reproducible, held-out rows share nothing with training rows, and its score."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notes"


@pytest.fixture(scope="module")
def notes():
    spec = importlib.util.spec_from_file_location("make_notes", FOLDER / "make_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_the_committed_files_are_what_the_script_makes(notes):
    assert rows_of("train.jsonl") == notes.make_rows(400, 7)
    assert rows_of("heldout.jsonl") == notes.make_rows(60, 7, held_out=True)


def test_no_part_of_a_held_out_note_is_seen_in_training(notes):
    def parts(pools):
        return {word for name, pool in pools.items() if name != "sentences" for entry in pool
                for word in re.findall(r"[\w']{2,}", entry.lower())} | set(pools["sentences"])

    assert not parts(notes.TRAIN) & parts(notes.HELD_OUT)


def test_every_note_holds_what_its_answer_says(notes):
    for row in notes.make_rows(300, 3):
        note, answer = row["messages"][1]["content"], json.loads(row["messages"][2]["content"])
        year, month, day = answer["date"].split("-")
        assert answer["shop"].lower() in note.lower() and answer["item"].lower() in note.lower()
        assert year in note and str(int(day)) in note and tuple(answer) == notes.FIELDS
        assert str(int(answer["amount"])) in note


def test_score(notes):
    rows = notes.make_rows(4, 1)
    right = [row["messages"][-1]["content"] for row in rows]
    assert notes.score(right, rows) == {"valid": 1.0, "fields": 1.0, "notes": 1.0}
    wrong = json.loads(right[0]) | {"shop": "?"}
    answers = [json.dumps(wrong), "no JSON", right[2][:-1] + ', "more": 1}', "[1]"]
    assert notes.score(answers, rows) == {"valid": 0.25, "fields": 9 / 20, "notes": 0.0}
    with pytest.raises(ValueError, match="1 outputs for 4 rows"):
        notes.score(right[:1], rows)
