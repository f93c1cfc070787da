"""What the serving loop costs on the host beside the model: microseconds of its processor a step, by parts.

    python benchmarks/serve_loop.py

The program has no model: ids are the largest of a few logits that never change. Text, stop strings, blocks and deltas are
as with one; somebody polls. "planning" chooses the step, "launching" fills the inputs (and finds the largest, here),
"reading" makes text of what was drawn.
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np
from common import Clock, emit

from surogate_core import engine
from surogate_core.engine.serving import Loop
from surogate_core.ops.sample import DRAW, SAMPLING
from surogate_core.ops.token_logprobs import MOST
from surogate_core.program import Instruction, Program
from surogate_core.program.program import HOST_WRITTEN, PERSISTENT, Arena, Entry, Storage, TensorEntry, dense_strides
from surogate_core.weights.formats import byte_count

VOCAB, BLOCK, CONTEXT = 64, 16, 4096
STATE = ("last_ids", "block_tables", "counts", "bias", "logits")


def program(tokens: int, rows: int, places: int) -> Program:
    made, offsets = Program(), {"inputs": 0, "results": 0}

    def tensor(name: str, arena: str | None, dtype: str, *shape: int) -> str:
        size = byte_count(dtype, shape)
        made.storages.append(Storage(name, arena, offsets.get(arena, 0), size, PERSISTENT | HOST_WRITTEN))
        made.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
        if arena is not None:
            offsets[arena] += -(-size // 256) * 256
        return name

    for name in ("positions", "slots"):
        tensor(name, "inputs", "i32", tokens)
    fed = tensor("tokens", "inputs", "i32", tokens), tensor("sequence_ids", "inputs", "i32", tokens)
    tensor("rows", "inputs", "i32", rows)
    tensor("block_tables", None, "i32", places, CONTEXT // BLOCK)
    last, ids = tensor("last_ids", None, "i32", places), tensor("ids", "results", "i32", tokens)
    plain = (tensor("logits", None, "f32", rows, VOCAB), tensor("sampling", "inputs", "f32", rows, SAMPLING),
             tensor("draw", "inputs", "i32", rows, DRAW), tensor("row_places", "inputs", "i32", rows))
    mask, bias = tensor("mask", "inputs", "i32", rows, VOCAB // 32), tensor("bias", None, "f32", places, VOCAB)
    counts, sampled = tensor("counts", None, "i32", places, VOCAB), tensor("sampled", "results", "i32", rows)
    probable = (tensor("logprob", "results", "f32", rows), tensor("top_ids", "results", "i32", rows, MOST),
                tensor("top_logprobs", "results", "f32", rows, MOST))
    made.arenas = [Arena(name, size, 256) for name, size in offsets.items()]
    made.instructions = [
        Instruction("feed_tokens", (*fed, last), (ids,)),
        Instruction("sample", (*plain, None, None), (sampled, last, None)),
        Instruction("sample", (*plain, mask, bias), (sampled, last, counts)),
        Instruction("token_logprobs", (plain[0], sampled, plain[2]), probable),
    ]
    made.entries = [Entry(name, i, 1) for i, name in enumerate(("forward", "sample", "sample_full", "logprobs"))]
    return made


def open_loop(places: int) -> Loop:
    loop = Loop(
        places=places, num_blocks=places * CONTEXT // BLOCK, context=CONTEXT, token_budget=max(512, places), vocab=VOCAB
    )
    queue, memories = engine.Queue("cpu", threads=1), {}
    for tokens, rows, decode in ((max(512, places), places, False), (places, places, True)):
        made = program(tokens, rows, places)
        session = engine.Session(made.to_bytes(), queue=queue)
        for storage in made.external():
            memory = memories.setdefault(storage.name, engine.Memory("cpu", storage.bytes))
            session.bind(storage.name, memory)
        loop.add_session(session, tokens, rows, decode_only=decode)
    logits = np.random.default_rng(0).normal(size=(places, VOCAB)).astype(np.float32)
    memories["logits"].write(logits)
    loop.set_tokenizer([chr(33 + i).encode() for i in range(VOCAB)], [False] * VOCAB, [VOCAB - 1])
    loop.start()
    return loop


def measure(places: int, steps: int) -> dict[str, float]:
    loop = open_loop(places)
    polling = True

    def poll() -> None:
        while polling:
            loop.poll(0.1)

    thread = threading.Thread(target=poll)
    thread.start()
    for i in range(places):
        loop.submit([i % VOCAB] * 512, max_tokens=CONTEXT - 512, temperature=0.0, ignore_eos=True, stop=["never this"])
    while (before := loop.stats())["prompt_tokens"] < 512 * places:  # all of them answer
        time.sleep(0.001)
    with Clock(2) as clock:
        while (after := loop.stats())["steps"] < before["steps"] + steps and after["running"] == places:
            time.sleep(0.001)
    polling = False
    loop.stop()
    thread.join()
    count = after["steps"] - before["steps"]
    parts = {name: round(1e6 * (after["seconds"][name] - before["seconds"][name]) / count, 1)
             for name in ("planning", "launching", "reading")}
    return {**parts, "total": round(sum(parts.values()), 1), "steps": count, "share": round(clock.share, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--places", type=int, nargs="+", default=[1, 32, 128])
    arguments = parser.parse_args()
    for places in arguments.places:
        emit("serve_loop", measure(places, arguments.steps), sequences=places)


if __name__ == "__main__":
    main()
