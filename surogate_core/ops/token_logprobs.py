"""token_logprobs: log-probabilities of picked tokens, and the likeliest tokens beside them."""

from __future__ import annotations

import numpy as np

from .record import Op, Operand, Sample, TensorType, Tolerance, require
from .sample import DRAW, FINITE, LOGPROBS, TARGET

MOST = 20
"""Alternatives that a row may ask for."""
LEAST = -9999.0
"""Log-probabilities below it, -infinity among them, come out as it."""


def infer_token_logprobs(inputs, attrs):
    logits, sampled, draw = inputs
    require(len(logits.shape) == 2, f"token_logprobs: logits is [R, V], not {logits.shape}")
    rows = logits.shape[:1]
    require(sampled.shape == rows, f"token_logprobs: sampled must have shape {rows}, not {sampled.shape}")
    require(draw.shape == (*rows, DRAW), f"token_logprobs: draw must have shape {(*rows, DRAW)}, not {draw.shape}")
    return [TensorType(rows, "f32"), TensorType((*rows, MOST), "i32"), TensorType((*rows, MOST), "f32")]


def reference_token_logprobs(inputs, attrs, initial):
    logits, sampled, draw = inputs["logits"], inputs["sampled"], inputs["draw"]
    rows, width = logits.shape
    logprob, top_ids, top = np.zeros(rows), np.full((rows, MOST), -1), np.zeros((rows, MOST))
    for row in range(rows):
        wanted = draw[row, LOGPROBS]
        if wanted < 0:
            continue
        x = np.minimum(np.where(np.isnan(logits[row]), -np.inf, logits[row]), FINITE)
        shifted = x - max(x.max(), -FINITE)
        every = np.maximum(shifted - np.log(np.exp(shifted).sum()) if np.isfinite(x.max()) else shifted, LEAST)
        target = draw[row, TARGET] if draw[row, TARGET] >= 0 else sampled[row]
        logprob[row] = every[target] if 0 <= target < width else LEAST
        best = np.argsort(-x, kind="stable")[: min(wanted, MOST)]
        top_ids[row, : len(best)], top[row, : len(best)] = best, every[best]
    return [logprob, top_ids, top]


def samples_token_logprobs(rng):
    cases = []
    for rows, width in ((1, 1), (3, 7), (9, 1003), (2, 49152), (3, 128256), (0, 5)):
        logits = 3.0 * rng.standard_normal((rows, width))
        draw = np.zeros((rows, DRAW), np.int32)
        draw[:, LOGPROBS] = rng.integers(-1, MOST + 1, rows)
        draw[:, TARGET] = np.where(rng.integers(0, 2, rows) > 0, rng.integers(0, width, rows), -1)
        draw[:1, LOGPROBS] = MOST
        cases.append(Sample(
            {"logits": logits, "sampled": rng.integers(0, width, rows), "draw": draw}, {}, ({}, {"logits": "bf16"})
        ))
    logits = np.round(rng.standard_normal((8, 9001)))  # ties in plenty
    logits[0], logits[1], logits[2, 17:] = -np.inf, np.nan, np.nan
    logits[3, 5], logits[4, 40:] = np.inf, -np.inf
    logits[5, 3] = 3e4
    draw = np.zeros((8, DRAW), np.int32)
    draw[:, LOGPROBS], draw[:, TARGET] = (20, 3, 19, 20, 20, 1, 0, -1), (7, 5, -1, -1, 8000, -1, 9001, 1)
    sampled = np.array([0, 0, 4, 5, 0, -1, 0, 0])
    cases.append(Sample({"logits": logits, "sampled": sampled, "draw": draw}, {}, ({}, {"logits": "bf16"})))
    return cases


TOKEN_LOGPROBS = Op(
    name="token_logprobs",
    doc="Of every row that asks (draw[6] from 0 to 20; negative: none), by its logits as they are: the log-probability "
    "of the token draw[7], or of the sampled one where that is negative, and the draw[6] likeliest tokens, likeliest "
    "first, the lower id first of equals. NaN counts as -infinity; what is below -9999, and a token outside the row, "
    "comes out as -9999. Rows that don't ask, and places past the tokens that a row asks for, hold 0 and the id -1.",
    inputs=(
        Operand("logits", "[R, V]"),
        Operand("sampled", "i32 [R]"),
        Operand("draw", "i32 [R, 8], as `sample` takes it"),
    ),
    outputs=(
        Operand("logprob", "f32 [R]"),
        Operand("top_ids", "i32 [R, 20]"),
        Operand("top_logprobs", "f32 [R, 20]"),
    ),
    infer=infer_token_logprobs,
    reference=reference_token_logprobs,
    samples=samples_token_logprobs,
    tolerance=Tolerance(relative={"f32": 2e-6}),
)

OPS = (TOKEN_LOGPROBS,)
