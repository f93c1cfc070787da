"""LoRA fine-tuning speed on the CPU: tokens/s of full sequences without padding, and the peak memory of the process.

    python benchmarks/train_cpu.py --reps 5

Rank 16 on all linear layers, sequences of 512, micro-batches of 4, no accumulation: one row for each step after the warm-up.
The memory budget makes the planner recompute what is cheapest to compute twice.
"""

from __future__ import annotations

import argparse
import time

START = time.perf_counter()

import numpy as np  # noqa: E402

from common import TEXT, Clock, emit, peak_rss_mib, wait_until_quiet  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a GGUF file or folder; default: the fetched default model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--memory-budget", type=float, default=1200.0, help="MiB the program may take, weights included")
    parser.add_argument("--quiet-wait", type=float, default=0.0, help="seconds to wait for an idle machine before a step")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel instead")
    args = parser.parse_args()

    session, step = prepare(args)
    first = None
    for index in range(args.warmup + args.reps):
        if index >= args.warmup:
            wait_until_quiet(args.quiet_wait)
        with Clock(args.threads) as clock:
            loss, norm = session.step(step, index, 2e-4)
        first = time.perf_counter() - START if first is None else first
        if index >= args.warmup:
            emit("train-lora", {
                "train_tok_s": round(args.batch * args.seq / clock.wall, 1), "share": round(clock.share, 2),
                "loss": round(loss, 4), "first_step_s": round(first, 2), "peak_rss_mib": peak_rss_mib(),
            }, recipe=args.recipe, rank=args.rank, seq=args.seq, batch=args.batch, threads=args.threads,
                recomputed=session.plan.saved_bytes[1] < session.plan.saved_bytes[0])
    if args.profile:
        from kernels_cpu import table

        print(table(session.session, session.plan.program, "micro_step"))


def prepare(args):
    """A training session on one micro-batch of text, every token a target."""
    from surogate_core.data.loader import Batch, Step
    from surogate_core.generate import installed_families
    from surogate_core.model import FrozenWeights, LoadedModel, training_program
    from surogate_core.passes import RECIPES, LoraSpec
    from surogate_core.train.optimizers import AdamW
    from surogate_core.train.session import TrainSession
    from surogate_core.weights.default_model import fetch_default_model

    model = LoadedModel.open(args.model or fetch_default_model(), installed_families())
    recipe = RECIPES[args.recipe]
    weights = FrozenWeights(model, recipe.compute)
    tokens, documents = args.batch * args.seq, args.batch
    plan = training_program(
        model, recipe, weights, {"T": tokens, "D": documents + 1}, max_positions=args.seq,
        adapter=LoraSpec(args.rank, 2.0 * args.rank), optimizer=AdamW(), memory_budget=int(args.memory_budget * 2**20),
    )
    session = TrainSession(plan, model, weights, AdamW(), 0, args.threads)
    ids = np.array(model.tokenizer().encode(TEXT * (1 + tokens // 60))[:tokens], np.int32)
    targets = np.roll(ids, -1).reshape(args.batch, args.seq)
    targets[:, -1] = -100
    weight = (targets >= 0).astype(np.float32).reshape(-1)
    batch = Batch(
        ids, targets.reshape(-1), np.tile(np.arange(args.seq, dtype=np.int32), args.batch),
        np.arange(documents + 1, dtype=np.int32) * args.seq, weight, np.zeros_like(weight), int(weight.sum()), tokens, [],
    )
    return session, Step([batch], 0, 0)


if __name__ == "__main__":
    main()
