"""dequantize: a weight in a block format as plain elements, for products that read the same weight many times."""

from __future__ import annotations

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def infer_dequantize(inputs, attrs):
    (weight,) = inputs
    require(len(weight.shape) == 2, f"dequantize: weight is [N, K], not {weight.shape}")
    require(weight.dtype in QUANTISED, f"dequantize: weight must be one of {', '.join(QUANTISED)}, not {weight.dtype}")
    require(attrs["out_dtype"] in ("bf16", "f32"), f"dequantize: out_dtype is bf16 or f32, not {attrs['out_dtype']}")
    return [TensorType(weight.shape, attrs["out_dtype"])]


def samples_dequantize(rng):
    return [
        Sample(
            {"weight": rng.standard_normal(shape)},
            {},
            tuple({"weight": weight, "y": y} for weight in QUANTISED for y in ("bf16", "f32")),
        )
        for shape in ((1, 256), (0, 512), (7, 768), (65, 2304))
    ]


DEQUANTIZE = Op(
    name="dequantize",
    doc="y = weight, decoded: fp32 values, rounded once when y is bf16.",
    inputs=(Operand("weight", "[N, K], quantised along K"),),
    outputs=(Operand("y", "[N, K]"),),
    attrs={"out_dtype": Attr(str, "bf16", "dtype of y: bf16 or f32")},
    infer=infer_dequantize,
    reference=lambda inputs, attrs, initial: [inputs["weight"]],
    samples=samples_dequantize,
    tolerance=Tolerance(relative={"f32": 1e-7, "bf16": 4e-3}, absolute=0.0),
)

OPS = (DEQUANTIZE,)
