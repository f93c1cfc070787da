"""Generation speed on the CPU: a prompt of 512 tokens, then 128 greedy tokens after it.

    python benchmarks/decode_cpu.py --reps 5
    python benchmarks/decode_cpu.py --batch 8
    python benchmarks/decode_cpu.py --neighbour      # again beside one busy process, and the ratio
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import numpy as np

from common import Clock, emit, peak_rss_mib, wait_until_quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a GGUF file or folder; default: the fetched default model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--quiet-wait", type=float, default=0.0)
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel instead")
    args = parser.parse_args()

    generator = open_generator(args)
    run(generator, args)
    if args.profile:
        from kernels_cpu import table

        from surogate_core.generate import PROMPT_CHUNK

        for bucket in (1 << (count - 1).bit_length() for count in (args.batch, min(args.prompt, PROMPT_CHUNK))):
            session = generator.decoder.session(bucket)
            print(table(session, generator.decoder.program(bucket), "forward"))
        return
    quiet = [measure(generator, args, "decode") for _ in range(args.reps)]
    if args.neighbour:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                beside = [measure(generator, args, "decode-beside-one-busy-process") for _ in range(args.reps)]
            finally:
                busy.kill()
        ratio = statistics.median(beside) / statistics.median(quiet)
        emit("decode-kept-beside-a-neighbour", {"ratio": round(ratio, 3)}, threads=args.threads)


def open_generator(args):
    from surogate_core.generate import Generator
    from surogate_core.weights.default_model import fetch_default_model

    return Generator(args.model or fetch_default_model(), recipe=args.recipe, threads=args.threads,
                     context=args.prompt + args.new, sequences=args.batch)


def run(generator, args) -> tuple[Clock, Clock]:
    """One prompt and its continuation for each of the batch's sequences."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, generator.loaded.hyperparameters.vocab_size, (args.batch, args.prompt)).tolist()
    with Clock(args.threads) as prompt_clock:
        following = [int(generator.prefill(prompt, row).argmax()) for row, prompt in enumerate(prompts)]
    rows = list(range(args.batch))
    with Clock(args.threads) as decode_clock:
        for step in range(args.new):
            logits = generator.decoder.logits(following, rows, [args.prompt + step] * args.batch, rows)
            following = [int(row.argmax()) for row in logits]
    return prompt_clock, decode_clock


def measure(generator, args, bench: str) -> float:
    wait_until_quiet(args.quiet_wait)
    prompt, decode = run(generator, args)
    speed = args.batch * args.new / decode.wall
    emit(bench, {
        "decode_tok_s": round(speed, 1), "prompt_tok_s": round(args.batch * args.prompt / prompt.wall, 1),
        "share": round(decode.share, 2), "peak_rss_mib": peak_rss_mib(),
    }, batch=args.batch, prompt=args.prompt, new=args.new, threads=args.threads, recipe=args.recipe)
    return speed


if __name__ == "__main__":
    main()
