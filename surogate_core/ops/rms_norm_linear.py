"""rms_norm_linear: `rms_norm`, `linear`, and where asked `glu` on the two halves of its columns, as one op."""

from __future__ import annotations

from .glu import ACTIVATIONS, GLU
from .linear import ALPHA, LINEAR, OUT_DTYPE
from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require
from .rms_norm import RMS_NORM, UNIT_OFFSET

NO_GLU = "none"


def infer_rms_norm_linear(inputs, attrs):
    x, norm_weight, weight, bias = inputs
    RMS_NORM.infer([x, norm_weight], {})
    (product,) = LINEAR.infer([x, weight, bias, None], {})
    dtype, activation = attrs.get("out_dtype") or x.dtype, attrs["activation"]
    if activation == NO_GLU:
        return [TensorType(product.shape, dtype)]
    require(activation in ACTIVATIONS, f"rms_norm_linear: no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    require(product.shape[1] % 2 == 0, f"rms_norm_linear: {product.shape[1]} columns are not a gate and as much to let through")
    return [TensorType((product.shape[0], product.shape[1] // 2), dtype)]


def reference_rms_norm_linear(inputs, attrs, initial):
    normed, _ = RMS_NORM.reference({"x": inputs["x"], "weight": inputs["norm_weight"]}, attrs, {})
    (product,) = LINEAR.reference({**inputs, "x": normed, "addend": None}, attrs, {})
    if attrs["activation"] == NO_GLU:
        return [product]
    half = product.shape[1] // 2
    return GLU.reference({"gate": product[:, :half], "up": product[:, half:]}, attrs, {})


def samples_rms_norm_linear(rng):
    plain = (
        {"x": "bf16", "norm_weight": "bf16", "weight": "bf16", "y": "bf16"},
        {"weight": "bf16", "y": "bf16"},
        {"x": "bf16", "norm_weight": "f16", "weight": "bf16", "y": "f32"},
    )
    cases = []
    for tokens, rows, width, activation, bias in (
        (1, 48, 128, NO_GLU, False), (1, 96, 1024, "silu", False), (8, 64, 64, "gelu_tanh", False), (3, 34, 328, "gelu", True),
        (7, 33, 77, NO_GLU, True), (0, 16, 8, NO_GLU, False), (20, 40, 96, "silu", False),
    ):
        cases.append(Sample(
            {"x": 3.0 * rng.standard_normal((tokens, width)), "norm_weight": rng.standard_normal(width),
             "weight": rng.standard_normal((rows, width)), "bias": rng.standard_normal(rows) if bias else None},
            {"eps": 1e-5, "unit_offset": float(tokens % 2), "alpha": 0.5 if bias else 1.0, "activation": activation},
            plain,
        ))
    return cases


RMS_NORM_LINEAR = Op(
    name="rms_norm_linear",
    doc="p[T,N] = alpha * rms_norm(x[T,K], norm_weight[K]) @ weight[N,K].T + bias[N]; y is p, or with an activation "
    "y[T,N/2] = activation(p[:, :N/2]) * p[:, N/2:]. Operands of the product may be rounded to bf16.",
    inputs=(
        Operand("x", "[T, K]"),
        Operand("norm_weight", "[K]"),
        Operand("weight", "[N, K]"),
        Operand("bias", "[N]", optional=True),
    ),
    outputs=(Operand("y", "[T, N] or [T, N/2]"),),
    attrs={
        "eps": RMS_NORM.attrs["eps"],
        "unit_offset": UNIT_OFFSET,
        "alpha": ALPHA,
        "activation": Attr(str, NO_GLU, "none, silu, gelu_tanh or gelu"),
        "out_dtype": OUT_DTYPE,
    },
    infer=infer_rms_norm_linear,
    reference=reference_rms_norm_linear,
    flops=lambda inputs, attrs: 2.0 * inputs[0].shape[0] * inputs[2].shape[0] * inputs[2].shape[1],
    samples=samples_rms_norm_linear,
    tolerance=Tolerance(relative={"f32": 4e-3, "bf16": 6e-3}, absolute=1e-6),
    rows_apart=("x", "y"),
)

OPS = (RMS_NORM_LINEAR,)
