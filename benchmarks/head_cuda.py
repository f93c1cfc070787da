"""The LM head with its loss, forward and backward, as training runs it: ms, and the share of the products' rate.

    python benchmarks/head_cuda.py                                  # 4,096 tokens, 128,256 words, 4,096 features
    python benchmarks/head_cuda.py --torch                          # and torch's, compiled chunk by chunk, in turns
    python benchmarks/head_cuda.py --backend cpu --tokens 64 --vocabulary 512 --features 128

One `linear_cross_entropy_grad`: losses, the gradient to the tokens (bf16) and, where all weights are trained, to the
weight (added to an fp32 one by ours, to a bf16 one by torch). Three products of 2 tokens x vocabulary x features FLOPs,
or two where the head is frozen. `of_gemm` is the share of what a product of 8192 cubed sustains in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surogate_core.bench.ceilings import measure_ceilings, one_op, wall_seconds  # noqa: E402
from surogate_core.bench.train import describe_device, versions  # noqa: E402
from surogate_core.weights.quants import quantize  # noqa: E402

Measure = Callable[[], float]
"""Seconds of one forward and backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="measure torch's beside it")
    parser.add_argument("--chunk", type=int, default=2048, help="torch: tokens whose logits exist at once")
    args = parser.parse_args()
    ceilings = measure_ceilings(args.backend)
    for trained in (True, False):
        facts: dict[str, dict[str, Any]] = {"ours": {}}
        measures = {"ours": ours(args, trained, facts["ours"])}
        if args.torch:
            facts["torch"] = {"chunk": args.chunk}
            measures["torch"] = torchs(args, trained, facts["torch"])
        rounds = [{name: measure() for name, measure in measures.items()} for _ in range(args.rounds)]
        products = 3 if trained else 2
        flops = products * 2.0 * args.tokens * args.vocabulary * args.features
        for name in measures:
            seconds = statistics.median(each[name] for each in rounds)
            print(json.dumps({
                "bench": "head", "whose": name, "weight_gradient": trained, "tokens": args.tokens,
                "vocabulary": args.vocabulary, "features": args.features, "ms": round(seconds * 1e3, 3),
                "ms_of_rounds": [round(each[name] * 1e3, 3) for each in rounds],
                "tflops": round(flops / seconds / 1e12, 1),
                "of_gemm": round(flops / seconds / ceilings.gemm_sustained, 3),
                "gemm_sustained": round(ceilings.gemm_sustained / 1e12, 1), **facts[name],
            }), flush=True)
    print(json.dumps({"bench": "head-machine", "device": describe_device(args.backend),
                      "versions": versions(args.backend)}), flush=True)


def _targets(args: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(1).integers(0, args.vocabulary, args.tokens).astype(np.int32)


def ours(args: argparse.Namespace, trained: bool, facts: dict[str, Any]) -> Measure:
    """``facts`` gets the kernel's name. Every token carries loss."""
    t, v, k = args.tokens, args.vocabulary, args.features
    drawn = np.random.default_rng(2).standard_normal((1 << 20) - 96, np.float32) * np.float32(k**-0.5)
    session = one_op(
        "linear_cross_entropy_grad",
        [("x", "bf16", (t, k)), ("weight", "bf16", (v, k)), ("targets", "i32", (t,)), ("dtoken_loss", "f32", (t,))],
        [("token_loss", "f32", (t,)), ("dx", "bf16", (t, k)), ("dweight", "f32", (v, k)) if trained else None],
        {"softcap": 0.0, "logit_scale": 1.0, "out_dtype": "bf16"}, args.backend,
        values={"targets": _targets(args), "dtoken_loss": np.full(t, 1.0 / t, np.float32),
                "weight": np.resize(quantize(drawn, "bf16"), (v, k))},
    )
    session.run("run")
    loss = float(session.read("token_loss.0").mean())
    facts |= {"kernel": session.explain()[0]["kernel"], "loss": round(loss, 4),
              "scratch_mib": round(session.memory()["workspace"] / 2**20, 1)}
    once = wall_seconds(lambda: session.run("run"), session.synchronize, 1)
    runs = max(1, min(50, int(0.5 / once)))
    return lambda: wall_seconds(lambda: session.run("run"), session.synchronize, runs) / runs


def torchs(args: argparse.Namespace, trained: bool, facts: dict[str, Any]) -> Measure:
    """The loss of `peers_cuda.py` over the same numbers of tokens and words."""
    import torch
    from peers_cuda import head_loss

    device = "cpu" if args.backend == "cpu" else args.backend
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.features, device=device, dtype=torch.bfloat16) * args.features**-0.5
    weight.requires_grad_(trained)
    weight.grad = torch.zeros_like(weight) if trained else None
    targets = torch.from_numpy(_targets(args)).to(device, torch.int64)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run() -> Any:
        loss = head_loss(x, weight, targets, args.chunk)
        loss.backward()
        return loss

    started = time.perf_counter()
    facts |= {"loss": round(float(run().detach()), 4), "version": torch.__version__}
    facts["first_run_seconds"] = round(time.perf_counter() - started, 2)
    once = wall_seconds(run, wait, 2) / 2
    runs = max(1, min(50, int(0.5 / once)))
    return lambda: wall_seconds(run, wait, runs) / runs


if __name__ == "__main__":
    main()
