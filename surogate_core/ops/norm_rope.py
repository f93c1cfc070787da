"""norm_rope: `rms_norm` of every head, and `rope` of what it gives, as one op; and the gradient to what goes in."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, require
from .rms_norm import RMS_NORM, RMS_NORM_GRAD, UNIT_OFFSET
from .rope import ROPE

INTERLEAVED = Attr(int, 0, "1 pairs neighbours instead of halves")


def infer_norm_rope(inputs, attrs):
    x, weight, positions, table = inputs
    (y,) = ROPE.infer([x, positions, table], attrs)
    _, rstd = RMS_NORM.infer([x, weight], {})
    return [y, rstd]


def reference_norm_rope(inputs, attrs, initial):
    normed, rstd = RMS_NORM.reference(inputs, attrs, {})
    return [*ROPE.reference({**inputs, "x": normed}, {**attrs, "inverse": 0}, {}), rstd]


SHAPES = (
    (1, 1, 2, 1, 0), (7, 3, 64, 32, 0), (37, 32, 128, 64, 0), (33, 8, 128, 64, 0), (33, 2, 80, 16, 0),
    (5, 7, 80, 40, 1), (9, 5, 96, 48, 0), (0, 2, 16, 8, 0), (19, 6, 256, 128, 1), (12, 1, 256, 64, 0),
    (13, 2, 82, 11, 1), (9, 2, 37, 9, 0), (3, 2, 640, 320, 0), (4, 33, 48, 8, 1),
)
"""Tokens, heads, their dims, pairs that turn, and whether they are interleaved: heads whose lanes on a device are no
power of two, and ones that are wider than a warp."""

DTYPES = (
    {}, {"x": "bf16", "y": "bf16"}, {"x": "bf16", "weight": "bf16", "y": "bf16"}, {"weight": "f16"},
)


def _operands(rng, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    tokens, heads, dim, half, _ = shape
    angles = rng.uniform(-4.0, 4.0, (50, half))
    return {
        "x": 3.0 * rng.standard_normal((tokens, heads, dim)), "weight": rng.standard_normal(dim),
        "positions": rng.integers(0, 50, tokens), "table": 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=-1),
    }


def samples_norm_rope(rng):
    return [
        Sample(
            _operands(rng, shape),
            {"eps": 0.25 if i % 3 else 1e-5, "unit_offset": float(i % 2), "interleaved": shape[-1]},
            DTYPES,
            absent_outputs=frozenset({"rstd"} if i % 4 == 2 else ()),
        )
        for i, shape in enumerate(SHAPES)
    ]


NORM_ROPE = Op(
    name="norm_rope",
    doc="y = rope(rms_norm(x)): the norm of every head of x[T, H, D], turned as `rope` does; in fp32 inside, and rounded "
    "once.",
    inputs=(
        Operand("x", "[T, H, D]"),
        Operand("weight", "[D], of the norm"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2], as `rope` takes it"),
    ),
    outputs=(
        Operand("y", "[T, H, D], in x's dtype"),
        Operand("rstd", "f32 [T, H]; absent where no gradient follows", optional=True),
    ),
    attrs={"eps": RMS_NORM.attrs["eps"], "unit_offset": UNIT_OFFSET, "interleaved": INTERLEAVED},
    infer=infer_norm_rope,
    reference=reference_norm_rope,
    samples=samples_norm_rope,
    in_place=0,
    rows_apart=("x", "y"),
)


def infer_norm_rope_grad(inputs, attrs):
    dy, x, weight, rstd, positions, table, addend = inputs
    require(dy.dtype == x.dtype, f"norm_rope_grad: dy is {dy.dtype}, x {x.dtype}")
    require(addend is None or addend.dtype == x.dtype, f"norm_rope_grad: addend must be {x.dtype}")
    (turned,) = ROPE.infer([dy, positions, table], attrs)
    return RMS_NORM_GRAD.infer([turned, x, weight, rstd, addend], {})


def reference_norm_rope_grad(inputs, attrs, initial):
    (turned,) = ROPE.reference({**inputs, "x": inputs["dy"]}, {**attrs, "inverse": 1}, {})
    return RMS_NORM_GRAD.reference({**inputs, "dy": turned}, attrs, {})


def samples_norm_rope_grad(rng):
    narrow = {"dy": "bf16", "x": "bf16", "addend": "bf16", "dx": "bf16"}
    cases = []
    for i, shape in enumerate(SHAPES):
        operands = _operands(rng, shape)
        rstd = 1.0 / np.sqrt(np.mean(operands["x"] ** 2, axis=-1) + 1e-5)
        more = {name: rng.standard_normal(operands["x"].shape) for name in ("dy", "addend")}
        cases.append(Sample(
            {**operands, "rstd": rstd, "dy": more["dy"], "addend": more["addend"] if i % 2 else None},
            {"unit_offset": float(i % 2), "interleaved": shape[-1]},
            ({}, narrow, {**narrow, "weight": "bf16"}, {"weight": "f16"}),
        ))
    return cases


NORM_ROPE_GRAD = Op(
    name="norm_rope_grad",
    doc="dx = rms_norm_grad(rope(dy, inverse)) + addend: the gradient of `norm_rope` to x; in fp32 inside, and rounded "
    "once.",
    inputs=(
        Operand("dy", "[T, H, D], in x's dtype"),
        Operand("x", "[T, H, D]"),
        Operand("weight", "[D], of the norm"),
        Operand("rstd", "f32 [T, H], of `norm_rope`"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2]"),
        Operand("addend", "[T, H, D], in x's dtype", optional=True),
    ),
    outputs=(Operand("dx", "[T, H, D], in x's dtype"),),
    attrs={"unit_offset": UNIT_OFFSET, "interleaved": INTERLEAVED},
    infer=infer_norm_rope_grad,
    reference=reference_norm_rope_grad,
    samples=samples_norm_rope_grad,
    in_place=0,
    rows_apart=("dy", "x", "addend", "dx"),
)

OPS = (NORM_ROPE, NORM_ROPE_GRAD)
