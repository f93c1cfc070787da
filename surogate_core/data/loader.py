"""Micro-batches of a fixed shape, in an order that the seed and the epoch decide, resumable to the micro-batch.

A micro-batch is `per_device_train_batch_size` bins end to end: T = bins x sequence_len tokens. Each document in it, and
the padding at the end of each bin, is a range of `doc_starts`; attention and positions begin anew with every range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DataError
from .dataset import TokenDataset
from .packing import one_each, pack

IGNORED = -100


@dataclass
class Batch:
    """One micro-batch.

    tokens i32[T]. targets i32[T]: the next token of the same document where it is supervised, else -100. positions
    i32[T]: from 0 in every document. doc_starts i32[max_documents + 1]: document d is [doc_starts[d],
    doc_starts[d + 1]), the tail repeats T. target_weights f32[T]: how much each target counts (1 unless a row says
    otherwise, 0 where there is none). token_weights f32[T]: target_weights divided by their sum over the whole step, so
    that the micro-batches' losses add up to the step's mean. rows: "file:line" of the documents inside.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    doc_starts: np.ndarray
    target_weights: np.ndarray
    token_weights: np.ndarray
    num_targets: int
    useful_tokens: int
    rows: list[str]


@dataclass
class Step:
    """The micro-batches of one optimizer step. weight_sum: what the step's summed loss is divided by."""

    micro_batches: list[Batch]
    epoch: int
    index: int
    num_targets: int = field(init=False)
    useful_tokens: int = field(init=False)
    weight_sum: float = field(init=False)

    def __post_init__(self) -> None:
        self.num_targets = sum(batch.num_targets for batch in self.micro_batches)
        self.useful_tokens = sum(batch.useful_tokens for batch in self.micro_batches)
        self.weight_sum = float(sum(float(batch.target_weights.sum(dtype=np.float64)) for batch in self.micro_batches))
        if self.weight_sum > 0:
            for batch in self.micro_batches:
                batch.token_weights = (batch.target_weights / self.weight_sum).astype(np.float32)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> Batch:
        return self.micro_batches[index]


