"""sample: the next token of every sequence, drawn from its logits as its request asks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .dropout import philox
from .record import Op, Operand, Sample, TensorType, require

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
SAMPLING = 8
"""Columns of `sampling`, of which the last two are not used yet."""
SEED_LOW, SEED_HIGH, POSITION, CHOICE, TOP_K, FLAGS, LOGPROBS, TARGET = range(8)
DRAW = 8
"""Columns of `draw`."""
MASKED, BIASED, PENALISED = 1, 2, 4
"""Bits of draw[FLAGS]."""
IN_PROMPT = 1 << 30
"""Bit of a count: the token is in the prompt. The bits below it count how often it was generated."""
FINITE = float(np.finfo(np.float32).max)
"""What a logit of infinity counts as."""


def infer_sample(inputs, attrs):
    logits, sampling, draw, row_places, mask, bias = inputs
    require(len(logits.shape) == 2, f"sample: logits is [R, V], not {logits.shape}")
    rows, width = logits.shape
    require(sampling.shape == (rows, SAMPLING), f"sample: sampling must have shape {(rows, SAMPLING)}")
    require(draw.shape == (rows, DRAW), f"sample: draw must have shape {(rows, DRAW)}, not {draw.shape}")
    require(row_places.shape == (rows,), f"sample: row_places must have shape {(rows,)}, not {row_places.shape}")
    words = -(-width // 32)
    require(mask is None or mask.shape == (rows, words), f"sample: mask must have shape {(rows, words)}")
    require(bias is None or (len(bias.shape) == 2 and bias.shape[1] == width), f"sample: bias is [B, {width}]")
    # The number of places is the planner's to choose: an inout output takes the shape of the storage it names.
    return [TensorType((rows,), "i32"), TensorType(("B",), "i32"), TensorType(("B", width), "i32")]


def uniform(draw: np.ndarray) -> float:
    """The number in [0, 1) that a row is drawn by."""
    position, choice = (int(draw[column]) & 0xFFFFFFFF for column in (POSITION, CHOICE))
    words = philox(np.array([choice << 32 | position], np.uint64), 0, draw[[SEED_LOW, SEED_HIGH]], last_word=1)[0]
    return (int(words[0]) + int(words[1]) / 2.0**32) / 2.0**32


def adjusted(logits, sampling, draw, mask, bias, counts) -> np.ndarray:
    """Logits [V] of one row after penalties, bias and mask: float64, -infinity where a token may not be drawn.
    mask (u32 [ceil(V / 32)]), bias and counts [V]: read where the row's flags say so."""
    x = np.array(logits, np.float64)
    if draw[FLAGS] & PENALISED:
        times = counts & (IN_PROMPT - 1)
        repetition = sampling[REPETITION]
        x = np.where(counts != 0, np.where(x > 0, x / repetition, x * repetition), x)
        x = np.where(times > 0, x - sampling[PRESENCE] - sampling[FREQUENCY] * times, x)
    if draw[FLAGS] & BIASED:
        x = x + bias
    if draw[FLAGS] & MASKED:
        ids = np.arange(len(x))
        x = np.where(np.asarray(mask, np.int64)[ids // 32] >> (ids % 32) & 1, x, -np.inf)
    return np.minimum(np.where(np.isnan(x), -np.inf, x), FINITE)


def truncated(x: np.ndarray, sampling: np.ndarray, draw: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights [V] that are left of exp((x - max) / temperature), and how far the decisions were from others, as a
    share of all weight."""
    temperature, top_p, min_p = (float(sampling[column]) for column in (TEMPERATURE, TOP_P, MIN_P))
    weights, top_k, margin = np.exp((x - x.max()) / temperature), int(draw[TOP_K]), 1.0
    threshold = -np.inf
    if 0 < top_k < len(x):
        threshold = np.sort(x)[-top_k]
    kept = np.where(x >= threshold, weights, 0.0)
    if top_p < 1.0:
        order = np.argsort(-x, kind="stable")
        cumulative = np.cumsum(kept[order])
        at = int(np.searchsorted(cumulative, top_p * cumulative[-1]))
        ends = np.append(np.flatnonzero(x[order[1:]] != x[order[:-1]]), len(x) - 1)  # ties stay together
        margin = min(margin, np.abs(cumulative[ends] / cumulative[-1] - max(top_p, 0.0)).min())
        threshold = max(threshold, x[order[min(at, len(x) - 1)]])
    if min_p > 0.0:
        margin = min(margin, np.abs(weights / min(min_p, 1.0) - 1.0)[weights < 1.0].min(initial=1.0))
        threshold = max(threshold, x.max() + temperature * np.log(min(min_p, 1.0)))
    return np.where(x >= threshold, weights, 0.0), margin


def drawn(x: np.ndarray, sampling: np.ndarray, draw: np.ndarray) -> tuple[int, float]:
    """The id of a row whose logits are ``adjusted`` (-1: none may be drawn), and how far the draw was from another."""
    if not np.isfinite(x.max()):
        return -1, 1.0
    if not sampling[TEMPERATURE] > 0.0:
        return int(np.argmax(x)), 1.0
    weights, margin = truncated(x, sampling, draw)
    cumulative = np.cumsum(weights) / weights.sum()
    u = uniform(draw)
    borders = cumulative[np.flatnonzero(weights)[:-1]]
    margin = min(margin, np.abs(borders - u).min(initial=1.0))
    return int(np.flatnonzero(cumulative > u)[0]), margin


def _row(operand: np.ndarray | None, row: int) -> np.ndarray | None:
    return None if operand is None else operand[row]


def reference_sample(inputs, attrs, initial):
    last_ids = np.array(initial["last_ids"])
    counts = None if initial.get("counts") is None else np.array(initial["counts"])
    operands = {MASKED: inputs["mask"], BIASED: inputs["bias"], PENALISED: counts}
    sampled = np.full(len(inputs["logits"]), -1)
    for row, place in enumerate(inputs["row_places"]):
        sampling, draw = inputs["sampling"][row], inputs["draw"][row]
        lacks = any(draw[FLAGS] & flag and operand is None for flag, operand in operands.items())
        if not 0 <= place < len(last_ids) or lacks:
            continue
        x = adjusted(inputs["logits"][row], sampling, draw, _row(inputs["mask"], row), _row(inputs["bias"], place),
                     _row(counts, place))
        sampled[row] = drawn(x, sampling, draw)[0]
        last_ids[place] = sampled[row]
        if draw[FLAGS] & PENALISED and sampled[row] >= 0:
            counts[place, sampled[row]] += 1
    return [sampled, last_ids, counts]


# ---- samples


def in_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded toward zero, so that a sample draws the same from logits of either dtype."""
    bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def decided(sample: Sample, rng: np.random.Generator) -> Sample:
    """``sample`` with seeds by which no row is drawn within 1e-5 of another choice."""
    inputs, initial = sample.inputs, sample.initial
    for row, place in enumerate(inputs["row_places"]):
        if not 0 <= place < len(initial["last_ids"]):
            continue
        draw, sampling = inputs["draw"][row], inputs["sampling"][row].astype(np.float32).astype(np.float64)
        x = adjusted(inputs["logits"][row], sampling, draw, _row(inputs.get("mask"), row),
                     _row(inputs.get("bias"), place), _row(initial.get("counts"), place))
        for _ in range(100):
            if drawn(x, sampling, draw)[1] > 1e-5:
                break
            draw[SEED_LOW] = rng.integers(-(2**31), 2**31)
        else:
            raise ValueError(f"sample: row {row} is on a border whatever the seed: {sampling}, {draw}")
    return sample


def _plain(
    rng: np.random.Generator, rows: int, width: int, settings: Mapping[int, object] = {}, top_k: object = 0,
    scale: float = 3.0,
) -> Sample:
    """Rows of random logits at random places; ``settings``: columns of `sampling` -> values of the rows."""
    sampling = np.zeros((rows, SAMPLING))
    sampling[:, TEMPERATURE], sampling[:, TOP_P], sampling[:, REPETITION] = 1.0, 1.0, 1.0
    for column, values in settings.items():
        sampling[:, column] = values
    draw = rng.integers(-(2**31), 2**31, (rows, DRAW))
    draw[:, POSITION], draw[:, CHOICE] = rng.integers(0, 1 << 17, rows), rng.integers(0, 4, rows)
    draw[:, TOP_K], draw[:, FLAGS], draw[:, LOGPROBS], draw[:, TARGET] = top_k, 0, -1, -1
    places = rows + 2
    return Sample(
        {"logits": in_bf16(scale * rng.standard_normal((rows, width))), "sampling": sampling, "draw": draw,
         "row_places": rng.permutation(places)[:rows]},
        {}, ({}, {"logits": "bf16"}),
        {"last_ids": rng.integers(0, width, places)}, frozenset({"counts"}),
    )


def _full(rng, sample: Sample, flags: object) -> Sample:
    """``sample`` with counts, biases and a mask; ``flags`` of its rows."""
    rows, width = sample.inputs["logits"].shape
    places = len(sample.initial["last_ids"])
    counts = rng.integers(0, 3, (places, width)) * (rng.integers(0, 9, (places, width)) == 0)
    counts += IN_PROMPT * (rng.integers(0, 5, (places, width)) == 0)
    sample.initial["counts"] = counts
    sample.inputs["bias"] = rng.integers(-2, 3, (places, width)) * (rng.integers(0, 7, (places, width)) == 0) * 1.0
    sample.inputs["mask"] = rng.integers(-(2**31), 2**31, (rows, -(-width // 32))) | rng.integers(0, 2, (rows, 1))
    sample.inputs["draw"][:, FLAGS] = flags
    sample.absent_outputs = frozenset()
    return sample


def _extremes(rng) -> Sample:
    """Ties, infinities, NaN, rows of which nothing may be drawn, places that don't exist, truncation at its ends."""
    rows, width = 20, 8211
    sample = _plain(rng, rows, width, {TEMPERATURE: (0.0, 1.0) * (rows // 2)})
    logits, sampling, draw = (sample.inputs[name] for name in ("logits", "sampling", "draw"))
    logits[0:2] = rng.integers(0, 3, (2, width))
    logits[2:4, 100:], logits[4:6, :8000] = np.nan, -np.inf
    logits[6], logits[7], logits[8:10, 70:90], logits[10:12, 9::5] = np.nan, -np.inf, np.inf, np.nan
    sample.inputs["row_places"][12], sample.inputs["row_places"][13] = -1, rows + 2
    sampling[13, TOP_P], sampling[15, TOP_P], sampling[17, MIN_P], sampling[19, TEMPERATURE] = 0.5, 0.0, 1.0, 1e-30
    logits[15, 70:75], logits[17, 8200:] = 60.0, 64.0
    logits[16, 8210], logits[18, 0] = 99.0, 99.0
    draw[1, TOP_K], draw[11, TOP_K], draw[9, TOP_K] = 4, 1, 3  # ties at the k-th stay
    sample = decided(sample, rng)
    draw[14, FLAGS] = PENALISED  # which this call cannot do
    return sample


def samples_sample(rng):
    cases = [_plain(rng, rows, width) for rows, width in ((1, 1), (3, 2), (5, 67), (2, 49152), (1, 128256), (0, 5))]
    cases.append(_plain(rng, 4, 49152, {TEMPERATURE: 0.0}))
    cases.append(_plain(rng, 1, 128256, {TEMPERATURE: 0.0}))
    cases.append(_plain(rng, 7, 1000, {TEMPERATURE: (0.1, 0.5, 0.7, 1.0, 1.3, 2.0, 0.0)}))
    top_p = (1.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9, 0.8, -1.0, 2.0)
    min_p = (0.1, 0.0, 0.0, 0.05, 0.0, 0.0, 0.2, 0.0, 0.0, 2.0)
    top_k = (0, 0, 40, 1, 20, 100, 5000, 50, 7, -1)
    for width in (301, 6007, 49152):
        cases.append(_plain(rng, 10, width, {TOP_P: top_p, MIN_P: min_p}, top_k))
    cases.append(_plain(rng, 3, 128256, {TOP_P: (0.9, 0.95, 1.0), TEMPERATURE: (0.8, 0.5, 1.0)}, (0, 50, 1)))
    cases.append(_plain(rng, 3, 20011, {TOP_P: (0.5, 1.0, 0.9)}, (0, 15000, 20000), scale=0.25))  # nearly flat
    cases = [decided(case, rng) for case in cases]
    for width in (1, 70, 5003, 49152):
        settings = {PRESENCE: (0.5, 0.25, 1.0, 0.0, 0.5, 0.0), FREQUENCY: (0.25, 0.5, 0.0, 1.0, 0.5, 0.25),
                    REPETITION: (2.0, 1.0, 1.5, 1.25, 1.0, 0.5), TEMPERATURE: (0.0, 1.0, 0.7, 0.0, 1.0, 0.0),
                    TOP_P: (1.0, 1.0, 0.9, 1.0, 0.9, 1.0)}
        top_k = (0, 0, 0, 0, 30, 0)
        cases.append(decided(_full(rng, _plain(rng, 6, width, settings, top_k), (7, 4, 6, 1, 3, 5)), rng))
    banned = _full(rng, _plain(rng, 4, 200, {TEMPERATURE: (0.0, 1.0, 0.0, 1.0)}), MASKED)
    banned.inputs["mask"][:2] = 0  # nothing is allowed
    banned.inputs["mask"][2:, 1:] = 0
    return [*cases, decided(banned, rng), _extremes(rng)]


SAMPLE = Op(
    name="sample",
    doc="sampled[r] is drawn from logits[r], changed in this order by what the row asks for: repetition penalty (ids "
    "of prompt and answer: positive logits divided, others multiplied), presence and frequency penalties (generated "
    "ids), bias, mask; temperature 0 takes the largest, the lowest id of equals. Else those are kept whose logit is "
    "at least the top_k-th largest, and at least the last of the fewest largest that together have top_p of what that "
    "left, and whose probability is at least min_p of the largest (equals stay together); of these one is drawn by the "
    "inverse of their cumulative sum in order of ids, at the number that Philox4x32-10 gives at counter (position, "
    "choice, 0, 1) keyed by the seed. NaN is never drawn; infinity counts as the largest number. A row that has no id "
    "to draw, asks for an operand that the call lacks, or whose place is not one of last_ids gives -1. Places must be "
    "distinct.",
    inputs=(
        Operand("logits", "[R, V]"),
        Operand("sampling", "f32 [R, 8]: temperature, top_p, min_p, presence, frequency and repetition penalty, 0, 0"),
        Operand("draw", "i32 [R, 8]: seed low, seed high, position, choice, top_k (0: all), flags (1: mask, 2: bias, "
                "4: penalties, and the sampled id is counted), and two that `token_logprobs` reads"),
        Operand("row_places", "i32 [R], rows of last_ids, bias and counts, or negative"),
        Operand("mask", "i32 [R, ceil(V / 32)]; bit v % 32 of word v / 32: v may be drawn", optional=True),
        Operand("bias", "f32 [B, V]", optional=True),
    ),
    outputs=(
        Operand("sampled", "i32 [R]"),
        Operand("last_ids", "i32 [B]; gets sampled[r] at row_places[r]", inout=True),
        Operand("counts", "i32 [B, V]; bits 0 to 29: times generated, bit 30: in the prompt", True, inout=True),
    ),
    infer=infer_sample,
    reference=reference_sample,
    samples=samples_sample,
)

OPS = (SAMPLE,)
