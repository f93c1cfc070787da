"""From rows to documents: reads, understands, masks and cuts rows, with a ledger in which every token has its place."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from .formats import BUILTIN, DatasetFormat, find_format
from .masks import Encoded, Encoder
from .sources import BadRow, BadRows, Row, read_rows

OVERLONG = ("drop", "truncate", "split", "error")


@dataclass
class Ledger:
    """Counts of one data set for one epoch. read + resampled = trained + masked + truncated + dropped + held_out.

    resampled: tokens added (or, negative, left out) by the data set's weight. masked: kept tokens that are no target.
    truncated: cut from rows that were kept. dropped: in rows, or pieces of rows, that were not kept. held_out: in rows
    that were set aside for validation.
    """

    rows_read: int = 0
    rows_bad: int = 0
    rows_unsupervised: int = 0
    rows_overlong: int = 0
    rows_dropped: int = 0
    documents: int = 0
    tokens_read: int = 0
    tokens_resampled: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    tokens_truncated: int = 0
    tokens_dropped: int = 0
    tokens_held_out: int = 0

    @property
    def balances(self) -> bool:
        used = self.tokens_trained + self.tokens_masked + self.tokens_truncated + self.tokens_dropped
        return self.tokens_read + self.tokens_resampled == used + self.tokens_held_out

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class TokenDataset:
    """Documents end to end. Document i is tokens[offsets[i]:offsets[i + 1]].

    tokens: i32[n]. weights: f32[n], how much each token counts as a target (0: masked; the first token of a document
    never is one). offsets: i64[documents + 1]. rows: where each document came from, "file:line". sources: the data set
    of each document, a key of `ledgers`.
    """

    tokens: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    rows: list[str]
    sources: list[str]
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, i64[documents]."""
        return np.diff(self.offsets)

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.weights))

    def fingerprint(self) -> str:
        """A hash of all tokens and weights; a resumed run must see the same one."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.weights, self.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def select(self, indices: Sequence[int]) -> TokenDataset:
        """The chosen documents in the order given (a document may be chosen more than once). Ledgers stay behind."""
        pieces = [slice(int(self.offsets[i]), int(self.offsets[i + 1])) for i in indices]
        return _join([_Document(self.tokens[piece], self.weights[piece], self.rows[i], self.sources[i])
                      for piece, i in zip(pieces, indices, strict=True)])


class _Document(NamedTuple):
    tokens: np.ndarray
    weights: np.ndarray
    row: str
    source: str


def _join(documents: Sequence[_Document]) -> TokenDataset:
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(item.tokens) for item in documents], out=offsets[1:])
    tokens = np.concatenate([np.zeros(0, np.int32), *(item.tokens for item in documents)])
    weights = np.concatenate([np.zeros(0, np.float32), *(item.weights for item in documents)])
    return TokenDataset(tokens, weights, offsets, [item.row for item in documents],
                        [item.source for item in documents])


def concatenate(datasets: Sequence[TokenDataset]) -> TokenDataset:
    """One data set of all documents, with all ledgers and warnings."""
    offsets = [np.zeros(1, np.int64)]
    for item in datasets:
        offsets.append(item.offsets[1:] + offsets[-1][-1])
    return TokenDataset(
        np.concatenate([np.zeros(0, np.int32), *(item.tokens for item in datasets)]),
        np.concatenate([np.zeros(0, np.float32), *(item.weights for item in datasets)]),
        np.concatenate(offsets), [row for item in datasets for row in item.rows],
        [source for item in datasets for source in item.sources],
        {name: ledger for item in datasets for name, ledger in item.ledgers.items()},
        [text for item in datasets for text in item.warnings])


def encode_rows(spec: Any, encoder: Encoder, formats: Mapping[str, DatasetFormat] = BUILTIN,
                bad_rows: BadRows | None = None, seed: int = 0) -> Iterable[tuple[Row, Encoded]]:
    """Every row of one data set with its tokens and mask; rows that cannot be used go to `bad_rows`."""
    bad_rows = bad_rows or BadRows()
    rows = read_rows(spec, bad_rows, seed)
    chosen = find_format(spec.type, set(rows[0].data), rows[0].where, formats)
    for row in rows:
        try:
            encoded = encoder.encode(chosen.to_example(row.data))
        except DataError as error:
            bad_rows.add(BadRow(row.where, error.message, row.data, error.hint))
            continue
        yield row, encoded


def build_dataset(specs: Sequence[Any], encoder: Encoder, sequence_len: int, overlong: str = "drop", *, seed: int = 0,
                  formats: Mapping[str, DatasetFormat] = BUILTIN, quarantine: Path | None = None) -> TokenDataset:
    """Reads, masks and cuts all rows of `specs` (DatasetSpec, or the config's entries) into documents.

    overlong: what happens to rows of more than `sequence_len` tokens: `drop`, `truncate`, `split` or `error`; counted
    in the ledgers either way. quarantine: a JSONL file for bad rows; None makes the first one an error.
    Raises DataError, with file and line, and where no row has a supervised token.
    """
    if overlong not in OVERLONG:
        raise DataError(f"overlong is {overlong!r}", f"Known: {', '.join(OVERLONG)}.")
    bad_rows = BadRows(quarantine)
    parts: dict[str, TokenDataset] = {}
    for spec in specs:
        name = str(spec.path) if str(spec.path) not in parts else f"{spec.path} ({len(parts) + 1})"
        parts[name] = _build_one(spec, name, encoder, sequence_len, overlong, seed, formats, bad_rows)
    whole = concatenate(list(parts.values()))
    if not len(whole):
        total = sum(whole.ledgers.values(), Ledger())
        raise DataError(f"no row is left to train on: {total.rows_read} read, {total.rows_bad} bad, "
                        f"{total.rows_unsupervised} without a supervised token, {total.rows_dropped} dropped because "
                        f"they have more than {sequence_len} tokens",
                        "Look at `train_on`, `sequence_len` and the rows with `surogate data inspect`.")
    return whole


def _build_one(spec: Any, name: str, encoder: Encoder, sequence_len: int, overlong: str, seed: int,
               formats: Mapping[str, DatasetFormat], bad_rows: BadRows) -> TokenDataset:
    ledger = Ledger()
    bad_before = bad_rows.count
    documents: list[_Document] = []
    for row, encoded in encode_rows(spec, encoder, formats, bad_rows, seed):
        documents += _documents_of(row, name, encoded, sequence_len, overlong, ledger)
    ledger.rows_bad = bad_rows.count - bad_before
    ledger.rows_read += ledger.rows_bad
    order, ledger.tokens_resampled = _resample(documents, spec, seed)
    documents = [documents[i] for i in order]
    ledger.documents = len(documents)
    joined = _join(documents)
    ledger.tokens_trained = joined.num_targets
    ledger.tokens_masked = len(joined.tokens) - ledger.tokens_trained
    warnings = _warnings(spec, ledger, sequence_len, overlong, bad_rows.quarantine)
    return replace(joined, ledgers={name: ledger}, warnings=warnings)


def _documents_of(row: Row, name: str, encoded: Encoded, sequence_len: int, overlong: str,
                  ledger: Ledger) -> list[_Document]:
    length = len(encoded.ids)
    ledger.rows_read += 1
    ledger.tokens_read += length
    if length > sequence_len:
        ledger.rows_overlong += 1
        if overlong == "error":
            raise DataError(f"{row.where}: {length} tokens, more than sequence_len {sequence_len}",
                            "Raise `sequence_len`, or set `overlong` to drop, truncate or split.")
        if overlong == "drop":
            ledger.rows_dropped += 1
            ledger.tokens_dropped += length
            return []
    stop = min(length, sequence_len) if overlong == "truncate" else length
    kept: list[_Document] = []
    for start in range(0, stop, sequence_len):
        piece = slice(start, min(start + sequence_len, stop))
        weights = encoded.weights[piece].copy()
        weights[:1] = 0.0
        if np.any(weights > 0):
            kept.append(_Document(encoded.ids[piece], weights, row.where, name))
        else:
            ledger.tokens_dropped += piece.stop - piece.start
    if kept:
        ledger.tokens_truncated += length - stop
    else:
        ledger.rows_unsupervised += 1
        ledger.tokens_dropped += length - stop
    return kept


def _resample(documents: Sequence[_Document], spec: Any, seed: int) -> tuple[list[int], int]:
    """Indices after the weight: whole passes, then a seeded choice for the rest; and the tokens it adds."""
    weight = float(getattr(spec, "weight", 1.0) or 0.0)
    if not 0.0 < weight < float("inf"):
        raise DataError(f"dataset {spec.path}: weight is {spec.weight}, not a number above 0")
    whole = int(weight)
    rest = round((weight - whole) * len(documents))
    chosen = sorted(random.Random(f"{seed} weight {spec.path}").sample(range(len(documents)), rest))
    order = list(range(len(documents))) * whole + chosen
    before = sum(len(item.tokens) for item in documents)
    return order, sum(len(documents[i].tokens) for i in order) - before


def _warnings(spec: Any, ledger: Ledger, sequence_len: int, overlong: str, quarantine: Path | None) -> list[str]:
    """A line for every reason why rows are not trained on as they stand in the file."""
    out = []
    if ledger.rows_bad:
        out.append(f"{spec.path}: {ledger.rows_bad} of {ledger.rows_read} rows are bad and were set aside in {quarantine}")
    if ledger.rows_unsupervised:
        out.append(f"{spec.path}: {ledger.rows_unsupervised} of {ledger.rows_read} rows have no supervised token "
                   "and are left out")
    if ledger.rows_overlong:
        fate = {"drop": "are dropped", "truncate": "are cut there", "split": "are split"}[overlong]
        lost = ledger.tokens_truncated + ledger.tokens_dropped
        out.append(f"{spec.path}: {ledger.rows_overlong} of {ledger.rows_read} rows have more than sequence_len "
                   f"{sequence_len} tokens and {fate}; {lost:,} of {ledger.tokens_read:,} tokens are left out")
    return out


def split_validation(dataset: TokenDataset, validation_split: float,
                     seed: int = 0) -> tuple[TokenDataset, TokenDataset]:
    """Sets rows aside for validation: a share below 1, or a whole number of rows. Documents of one row stay together.

    Returns (training, validation). Raises DataError where either side would be empty.
    """
    rows = list(dict.fromkeys(dataset.rows))
    count = round(validation_split * len(rows)) if validation_split < 1 else int(validation_split)
    if not 0 < count < len(rows):
        raise DataError(f"validation_split {validation_split} takes {count} of {len(rows)} rows",
                        "Both sides need at least one row.")
    aside = set(random.Random(f"{seed} validation").sample(rows, count))
    train = [i for i, row in enumerate(dataset.rows) if row not in aside]
    held = [i for i, row in enumerate(dataset.rows) if row in aside]
    ledgers = {name: replace(ledger) for name, ledger in dataset.ledgers.items()}
    for i in held:
        weights = dataset.weights[int(dataset.offsets[i]):int(dataset.offsets[i + 1])]
        ledger, targets = ledgers[dataset.sources[i]], int(np.count_nonzero(weights))
        ledger.documents -= 1
        ledger.tokens_trained -= targets
        ledger.tokens_masked -= len(weights) - targets
        ledger.tokens_held_out += len(weights)
    kept = replace(dataset.select(train), ledgers=ledgers, warnings=dataset.warnings)
    return kept, dataset.select(held)
