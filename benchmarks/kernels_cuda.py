"""Each kernel of training alone, at the shapes of a model: microseconds, GB/s, TFLOP/s, and the share of its floor.

    python benchmarks/kernels_cuda.py                        # Llama-3.1-8B, 4,096 tokens
    python benchmarks/kernels_cuda.py --model llama-3.2-1b --model qwen3-0.6b --tokens 16384 --op rms_norm --op glu
    python benchmarks/kernels_cuda.py --backend cpu --model tiny --tokens 64

A line of JSON a kernel and shape. A call runs many times on operands that lie apart, so that nothing waits in a cache, and as
one graph, so that nothing waits for the host. `of_copy` and `of_gemm` are shares of ceilings of the same process: the rates of
a copy of gigabytes, and of the largest product. `of_equal_copy` is the share of the rate that a copy of as many bytes reaches,
measured as the kernels are: a launch, the first loads' latency and the last stores' are in it too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surogate_core import engine  # noqa: E402
from surogate_core.bench.ceilings import (  # noqa: E402
    Ceilings, SmallCopies, call_seconds, copies_beyond_caches, measure_ceilings, measure_small_copies, one_op,
)
from surogate_core.bench.kernels import cost  # noqa: E402
from surogate_core.bench.presets import architecture, presets  # noqa: E402
from surogate_core.ops.low_rank_grad import FACTORS, GRADIENTS  # noqa: E402
from surogate_core.program import Program  # noqa: E402
from surogate_core.program.program import Instruction, TensorEntry, dense_strides  # noqa: E402

Call = tuple[str, list[Any], list[Any], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=sorted(presets()), help="default: llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequence-len", type=int, default=2048, help="documents of attention")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=1 << 28, help="of the optimizer's group")
    parser.add_argument("--op", action="append", help="only these ops")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--copies", type=int, default=0, help="0: as many as it takes to leave the caches")
    args = parser.parse_args()
    ceilings = measure_ceilings(args.backend)
    small = measure_small_copies(args.backend, ceilings, copies=args.copies)
    emit({"bench": "ceilings", **vars(ceilings)})
    emit({"bench": "copies", "us": {int(n): round(t * 1e6, 2) for n, t in zip(small.bytes, small.seconds)}})
    for model in args.model or ["llama-3.1-8b"]:
        run = argparse.Namespace(**{**vars(args), "model": model})
        for call in calls(run):
            if not args.op or call[0] in args.op:
                measure(call, run, ceilings, small)


def emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def measure(call: Call, args: argparse.Namespace, ceilings: Ceilings, small: SmallCopies) -> None:
    op, inputs, outputs, attrs = call
    program, instruction = described(call)
    documents = [args.sequence_len] * max(1, args.tokens // args.sequence_len)
    flops, moved = cost(program, instruction, documents, 1)
    copies = args.copies or copies_beyond_caches(moved)
    values = {
        "doc_starts": np.cumsum([0, *documents]).astype(np.int32), "norm": np.full(1, 0.5, np.float32),
        "positions": np.arange(args.tokens, dtype=np.int32) % args.sequence_len, "v": np.ones(args.parameters, np.float32),
        "hyper": np.array([0.0, 1.0, 0.0, 0.0], np.float32), "targets": _random_tokens(args), "tokens": _random_tokens(args),
        "slots": _slots(args.tokens),
    }
    if any(o is not None and o[0] == "v" and o[1] == "bf16" for o in outputs):
        values["v"] = np.full(args.parameters, 0x3F80, np.uint16)
    if op.startswith("attention"):
        values.pop("v")
    try:
        session = one_op(op, inputs, outputs, attrs, args.backend, copies=copies, values=values)
    except engine.EngineError as error:
        refused = error.message.splitlines()[0]
        emit({"bench": "kernel", "model": args.model, "op": op, "operands": shapes(inputs, outputs), "refused": refused})
        return
    seconds = call_seconds(session, copies)
    row = {
        "bench": "kernel", "model": args.model, "op": op, "kernel": session.explain()[0]["kernel"],
        "operands": shapes(inputs, outputs), "us": round(seconds * 1e6, 2), "gb_s": round(moved / seconds / 1e9, 1),
        "of_copy": round(moved / seconds / ceilings.copy, 3), "of_equal_copy": round(small.seconds_of(moved) / seconds, 3),
    }
    if flops:
        row |= {"tflops": round(flops / seconds / 1e12, 1), "of_gemm": round(flops / seconds / ceilings.gemm_sustained, 3)}
    emit({**row, "copies": copies})


def _random_tokens(args: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(1).integers(0, architecture(args.model)["vocab_size"], args.tokens).astype(np.int32)


def _slots(tokens: int, block: int = 16) -> np.ndarray:
    """Rows of a cache whose blocks are anywhere, in order within a block."""
    blocks = np.random.default_rng(2).permutation(-(-tokens // block))
    return (blocks[:, None] * block + np.arange(block)).ravel()[:tokens].astype(np.int32)


def described(call: Call) -> tuple[Program, Instruction]:
    """The call as an instruction over tensors of its operands' names, for `cost`."""
    op, inputs, outputs, attrs = call
    program = Program()
    for operand in (*inputs, *outputs):
        if operand is not None:
            name, dtype, shape = operand
            program.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
    named = [tuple(None if o is None else o[0] for o in side) for side in (inputs, outputs)]
    return program, Instruction(op, named[0], named[1], tuple(sorted(attrs.items())))


