"""norm_rope: `rms_norm` of every head, and `rope` of what it gives, as one op; and the gradient to what goes in."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, require
from .rms_norm import RMS_NORM, RMS_NORM_GRAD, UNIT_OFFSET
from .rope import ROPE

INTERLEAVED = Attr(int, 0, "1 pairs neighbours instead of halves")


FIRST_HEADS = Attr(int, 0, "heads that `weight` is of where there is a `second_weight`, else 0")
SECOND_WEIGHT = Operand("second_weight", "[D], of the norm of heads from `first_heads` on", optional=True)


def infer_norm_rope(inputs, attrs):
    x, weight, positions, table, second_weight = inputs
    (y,) = ROPE.infer([x, positions, table], attrs)
    _, rstd = RMS_NORM.infer([x, weight], {})
    _require_second("norm_rope", x, second_weight, attrs["first_heads"])
    return [y, rstd]


def _require_second(op, x, second_weight, first_heads):
    if second_weight is None:
        require(first_heads == 0, f"{op}: first_heads is {first_heads} without a second_weight")
    else:
        RMS_NORM.infer([x, second_weight], {})
        require(0 < first_heads < x.shape[1], f"{op}: first_heads is {first_heads} of {x.shape[1]} with a second_weight")


def _weight(inputs, attrs) -> np.ndarray:
    """[D], or a row a head [H, D] where heads differ."""
    if inputs["second_weight"] is None:
        return inputs["weight"]
    first, heads = attrs["first_heads"], inputs["x"].shape[1]
    return np.stack([inputs["weight"]] * first + [inputs["second_weight"]] * (heads - first))


def reference_norm_rope(inputs, attrs, initial):
    normed, rstd = RMS_NORM.reference({**inputs, "weight": _weight(inputs, attrs)}, attrs, {})
    return [*ROPE.reference({**inputs, "x": normed}, {**attrs, "inverse": 0}, {}), rstd]


SHAPES = (
    (1, 1, 2, 1, 0), (7, 3, 64, 32, 0), (37, 32, 128, 64, 0), (33, 8, 128, 64, 0), (33, 2, 80, 16, 0),
    (5, 7, 80, 40, 1), (9, 5, 96, 48, 0), (0, 2, 16, 8, 0), (19, 6, 256, 128, 1), (12, 1, 256, 64, 0),
    (13, 2, 82, 11, 1), (9, 2, 37, 9, 0), (3, 2, 640, 320, 0), (4, 33, 48, 8, 1),
)
"""Tokens, heads, their dims, pairs that turn, and whether they are interleaved: heads whose lanes on a device are no
power of two, and ones that are wider than a warp."""
TWO_WEIGHTS = (
    (37, 40, 128, 64, 0, 32), (12, 7, 24, 8, 1, 5), (9, 5, 256, 128, 0, 4), (5, 3, 82, 11, 1, 2), (3, 3, 640, 320, 0, 1),
    (0, 2, 16, 8, 0, 1),
)
"""The same, and how many heads have the first weight."""
SAMPLES = (*((*shape, 0) for shape in SHAPES), *TWO_WEIGHTS)

DTYPES = (
    {}, {"x": "bf16", "y": "bf16"}, {"x": "bf16", "weight": "bf16", "y": "bf16"}, {"weight": "f16"},
)


def _operands(rng, shape: tuple[int, ...]) -> dict[str, np.ndarray | None]:
    tokens, heads, dim, half, _, first_heads = shape
    angles = rng.uniform(-4.0, 4.0, (50, half))
    return {
        "second_weight": rng.standard_normal(dim) if first_heads else None,
        "x": 3.0 * rng.standard_normal((tokens, heads, dim)), "weight": rng.standard_normal(dim),
        "positions": rng.integers(0, 50, tokens), "table": 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=-1),
    }


def _attrs(index: int, shape: tuple[int, ...]) -> dict[str, float]:
    return {"unit_offset": float(index % 2), "interleaved": shape[4], "first_heads": shape[5]}


def samples_norm_rope(rng):
    return [
        Sample(
            _operands(rng, shape),
            {"eps": 0.25 if i % 3 else 1e-5, **_attrs(i, shape)},
            DTYPES,
            absent_outputs=frozenset({"rstd"} if i % 4 == 2 else ()),
        )
        for i, shape in enumerate(SAMPLES)
    ]


NORM_ROPE = Op(
    name="norm_rope",
    doc="y = rope(rms_norm(x)): the norm of every head of x[T, H, D], turned as `rope` does; in fp32 inside, and rounded "
    "once. Heads of queries and of keys side by side have two weights.",
    inputs=(
        Operand("x", "[T, H, D]"),
        Operand("weight", "[D], of the norm"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2], as `rope` takes it"),
        SECOND_WEIGHT,
    ),
    outputs=(
        Operand("y", "[T, H, D], in x's dtype"),
        Operand("rstd", "f32 [T, H]; absent where no gradient follows", optional=True),
    ),
    attrs={
        "eps": RMS_NORM.attrs["eps"], "unit_offset": UNIT_OFFSET, "interleaved": INTERLEAVED, "first_heads": FIRST_HEADS,
    },
    infer=infer_norm_rope,
    reference=reference_norm_rope,
    samples=samples_norm_rope,
    in_place=0,
    rows_apart=("x", "y"),
)


def infer_norm_rope_grad(inputs, attrs):
    dy, x, weight, rstd, positions, table, addend, second_weight = inputs
    require(dy.dtype == x.dtype, f"norm_rope_grad: dy is {dy.dtype}, x {x.dtype}")
    require(addend is None or addend.dtype == x.dtype, f"norm_rope_grad: addend must be {x.dtype}")
    _require_second("norm_rope_grad", x, second_weight, attrs["first_heads"])
    (turned,) = ROPE.infer([dy, positions, table], attrs)
    return RMS_NORM_GRAD.infer([turned, x, weight, rstd, addend], {})


def reference_norm_rope_grad(inputs, attrs, initial):
    (turned,) = ROPE.reference({**inputs, "x": inputs["dy"]}, {**attrs, "inverse": 1}, {})
    return RMS_NORM_GRAD.reference({**inputs, "dy": turned, "weight": _weight(inputs, attrs)}, attrs, {})


def samples_norm_rope_grad(rng):
    narrow = {"dy": "bf16", "x": "bf16", "addend": "bf16", "dx": "bf16"}
    cases = []
    for i, shape in enumerate(SAMPLES):
        operands = _operands(rng, shape)
        rstd = 1.0 / np.sqrt(np.mean(operands["x"] ** 2, axis=-1) + 1e-5)
        more = {name: rng.standard_normal(operands["x"].shape) for name in ("dy", "addend")}
        cases.append(Sample(
            {**operands, "rstd": rstd, "dy": more["dy"], "addend": more["addend"] if i % 2 else None},
            _attrs(i, shape),
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
        SECOND_WEIGHT,
    ),
    outputs=(Operand("dx", "[T, H, D], in x's dtype"),),
    attrs={"unit_offset": UNIT_OFFSET, "interleaved": INTERLEAVED, "first_heads": FIRST_HEADS},
    infer=infer_norm_rope_grad,
    reference=reference_norm_rope_grad,
    samples=samples_norm_rope_grad,
    in_place=0,
    rows_apart=("dy", "x", "addend", "dx"),
)

OPS = (NORM_ROPE, NORM_ROPE_GRAD)