class Loader:
    """Yields steps, epoch after epoch, without end; the last step of an epoch may hold fewer micro-batches.

    sample_packing: False gives every document a bin of its own. shuffle: False keeps the order of the data set (for
    evaluation). The attribute `max_documents` is the most ranges that a micro-batch has.
    """

    def __init__(self, dataset: TokenDataset, *, sequence_len: int, per_device_train_batch_size: int = 1,
                 gradient_accumulation_steps: int = 1, sample_packing: bool = True, seed: int = 0,
                 shuffle: bool = True, pad_token_id: int | None = None) -> None:
        sizes = {"sequence_len": sequence_len, "per_device_train_batch_size": per_device_train_batch_size,
                 "gradient_accumulation_steps": gradient_accumulation_steps}
        for name, value in sizes.items():
            if value < 1:
                raise DataError(f"{name} is {value}, not at least 1")
        if not len(dataset):
            raise DataError("the data set has no documents")
        self.dataset, self.sequence_len = dataset, sequence_len
        self.batch_size, self.accumulation = per_device_train_batch_size, gradient_accumulation_steps
        self.num_tokens = self.batch_size * sequence_len
        self._seed, self._shuffle = seed, shuffle
        self._pad = 0 if pad_token_id is None else pad_token_id
        lengths = dataset.lengths
        if int(lengths.max()) > sequence_len:
            at = int(lengths.argmax())
            raise DataError(f"{dataset.rows[at]}: {int(lengths[at])} tokens, more than sequence_len {sequence_len}")
        self._bins = pack(lengths, sequence_len, seed, shuffle) if sample_packing else one_each(lengths, sequence_len)
        fullest = sorted((self._ranges(index) for index in range(len(self._bins))), reverse=True)[:self.batch_size]
        self.max_documents = sum(fullest) + max(0, self.batch_size - len(fullest))
        self._epoch = self._micro_batch = 0
        self._order_of: tuple[int, np.ndarray] | None = None
        self._fingerprint = dataset.fingerprint()

    def _ranges(self, index: int) -> int:
        used = sum(int(self.dataset.lengths[i]) for i in self._bins[index])
        return len(self._bins[index]) + (used < self.sequence_len)

    @property
    def micro_batches_per_epoch(self) -> int:
        return -(-len(self._bins) // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.micro_batches_per_epoch // self.accumulation)

    @property
    def padding_tokens(self) -> int:
        """Padding of one epoch, the unused bins of its last micro-batch included."""
        return self.micro_batches_per_epoch * self.num_tokens - int(self.dataset.offsets[-1])

    @property
    def packing_efficiency(self) -> float:
        """Useful tokens over all tokens of an epoch, 0 to 1."""
        return int(self.dataset.offsets[-1]) / (self.micro_batches_per_epoch * self.num_tokens)

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self.next_step()

    def next_step(self) -> Step:
        """The next step; after the last of an epoch comes the first of the next."""
        if self._micro_batch >= self.micro_batches_per_epoch:
            self._epoch, self._micro_batch = self._epoch + 1, 0
        step = self._step(self._epoch, self._micro_batch)
        self._micro_batch += len(step)
        return step

    def epoch(self, epoch: int = 0) -> Iterator[Step]:
        """All steps of one epoch, for evaluation; the loader's own place is not touched."""
        for start in range(0, self.micro_batches_per_epoch, self.accumulation):
            yield self._step(epoch, start)

    def _step(self, epoch: int, start: int) -> Step:
        stop = min(start + self.accumulation, self.micro_batches_per_epoch)
        return Step([self.micro_batch(epoch, index) for index in range(start, stop)], epoch, start // self.accumulation)

    def micro_batch(self, epoch: int, index: int) -> Batch:
        """Micro-batch `index` of an epoch. Its token_weights are zero until a Step is made of it."""
        order = self._order(epoch)
        bins = [self._bins[i] for i in order[index * self.batch_size:(index + 1) * self.batch_size]]
        return self._fill(bins)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: JSON-able, exact to the micro-batch."""
        return {"epoch": self._epoch, "micro_batch": self._micro_batch, "seed": self._seed, "bins": len(self._bins),
                "batch_size": self.batch_size, "accumulation": self.accumulation, "sequence_len": self.sequence_len,
                "dataset": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place saved by `state_dict`. Raises DataError where data, seed or shapes are not those of then."""
        own = self.state_dict()
        changed = [key for key in own if key not in ("epoch", "micro_batch") and state.get(key) != own[key]]
        if changed:
            raise DataError(f"cannot resume: since the checkpoint these changed: {', '.join(changed)}",
                            "Resume with the data and settings of the run, or start a new one.")
        self._epoch, self._micro_batch = int(state["epoch"]), int(state["micro_batch"])

    def _order(self, epoch: int) -> np.ndarray:
        if self._order_of is None or self._order_of[0] != epoch:
            count = len(self._bins)
            generator = np.random.default_rng([self._seed, 1, epoch])
            self._order_of = (epoch, generator.permutation(count) if self._shuffle else np.arange(count))
        return self._order_of[1]

    def _fill(self, bins: list[list[int]]) -> Batch:
        total = self.num_tokens
        tokens = np.full(total, self._pad, np.int32)
        targets = np.full(total, IGNORED, np.int32)
        weights = np.zeros(total, np.float32)
        positions = np.zeros(total, np.int32)
        starts: list[int] = []
        rows: list[str] = []
        useful = 0
        for number in range(self.batch_size):
            at = number * self.sequence_len
            for document in bins[number] if number < len(bins) else []:
                first, last = int(self.dataset.offsets[document]), int(self.dataset.offsets[document + 1])
                length = last - first
                tokens[at:at + length] = self.dataset.tokens[first:last]
                positions[at:at + length] = np.arange(length)
                label_weights = self.dataset.weights[first + 1:last]
                weights[at:at + length - 1] = label_weights
                targets[at:at + length - 1] = np.where(label_weights > 0, self.dataset.tokens[first + 1:last], IGNORED)
                starts.append(at)
                rows.append(self.dataset.rows[document])
                useful += length
                at += length
            end = (number + 1) * self.sequence_len
            if at < end:
                starts.append(at)
                positions[at:end] = np.arange(end - at)
        doc_starts = np.full(self.max_documents + 1, total, np.int32)
        doc_starts[:len(starts)] = starts
        return Batch(tokens, targets, positions, doc_starts, weights, np.zeros(total, np.float32),
                     int(np.count_nonzero(weights)), useful, rows)
