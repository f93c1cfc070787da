"""low_rank_grad: all gradients that the second halves of low-rank branches hand back, from one reading of dy.

One branch, or up to four whose results lie side by side: then so do their gradients in dy, and what they multiply in low.
"""

from __future__ import annotations

import numpy as np

from .linear import ALPHA, GEMM_TOLERANCE
from .record import Op, Operand, Sample, TensorType, require

MOST = 4
"""Branches of one call."""
FACTORS = ("b", *(f"b_{i}" for i in range(2, MOST + 1)))
GRADIENTS = tuple(f"d{name}" for name in FACTORS)


def infer(inputs, attrs):
    dy, low, b, *others = inputs
    require(all(len(t.shape) == 2 for t in inputs if t is not None), "low_rank_grad: dy is [T, N], low [T, G R], each b [N_i, R]")
    present = [b, *(t for t in others if t is not None)]
    require(all(t is None for t in others[len(present) - 1 :]), "low_rank_grad: a b is missing before the last one")
    rank, rows = b.shape[1], sum(t.shape[0] for t in present)
    require(all(t.shape[1] == rank for t in present), f"low_rank_grad: every b must have {rank} columns, as the first has")
    require(dy.shape[1] == rows, f"low_rank_grad: dy has {dy.shape[1]} columns, the b's {rows} rows")
    shape = (dy.shape[0], len(present) * rank)
    require(low.shape == shape, f"low_rank_grad: low must have shape {shape}")
    gradients = [TensorType((0, rank) if t is None else t.shape, "f32") for t in (b, *others)]
    return [TensorType(shape, dy.dtype), *gradients]


def reference(inputs, attrs, initial):
    dy, low = inputs["dy"], inputs["low"]
    dlow, gradients = np.empty_like(low), []
    start, rank = 0, inputs["b"].shape[1]
    for i, (name, gradient) in enumerate(zip(FACTORS, GRADIENTS)):
        b = inputs[name]
        if b is None:
            gradients.append(np.zeros((0, rank)))
            continue
        own, place = dy[:, start : start + len(b)], slice(i * rank, (i + 1) * rank)
        dlow[:, place] = attrs["alpha"] * (own @ b)
        gradients.append(initial[gradient] + attrs["alpha"] * (own.T @ low[:, place]))
        start += len(b)
    return [dlow, *gradients]


def samples(rng):
    """Ranks that tensor cores like, with tokens and features that end within a tile or go on over several, and odd ones; then
    branches side by side, of different widths."""
    one = (
        (1, (8,), 8), (7, (33,), 5), (65, (520,), 16), (300, (1032,), 16), (37, (72,), 24), (130, (264,), 32), (16, (512,), 40),
        (33, (328,), 48), (81, (256,), 56), (100, (600,), 64), (20, (48,), 72), (0, (16,), 8),
    )
    several = (
        (61, (96, 40), 8), (129, (256, 64, 64), 16), (45, (136, 72, 8, 200), 24), (70, (328, 144), 32), (203, (520, 136, 264), 8),
        (33, (64, 1, 24), 16), (9, (33, 7), 5), (1, (128, 64), 16), (0, (16, 24), 8),
    )
    return [_sample(rng, *each) for each in (*one, *several)]


def _sample(rng, tokens, widths, rank) -> Sample:
    def values(rows, columns):
        return rng.standard_normal((rows, columns))

    inputs = {"dy": values(tokens, sum(widths)), "low": values(tokens, len(widths) * rank)}
    inputs |= {name: values(width, rank) for name, width in zip(FACTORS, widths)}
    return Sample(
        inputs, {"alpha": 0.5 if rank % 16 else 2.0},
        ({}, dict.fromkeys(("dy", "low", *FACTORS, "dlow"), "bf16")),
        {name: values(width, rank) for name, width in zip(GRADIENTS, widths)},
        frozenset(GRADIENTS[len(widths) :]),
    )


LOW_RANK_GRAD = Op(
    name="low_rank_grad",
    doc="dlow_i[T,R] = alpha * dy_i[T,N_i] @ b_i[N_i,R] and db_i[N_i,R] += alpha * dy_i[T,N_i].T @ low_i[T,R]: the gradients of "
        "y_i = alpha * low_i @ b_i.T to low_i and, accumulated in fp32, to b_i. As many branches as there are b's, G, lie side "
        "by side: N is the sum of all N_i, and dy, low and dlow have the columns of the first, then those of the second, and so "
        "on.",
    inputs=(
        Operand("dy", "[T, N]"), Operand("low", "[T, G R]"), Operand("b", "[N_1, R]"),
        *(Operand(name, f"[N_{i}, R]", optional=True) for i, name in enumerate(FACTORS[1:], 2)),
    ),
    outputs=(
        Operand("dlow", "[T, G R], in dy's dtype"), Operand("db", "f32 [N_1, R]", inout=True),
        *(Operand(name, f"f32 [N_{i}, R]", optional=True, inout=True) for i, name in enumerate(GRADIENTS[1:], 2)),
    ),
    attrs={"alpha": ALPHA},
    infer=infer,
    reference=reference,
    flops=lambda inputs, attrs: 4.0 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[2].shape[1],
    samples=samples,
    tolerance=GEMM_TOLERANCE,
    rows_apart=("dy", "low", "dlow"),
    compute_inputs=("dy", "low"),
)

OPS = (LOW_RANK_GRAD,)
