"""attention: softmax(scale * q @ k.T) @ v inside each document of a packed batch, and its gradient."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

SCALE = Attr(float, None, "factor of the logits, > 0 (usually 1 / sqrt(head_dim))")
CAUSAL = Attr(int, 1, "1: token i sees tokens j <= i only")
WINDOW = Attr(int, 0, "if > 0, token i sees tokens j with |i - j| < window only")
SOFTCAP = Attr(float, 0.0, "if > 0, logits become softcap * tanh(logits / softcap)")
MAX_LENGTH = Attr(int, 0, "if > 0, no document is longer: what kernels may size their work by; 0: not known")
DETERMINISTIC = Attr(int, 1, "0 lets kernels add in any order, so that results may differ from run to run in rounding")
ATTRS = {"scale": SCALE, "causal": CAUSAL, "window": WINDOW, "softcap": SOFTCAP, "max_length": MAX_LENGTH}
GRAD_ATTRS = {**ATTRS, "deterministic": DETERMINISTIC}

# Logits are sums of head_dim products in fp32 and pass through an exponential, which turns their absolute error into a
# relative one. Kernels on bf16 dot products round the probabilities (forward) and their gradients (backward) to bf16
# before multiplying them, once each, on top of the rounding of the result.
FORWARD_TOLERANCE = Tolerance(relative={"f32": 4e-6, "bf16": 4e-3}, absolute=1e-6)
GRAD_TOLERANCE = Tolerance(relative={"f32": 1e-5, "bf16": 6e-3}, absolute=1e-6)


def check_heads(op: str, q, k, v, attrs) -> None:
    """The rules shared by every attention op; k and v are [..., num_kv_heads, head_dim]."""
    require(len(q.shape) == 3 and len(k.shape) == 3 and len(v.shape) == 3, f"{op}: q, k and v have three axes")
    require(k.shape[:2] == v.shape[:2], f"{op}: k has rows and heads {k.shape[:2]}, v {v.shape[:2]}")
    require(q.shape[2] == k.shape[2], f"{op}: q has head_dim {q.shape[2]}, k {k.shape[2]}")
    require(
        isinstance(q.shape[1], str) or isinstance(k.shape[1], str) or q.shape[1] % k.shape[1] == 0,
        f"{op}: {q.shape[1]} query heads are no multiple of {k.shape[1]} key-value heads",
    )
    require(attrs.get("scale", 1.0) > 0, f"{op}: scale must be > 0, not {attrs.get('scale')}")
    require(attrs.get("window", 0) >= 0, f"{op}: window must be 0 (none) or positive, not {attrs.get('window')}")
    length = attrs.get("max_length", 0)
    require(length >= 0, f"{op}: max_length must be 0 (not known) or positive, not {length}")


def infer_attention(inputs, attrs):
    q, k, v, doc_starts = inputs
    check_heads("attention", q, k, v, attrs)
    require(q.shape[0] == k.shape[0], f"attention: q has {q.shape[0]} tokens, k {k.shape[0]}")
    dtypes = (q.dtype, k.dtype, v.dtype)
    require(len(set(dtypes)) == 1, f"attention: q, k and v must agree in dtype, but are {', '.join(dtypes)}")
    require(len(doc_starts.shape) == 1, "attention: doc_starts has one axis")
    return [TensorType((*q.shape[:2], v.shape[2]), q.dtype), TensorType(q.shape[:2], "f32")]


def visible(num_queries: int, num_keys: int, first_query: int, causal: int, window: int) -> np.ndarray:
    """bool [num_queries, num_keys]: may the query at position first_query + i see the key at position j?"""
    distance = (first_query + np.arange(num_queries))[:, None] - np.arange(num_keys)[None, :]
    mask = np.ones_like(distance, dtype=bool)
    if causal:
        mask &= distance >= 0
    if window > 0:
        mask &= np.abs(distance) < window
    return mask


def masked_logits(q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float, softcap: float) -> np.ndarray:
    """[num_queries, num_keys], -inf where masked."""
    logits = scale * (q @ k.T)
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    return np.where(mask, logits, -np.inf)


def documents(doc_starts: np.ndarray) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(doc_starts) if b > a]


def reference_attention(inputs, attrs, initial):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    group = q.shape[1] // k.shape[1]
    o = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.zeros(q.shape[:2])
    for doc in documents(inputs["doc_starts"]):
        length = doc.stop - doc.start
        mask = visible(length, length, 0, attrs["causal"], attrs["window"])
        for head in range(q.shape[1]):
            logits = masked_logits(q[doc, head], k[doc, head // group], mask, attrs["scale"], attrs["softcap"])
            peak = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - peak)
            total = weights.sum(axis=1, keepdims=True)
            o[doc, head] = weights @ v[doc, head // group] / total
            lse[doc, head] = (peak + np.log(total))[:, 0]
    return [o, lse]


def vjp_attention(b, node, grads):
    do, dlse = grads
    require(dlse is None, "attention: lse is saved for the gradient and has none itself; differentiate through o only")
    q, k, v, doc_starts = node.inputs
    o, lse = node.outputs
    dq, dk, dv = b.op("attention_grad", do, q, k, v, o, lse, doc_starts, **node.attrs)
    return dq, dk, dv, None


def attention_flops(inputs, attrs) -> float:
    """Two products over the visible pairs, as if all tokens were one document."""
    q, _, v = inputs[:3]
    tokens = q.shape[0]
    causal, window = attrs.get("causal", 1), attrs.get("window") or tokens
    pairs = tokens * (0.5 * min(tokens, window) if causal else min(tokens, 2 * window - 1))
    return 2.0 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])


# (documents, query heads, kv heads, head_dim of q and k, of v, attributes)
SHAPES = (
    ((7, 1, 12), 3, 1, 16, 16, {}),
    ((33, 0, 64), 4, 2, 64, 64, {}),
    ((150, 43), 6, 2, 64, 64, {"window": 37}),
    ((97,), 2, 2, 80, 48, {"causal": 0}),
    ((140, 20), 4, 4, 32, 32, {"causal": 0, "window": 50}),
    ((411, 130, 1), 6, 2, 64, 64, {"causal": 0, "window": 9}),
    ((70, 61), 4, 1, 128, 128, {"softcap": 2.5}),
    ((300,), 4, 1, 256, 256, {"window": 128}),
    ((515, 130), 9, 3, 64, 64, {}),
    ((40,), 17, 1, 24, 40, {}),
    ((37, 5), 4, 2, 512, 384, {"window": 20}),
    ((), 4, 2, 16, 16, {}),
)
BF16 = {"q": "bf16", "k": "bf16", "v": "bf16", "o": "bf16"}
BF16_GRAD = {**BF16, "do": "bf16", "dq": "bf16", "dk": "bf16", "dv": "bf16"}


def _operands(rng, lengths, num_heads, num_kv_heads, head_dim, value_dim, attrs):
    """q, k, v, doc_starts (its tail repeated once, as packed batches have it) and the complete attributes."""
    doc_starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64), [sum(lengths)]]).astype(np.int32)
    tokens = int(doc_starts[-1])
    inputs = {
        "q": rng.standard_normal((tokens, num_heads, head_dim)),
        "k": rng.standard_normal((tokens, num_kv_heads, head_dim)),
        "v": rng.standard_normal((tokens, num_kv_heads, value_dim)),
        "doc_starts": doc_starts,
    }
    return inputs, {"scale": head_dim**-0.5, "causal": 1, "window": 0, "softcap": 0.0, **attrs}


def samples_attention(rng):
    return [Sample(*_operands(rng, *shape), ({}, BF16)) for shape in SHAPES]


ATTENTION = Op(
    name="attention",
    doc="Softmax attention within documents [doc_starts[i], doc_starts[i+1]). Query head h reads key-value head "
    "h // (num_heads / num_kv_heads). lse[t, h] is the natural logarithm of the sum of exp(logits) (Dao et al., 2022).",
    inputs=(
        Operand("q", "[T, num_heads, head_dim]"),
        Operand("k", "[T, num_kv_heads, head_dim]"),
        Operand("v", "[T, num_kv_heads, value_dim]"),
        Operand("doc_starts", "i32 [M+1], ascending from 0 to T; the tail repeats T"),
    ),
    outputs=(Operand("o", "[T, num_heads, value_dim], q's dtype"), Operand("lse", "f32 [T, num_heads]")),
    attrs=ATTRS,
    infer=infer_attention,
    reference=reference_attention,
    vjp=vjp_attention,
    flops=attention_flops,
    samples=samples_attention,
    tolerance=FORWARD_TOLERANCE,
    rows_apart=("q", "k", "v", "o"),
    differentiable=("q", "k", "v"),
)


def infer_attention_grad(inputs, attrs):
    do, q, k, v, o, lse, _ = inputs
    check_heads("attention_grad", q, k, v, attrs)
    require(do.shape == o.shape, f"attention_grad: do has shape {do.shape}, o {o.shape}")
    require(do.dtype == q.dtype, f"attention_grad: do is {do.dtype}, q {q.dtype}; they must agree")
    require(lse.shape == q.shape[:2], f"attention_grad: lse must have shape {q.shape[:2]}")
    return [TensorType(x.shape, x.dtype) for x in (q, k, v)]


def reference_attention_grad(inputs, attrs, initial):
    do, q, k, v, o, lse = (inputs[name] for name in ("do", "q", "k", "v", "o", "lse"))
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for doc in documents(inputs["doc_starts"]):
        length = doc.stop - doc.start
        mask = visible(length, length, 0, attrs["causal"], attrs["window"])
        for head in range(q.shape[1]):
            kv_head = head // group
            logits = masked_logits(q[doc, head], k[doc, kv_head], mask, attrs["scale"], attrs["softcap"])
            weights = np.exp(logits - lse[doc, head][:, None])
            delta = (do[doc, head] * o[doc, head]).sum(axis=1, keepdims=True)
            dlogits = weights * (do[doc, head] @ v[doc, kv_head].T - delta) * attrs["scale"]
            if attrs["softcap"] > 0:
                dlogits *= 1.0 - (np.where(mask, logits, 0.0) / attrs["softcap"]) ** 2
            dq[doc, head] = dlogits @ k[doc, kv_head]
            dk[doc, kv_head] += dlogits.T @ q[doc, head]
            dv[doc, kv_head] += weights.T @ do[doc, head]
    return [dq, dk, dv]


def samples_attention_grad(rng):
    cases = []
    for shape in SHAPES:
        inputs, attrs = _operands(rng, *shape)
        o, lse = reference_attention(inputs, attrs, {})
        do = rng.standard_normal(o.shape)
        cases.append(Sample({"do": do, **inputs, "o": o, "lse": lse}, attrs, ({}, BF16_GRAD)))
    longest = max(int(np.diff(case.inputs["doc_starts"]).max(initial=0)) for case in cases)
    for case in cases[1:3]:  # kernels that may add in any order, and that size their memory by the longest document
        attrs = {**case.attrs, "deterministic": 0, "max_length": longest}
        cases.append(Sample(case.inputs, attrs, (BF16_GRAD,)))
    return cases


ATTENTION_GRAD = Op(
    name="attention_grad",
    doc="The gradient of `attention` to q, k and v from the gradient of o. The probabilities are recomputed from lse.",
    inputs=(
        Operand("do", "[T, num_heads, value_dim], q's dtype"),
        Operand("q", "[T, num_heads, head_dim]"),
        Operand("k", "[T, num_kv_heads, head_dim]"),
        Operand("v", "[T, num_kv_heads, value_dim]"),
        Operand("o", "[T, num_heads, value_dim], what `attention` gave"),
        Operand("lse", "f32 [T, num_heads], what `attention` gave"),
        Operand("doc_starts", "i32 [M+1]"),
    ),
    outputs=(Operand("dq", "as q"), Operand("dk", "as k"), Operand("dv", "as v")),
    attrs=GRAD_ATTRS,
    infer=infer_attention_grad,
    reference=reference_attention_grad,
    flops=lambda inputs, attrs: 2.5 * attention_flops(inputs[1:4], attrs),
    samples=samples_attention_grad,
    tolerance=GRAD_TOLERANCE,
    rows_apart=("do", "q", "k", "v", "o", "dq", "dk", "dv"),
)

OPS = (ATTENTION, ATTENTION_GRAD)
