"""Rows to documents: overlong rows, the ledger, weights, validation rows, and a clear end where nothing is left."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.data import Encoder, Ledger, build_dataset, concatenate, split_validation
from surogate_core.data.template import BUILTIN, ChatTemplate
from surogate_core.errors import DataError


@pytest.fixture
def encoder(tokenizer):
    return Encoder(tokenizer, ChatTemplate(BUILTIN["chatml"]))


def text_of(tokenizer, count):
    """A text of exactly `count` tokens, its EOS included."""
    for n in range(count):
        text = "one" + " two" * n
        if len(tokenizer.encode(text)) + 1 == count:
            return text
    raise AssertionError(count)


def chat(answer, question="hello"):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("overlong, lengths, truncated, dropped", [
    ("drop", [10], 0, 25), ("truncate", [10, 10], 15, 0), ("split", [10, 10, 10, 5], 0, 0)])
def test_overlong_rows_are_handled_and_counted(encoder, tokenizer, jsonl, overlong, lengths, truncated, dropped):
    spec = jsonl([{"text": text_of(tokenizer, 25)}, {"text": text_of(tokenizer, 10)}])
    data = build_dataset([spec], encoder, 10, overlong)
    ledger = data.ledgers[spec.path]
    assert sorted(data.lengths.tolist(), reverse=True) == lengths and ledger.rows_overlong == 1
    assert (ledger.tokens_truncated, ledger.tokens_dropped, ledger.tokens_read) == (truncated, dropped, 35)
    assert ledger.balances


def test_overlong_error_names_the_row_and_its_length(encoder, tokenizer, jsonl):
    spec = jsonl([{"text": "one"}, {"text": text_of(tokenizer, 25)}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 25 tokens, more than sequence_len 10"):
        build_dataset([spec], encoder, 10, "error")


def test_splitting_keeps_every_token_and_every_label_in_its_place(encoder, jsonl):
    row = chat("three four five " * 9)
    whole = build_dataset([jsonl([row])], encoder, 1000)
    pieces = build_dataset([jsonl([row])], encoder, 13, "split")
    dropped = pieces.ledgers[pieces.sources[0]].tokens_dropped
    assert pieces.lengths.max() <= 13 and pieces.tokens.tolist() == whole.tokens[dropped:].tolist()
    inner = np.ones(len(pieces.tokens), bool)
    inner[pieces.offsets[:-1]] = False  # a piece's first token has nothing before it to be predicted from
    assert (pieces.weights[inner] == whole.weights[dropped:][inner]).all() and (pieces.weights[~inner] == 0).all()


def test_rows_without_a_supervised_token_are_counted(encoder, jsonl):
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    spec = jsonl([chat("one"), silent, chat("two")])
    data = build_dataset([spec], encoder, 100)
    ledger = data.ledgers[spec.path]
    assert len(data) == 2 and ledger.rows_unsupervised == 1 and ledger.tokens_dropped > 0 and ledger.balances
    assert "1 of 3 rows have no supervised token" in data.warnings[0]
    with pytest.raises(DataError, match="no row is left to train on: 2 read, 0 bad, 2 without a supervised token"):
        build_dataset([jsonl([silent, silent])], encoder, 100)


@pytest.mark.parametrize(("overlong", "fate"), [("drop", "dropped"), ("truncate", "cut there"), ("split", "split")])
def test_one_overlong_row_among_many_is_told(encoder, jsonl, overlong, fate):
    spec = jsonl([*[chat("one")] * 20, chat("hello " * 60)])
    data = build_dataset([spec], encoder, 60, overlong)
    assert any(f"1 of 21 rows have more than sequence_len 60 tokens and are {fate};" in line for line in data.warnings)


def test_truncation_that_cuts_all_answers_names_the_length(encoder, jsonl):
    spec = jsonl([chat("one", "hello " * 50), chat("one")])
    data = build_dataset([spec], encoder, 60, "truncate")
    assert len(data) == 1 and "1 of 2 rows have no supervised token" in data.warnings[0]
    assert "1 of 2 rows have more than sequence_len 60 tokens and are cut there" in data.warnings[1]
    assert data.ledgers[spec.path].balances


def test_bad_rows_of_every_sort_name_their_line_or_are_set_aside(encoder, jsonl, tmp_path):
    rows = [chat("one"), {"messages": [{"role": "alien", "content": "x"}]}, '{"messages": [', chat("two")]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        build_dataset([jsonl(rows)], encoder, 100)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*role 'alien'") as error:
        build_dataset([jsonl([*rows[:2], rows[3]])], encoder, 100)
    assert '"alien"' in error.value.message  # the row is shown
    spec = jsonl(rows)
    data = build_dataset([spec], encoder, 100, quarantine=tmp_path / "bad.jsonl")
    assert len(data) == 2 and data.ledgers[spec.path].rows_bad == 2 and data.ledgers[spec.path].rows_read == 4
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert len(reasons) == 2 and "2 of 4 rows are bad" in data.warnings[0]


def test_weight_is_passes_per_epoch(encoder, jsonl):
    spec = jsonl([chat(f"one {i}") for i in range(10)], weight=2.5)
    data = build_dataset([spec], encoder, 100)
    counts = sorted(data.rows.count(row) for row in set(data.rows))
    assert len(data) == 25 and counts == [2] * 5 + [3] * 5
    assert data.ledgers[spec.path].tokens_resampled > 0 and data.ledgers[spec.path].balances
    half = build_dataset([jsonl([chat(f"one {i}") for i in range(10)], weight=0.5)], encoder, 100)
    assert len(half) == 5 and half.ledgers[half.sources[0]].tokens_resampled < 0


def test_several_data_sets_keep_their_own_ledgers(encoder, jsonl):
    first, second = jsonl([chat("one")], "a.jsonl"), jsonl([{"text": "two"}, {"text": "three"}], "b.jsonl")
    data = build_dataset([first, second, first], encoder, 100)
    assert [ledger.documents for ledger in data.ledgers.values()] == [1, 2, 1] and len(data.ledgers) == 3
    assert sum(data.ledgers.values(), Ledger()).tokens_read == len(data.tokens)
    assert concatenate([data, data]).lengths.tolist() == data.lengths.tolist() * 2


def test_validation_rows_leave_the_training_set(encoder, tokenizer, jsonl):
    spec = jsonl([{"text": text_of(tokenizer, n)} for n in range(12, 32)])
    data = build_dataset([spec], encoder, 10, "split")
    for split, count in ((0.25, 5), (3, 3)):
        train, held = split_validation(data, split, seed=1)
        assert len(set(held.rows)) == count and not set(train.rows) & set(held.rows)
        assert len(train) + len(held) == len(data)
        ledger = train.ledgers[spec.path]
        assert ledger.balances and ledger.tokens_held_out == len(held.tokens) and ledger.documents == len(train)
        assert ledger.tokens_trained == train.num_targets
    assert data.ledgers[spec.path].tokens_held_out == 0
    with pytest.raises(DataError, match="takes 20 of 20 rows"):
        split_validation(data, 20)


def test_the_fingerprint_sees_tokens_and_masks(encoder, tokenizer, jsonl):
    rows = [chat("one two"), chat("three")]
    prints = {build_dataset([jsonl(rows)], encoder, 100).fingerprint(),
              build_dataset([jsonl(rows)], encoder, 100).fingerprint(),
              build_dataset([jsonl(rows[::-1])], encoder, 100).fingerprint(),
              build_dataset([jsonl(rows)], Encoder(tokenizer, ChatTemplate(BUILTIN["chatml"]), train_on="all"),
                            100).fingerprint()}
    assert len(prints) == 3
