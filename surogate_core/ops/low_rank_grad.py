"""low_rank_grad: both gradients that the second half of a low-rank branch hands back, from one reading of dy."""

from __future__ import annotations

from .linear import ALPHA, GEMM_TOLERANCE
from .record import Op, Operand, Sample, TensorType, require


def infer(inputs, attrs):
    dy, b, low = inputs
    require(all(len(t.shape) == 2 for t in inputs), "low_rank_grad: dy is [T, N], b [N, R] and low [T, R]")
    require(dy.shape[1] == b.shape[0], f"low_rank_grad: dy has {dy.shape[1]} columns, b {b.shape[0]} rows")
    require(low.shape == (dy.shape[0], b.shape[1]), f"low_rank_grad: low must have shape {(dy.shape[0], b.shape[1])}")
    return [TensorType(low.shape, dy.dtype), TensorType(b.shape, "f32")]


def reference(inputs, attrs, initial):
    dy, b, low = inputs["dy"], inputs["b"], inputs["low"]
    return [attrs["alpha"] * (dy @ b), initial["db"] + attrs["alpha"] * (dy.T @ low)]


def samples(rng):
    """Ranks that tensor cores like, with tokens and features that end within a tile or go on over several, and odd ones."""
    return [
        Sample(
            {
                "dy": rng.standard_normal((tokens, features)),
                "b": rng.standard_normal((features, rank)),
                "low": rng.standard_normal((tokens, rank)),
            },
            {"alpha": 0.5 if rank % 16 else 2.0},
            ({}, {"dy": "bf16", "b": "bf16", "low": "bf16", "dlow": "bf16"}),
            {"db": rng.standard_normal((features, rank))},
        )
        for tokens, features, rank in (
            (1, 8, 8), (7, 33, 5), (65, 520, 16), (300, 1032, 16), (37, 72, 24), (130, 264, 32), (16, 512, 40),
            (33, 328, 48), (81, 256, 56), (100, 600, 64), (20, 48, 72), (0, 16, 8),
        )
    ]


LOW_RANK_GRAD = Op(
    name="low_rank_grad",
    doc="dlow[T,R] = alpha * dy[T,N] @ b[N,R] and db[N,R] += alpha * dy[T,N].T @ low[T,R]: the gradients of "
        "y = alpha * low @ b.T to low and, accumulated in fp32, to b.",
    inputs=(Operand("dy", "[T, N]"), Operand("b", "[N, R]"), Operand("low", "[T, R]")),
    outputs=(Operand("dlow", "[T, R], in dy's dtype"), Operand("db", "f32 [N, R]", inout=True)),
    attrs={"alpha": ALPHA},
    infer=infer,
    reference=reference,
    flops=lambda inputs, attrs: 4.0 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[1].shape[1],
    samples=samples,
    tolerance=GEMM_TOLERANCE,
    rows_apart=("dy", "low", "dlow"),
    compute_inputs=("dy", "low"),
)

OPS = (LOW_RANK_GRAD,)
