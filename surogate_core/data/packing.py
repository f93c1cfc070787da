"""Puts documents into bins of `sequence_len` tokens. A document is never cut here, and never sees its neighbours.

Best fit, longest first, within windows of the shuffled documents: close to the fewest bins that the lengths allow,
while the shuffle still decides who shares a bin with whom.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

WINDOW = 4096


def pack(lengths: Sequence[int] | np.ndarray, sequence_len: int, seed: int = 0,
         shuffle: bool = True) -> list[list[int]]:
    """Bins of document indices; the lengths in a bin sum to at most `sequence_len`. The same for the same arguments.

    Raises ValueError where a document is longer than a bin.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.size and int(lengths.max()) > sequence_len:
        longest = int(lengths.argmax())
        raise ValueError(f"document {longest} has {int(lengths[longest])} tokens, a bin holds {sequence_len}")
    order = np.random.default_rng([seed, 0]).permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    bins: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        bins += _best_fit(order[start:start + WINDOW], lengths, sequence_len)
    return bins


def one_each(lengths: Sequence[int] | np.ndarray, sequence_len: int) -> list[list[int]]:
    """No packing: each document has a bin of its own."""
    return pack([sequence_len] * len(lengths), sequence_len, shuffle=False)


def _best_fit(window: np.ndarray, lengths: np.ndarray, sequence_len: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for document in sorted(window.tolist(), key=lambda i: -int(lengths[i])):
        length = int(lengths[document])
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([document])
            bisect.insort(free, (sequence_len - length, len(bins) - 1))
            continue
        room, index = free.pop(at)
        bins[index].append(document)
        if room > length:
            bisect.insort(free, (room - length, index))
    return bins
