"""feed_tokens: the ids that a step of serving computes, of which some were sampled in the step before."""

from __future__ import annotations

import numpy as np

from .record import Op, Operand, Sample, TensorType, require


def infer_feed_tokens(inputs, attrs):
    tokens, sequence_ids, last_ids = inputs
    require(len(tokens.shape) == 1, "feed_tokens: tokens is [T]")
    require(sequence_ids.shape == tokens.shape, f"feed_tokens: sequence_ids must have shape {tokens.shape}")
    require(len(last_ids.shape) == 1, "feed_tokens: last_ids is [B]")
    return [TensorType(tokens.shape, "i32")]


def reference_feed_tokens(inputs, attrs, initial):
    tokens, sequences, last_ids = inputs["tokens"], inputs["sequence_ids"], inputs["last_ids"]
    known = (sequences >= 0) & (sequences < len(last_ids))
    last = np.append(last_ids, 0)[np.where(known, sequences, len(last_ids))]
    return [np.maximum(np.where(tokens >= 0, tokens, last), 0)]


def samples_feed_tokens(rng):
    cases = []
    for count, places in ((1, 1), (5, 3), (300, 128), (4096, 7), (0, 2)):
        tokens = rng.integers(-2, 6, count)
        tokens[tokens >= 0] = rng.integers(0, 128256, np.count_nonzero(tokens >= 0))
        last_ids = rng.integers(0, 128256, places)
        last_ids[-1] = -1  # of a row that could not be sampled
        sequence_ids = rng.integers(-1, places + 1, count)
        cases.append(Sample({"tokens": tokens, "sequence_ids": sequence_ids, "last_ids": last_ids}))
    return cases


FEED_TOKENS = Op(
    name="feed_tokens",
    doc="ids[t] = tokens[t], or last_ids[sequence_ids[t]] where tokens[t] is negative: the id that the step before "
    "sampled for that sequence. Where there is none (no such sequence, nothing sampled) the id is 0.",
    inputs=(
        Operand("tokens", "i32 [T]"),
        Operand("sequence_ids", "i32 [T], places of last_ids, or negative"),
        Operand("last_ids", "i32 [B]"),
    ),
    outputs=(Operand("ids", "i32 [T], none of them negative"),),
    infer=infer_feed_tokens,
    reference=reference_feed_tokens,
    samples=samples_feed_tokens,
)

OPS = (FEED_TOKENS,)