def shapes(inputs: list[Any], outputs: list[Any]) -> str:
    def form(operand: Any) -> str:
        return "-" if operand is None else f"{operand[1]}[{'x'.join(map(str, operand[2]))}]"

    return f"{' '.join(map(form, inputs))} -> {' '.join(map(form, outputs))}"


def calls(args: argparse.Namespace) -> Iterator[Call]:
    """What a training step of the model runs, LoRA and all weights; and rotation as a server's step has it."""
    config, t = architecture(args.model), args.tokens
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, vocab = config.get("head_dim", hidden // heads), config["vocab_size"]
    yield from _norms(t, hidden)
    yield from _elementwise(t, hidden, wide)
    yield from _attention(args, t, heads, kv_heads, dim)
    yield from _embedding_and_loss(t, hidden, vocab)
    yield from _products(t, hidden, wide, (heads + 2 * kv_heads) * dim, args.rank)
    yield from _adapters(t, (hidden, wide, heads * dim, kv_heads * dim), args.rank)
    yield from _optimizer(args.parameters)


def _norms(t: int, n: int) -> Iterator[Call]:
    weight, rstd = ("weight", "f32", (n,)), ("rstd", "f32", (t,))
    for stream in ("f32", "bf16"):
        x, dy = ("x", stream, (t, n)), ("dy", "bf16", (t, n))
        yield "rms_norm", [x, weight], [("y", "bf16", (t, n)), rstd], {"eps": 1e-5, "unit_offset": 0.0, "out_dtype": "bf16"}
        yield ("rms_norm_grad", [dy, x, weight, rstd, ("addend", stream, (t, n))], [("dx", stream, (t, n))],
               {"unit_offset": 0.0, "out_dtype": stream})
        yield "rms_norm_weight_grad", [dy, x, rstd], [("dweight", "f32", (n,))], {}


def _elementwise(t: int, n: int, wide: int) -> Iterator[Call]:
    gate, up, h = (("gate", "bf16", (t, wide)), ("up", "bf16", (t, wide)), ("h", "bf16", (t, wide)))
    yield "glu", [gate, up], [h], {"activation": "silu"}
    yield ("glu_grad", [("dh", "bf16", (t, wide)), gate, up], [("dgate", "bf16", (t, wide)), ("dup", "bf16", (t, wide))],
           {"activation": "silu"})
    for dtypes in (("f32", "bf16"), ("bf16", "f32")):
        yield "cast", [("x", dtypes[0], (t, n))], [("y", dtypes[1], (t, n))], {"out_dtype": dtypes[1]}
    yield ("add", [("a", "f32", (t, n)), ("b", "bf16", (t, n))], [("y", "f32", (t, n))], {"out_dtype": "f32"})
    yield "scale", [("x", "bf16", (t, n)), None], [("y", "bf16", (t, n))], {"factor": 2.0, "out_dtype": "bf16"}
    yield "accumulate", [("x", "bf16", (t, n))], [("y", "f32", (t, n))], {}
    yield "fill", [], [("y", "f32", (t, n))], {"value": 0.0}
    yield "dropout", [("x", "bf16", (t, n)), ("seed", "i32", (2,))], [("y", "bf16", (t, n))], {"p": 0.1, "stream_id": 0}
    yield "bias_grad", [("dy", "bf16", (t, n))], [("dbias", "f32", (n,))], {}


def _attention(args: argparse.Namespace, t: int, heads: int, kv_heads: int, dim: int) -> Iterator[Call]:
    q, do, o = (("q", "bf16", (t, heads, dim)), ("do", "bf16", (t, heads, dim)), ("o", "bf16", (t, heads, dim)))
    k, v, lse = ("k", "bf16", (t, kv_heads, dim)), ("v", "bf16", (t, kv_heads, dim)), ("lse", "f32", (t, heads))
    starts = ("doc_starts", "i32", (max(1, t // args.sequence_len) + 1,))
    positions, table = ("positions", "i32", (t,)), ("table", "f32", (args.sequence_len, dim // 2, 2))
    for x in (q, k):
        yield from _rotation(x[2], positions, table)
        yield from _normed_heads(x[2], positions, table)
    yield from _rotation((t, heads + kv_heads, dim), positions, table)
    yield from _rotated_to_cache(q, k, v, positions, table)
    attrs = {"scale": dim**-0.5, "causal": 1, "window": 0, "softcap": 0.0, "max_length": args.sequence_len}
    yield "attention", [q, k, v, starts], [o, lse], attrs
    grads = [("dq", *q[1:]), ("dk", *k[1:]), ("dv", *v[1:])]
    for deterministic in (1, 0):
        yield "attention_grad", [do, q, k, v, o, lse, starts], grads, {**attrs, "deterministic": deterministic}


def _rotation(shape: tuple[int, ...], positions: Any, table: Any) -> Iterator[Call]:
    yield "rope", [("x", "bf16", shape), positions, table], [("y", "bf16", shape)], {"inverse": 0, "interleaved": 0}


def _normed_heads(shape: tuple[int, ...], positions: Any, table: Any) -> Iterator[Call]:
    x, weight, rstd = ("x", "bf16", shape), ("weight", "f32", shape[-1:]), ("rstd", "f32", shape[:2])
    attrs = {"unit_offset": 0.0, "interleaved": 0}
    yield "norm_rope", [x, weight, positions, table], [("y", "bf16", shape), rstd], {"eps": 1e-5, **attrs}
    yield ("norm_rope_grad", [("dy", "bf16", shape), x, weight, rstd, positions, table, None], [("dx", "bf16", shape)],
           attrs)


def _rotated_to_cache(q: Any, k: Any, v: Any, positions: Any, table: Any) -> Iterator[Call]:
    """Of all tokens as one step's; without norms of q's and k's heads, and with them."""
    t, dim, v, slots = q[2][0], q[2][-1:], ("value", *v[1:]), ("slots", "i32", q[2][:1])
    caches = [(name, x[1], (-(-t // 16) * 16, *x[2][1:])) for name, x in (("key_cache", k), ("value_cache", v))]
    for weights in ((None, None), (("q_weight", "f32", dim), ("k_weight", "f32", dim))):
        yield ("rope_kv_write", [q, k, v, positions, table, slots, *weights], [("rotated", *q[1:]), *caches],
               {"interleaved": 0, "eps": 1e-5, "unit_offset": 0.0})


def _embedding_and_loss(t: int, n: int, vocab: int) -> Iterator[Call]:
    tokens, head = ("tokens", "i32", (t,)), ("weight", "bf16", (vocab, n))
    yield "embedding", [tokens, head], [("y", "f32", (t, n))], {"scale": 1.0, "out_dtype": "f32"}
    yield "embedding_weight_grad", [tokens, ("dy", "f32", (t, n))], [("dweight", "f32", (vocab, n))], {"scale": 1.0}
    x, targets, dloss = ("x", "bf16", (t, n)), ("targets", "i32", (t,)), ("dtoken_loss", "f32", (t,))
    loss, dx, attrs = ("token_loss", "f32", (t,)), ("dx", "bf16", (t, n)), {"softcap": 0.0, "logit_scale": 1.0}
    yield "linear_cross_entropy", [x, head, targets], [loss], attrs
    for dweight in (None, ("dweight", "f32", (vocab, n))):
        yield "linear_cross_entropy_grad", [x, head, targets, dloss], [loss, dx, dweight], {**attrs, "out_dtype": "bf16"}


def _products(t: int, n: int, wide: int, qkv: int, rank: int) -> Iterator[Call]:
    """Base products, joined ones among them, then those of adapters."""
    for rows, columns in ((qkv, n), (n, n), (wide, n), (2 * wide, n), (n, wide), (rank, n), (3 * rank, n), (n, rank)):
        x, weight, dy = ("x", "bf16", (t, columns)), ("weight", "bf16", (rows, columns)), ("dy", "bf16", (t, rows))
        addends = (None, ("addend", "bf16", (t, rows))) if columns == rank else (None,)
        for addend in addends:
            yield "linear", [x, weight, None, addend], [("y", "bf16", (t, rows))], {"alpha": 1.0, "out_dtype": "bf16"}
        yield "linear_input_grad", [dy, weight, None], [("dx", "bf16", (t, columns))], {"alpha": 1.0, "out_dtype": "bf16"}
        yield "linear_weight_grad", [dy, x], [("dweight", "f32", (rows, columns))], {"alpha": 1.0}


def _adapters(t: int, widths: tuple[int, ...], rank: int) -> Iterator[Call]:
    """Gradients of the second halves of adapters' branches, as a layer has them: q|k|v, o, gate|up, down."""
    hidden, wide, queries, keys = widths
    for members in ((queries, keys, keys), (hidden,), (wide, wide), (hidden,)):
        others = (None,) * (len(FACTORS) - len(members))
        b = [(name, "bf16", (width, rank)) for name, width in zip(FACTORS, members)]
        db = [(name, "f32", (width, rank)) for name, width in zip(GRADIENTS, members)]
        dy, low, dlow = (("dy", "bf16", (t, sum(members))), *((x, "bf16", (t, len(members) * rank)) for x in ("low", "dlow")))
        yield "low_rank_grad", [dy, low, *b, *others], [dlow, *db, *others], {"alpha": 1.0}


def _optimizer(n: int) -> Iterator[Call]:
    yield "global_norm", [("grad", "f32", (n,))], [("norm", "f32", (1,))], {}
    for dtype, rounding in (("f32", "nearest"), ("bf16", "stochastic")):
        attrs = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0, "rounding": rounding,
                 "seed": 5}
        outputs = [(name, dtype, (n,)) for name in ("param", "m", "v")]
        yield "adamw", [("grad", "f32", (n,)), ("norm", "f32", (1,)), ("hyper", "f32", (4,))], outputs, attrs


if __name__ == "__main__":
    main()
