"""Serving a GGUF on a GPU, ours and llama.cpp's server in turns: prefill and decode apart, through HTTP.

    python benchmarks/serve_cuda.py llama-3.1-8b --format q4_k_m --peer /path/to/llama-server
    python benchmarks/serve_cuda.py model.gguf --peer /path/to/llama-server --rounds 3
    python benchmarks/serve_cuda.py smollm2-135m --format q8_0 --backend cpu --peer llama-server --prompt 32 --new 8

MODEL is a GGUF, or a preset of `surogate bench train`: a file of that architecture is then made with random weights and
a vocabulary of made-up words (an 8B in seconds; --keep leaves it where it is made). Servers take turns, one at a time,
each with the device to itself, and are loaded by `surogate bench serve --burst`: all clients ask at once, prompts of
random tokens that no cache knows, greedy. One line of JSON a measurement, at last the medians and ours over theirs.

llama-server runs with all layers on the GPU, flash attention, a place for each client, physical batches of 2,048 tokens
(its default is 512) and without its store of old prompts in main memory; --peer-options come last and win.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import emit
from serve_cpu import MODEL, SUROGATE, running
from surogate_serve.bench.load import last_id

FORMATS = ("q4_0", "q4_k_m", "q8_0")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(args.model)
        if path.suffix != ".gguf":
            path = (args.folder if args.keep else Path(folder)) / f"{args.model}-{args.format}.gguf"
        if not path.exists():
            began = time.perf_counter()
            write_random(args.model, args.format, path)
            seconds = round(time.perf_counter() - began, 1)
            emit("serve_cuda", {"seconds": seconds, "gib": round(path.stat().st_size / 2**30, 2)}, made=str(path))
        servers = ["surogate", "llama.cpp"][: 2 if args.peer else 1]
        rows = []
        for turn in range(args.rounds):
            for server in servers[turn % len(servers):] + servers[:turn % len(servers)]:
                rows += measure(server, path, turn, args)
    report(rows, path.stem, servers)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a .gguf file, or a preset")
    parser.add_argument("--format", default="q4_k_m", choices=FORMATS, help="of a preset's matrices")
    parser.add_argument("--folder", type=Path, help="where a preset's file is made; default: that of temporary files")
    parser.add_argument("--keep", action="store_true", help="leave the file in --folder, and take one that is there")
    parser.add_argument("--peer", help="llama.cpp's llama-server; without it only ours is measured")
    parser.add_argument("--peer-options", default="", help="more of its options, as one word")
    parser.add_argument("--recipe", default="bf16", help="ours")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3, help="of each burst")
    parser.add_argument("--clients", default="1,32,128")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if args.keep and args.folder is None:
        parser.error("--keep needs --folder")
    return args


# -- servers and loads ------------------------------------------------------------------------------------------------


def command(server: str, path: Path, args: argparse.Namespace) -> list[str]:
    """The words that start it, but for the port. Both get a place for each client, of a prompt and its answer."""
    places, context = max(map(int, args.clients.split(","))), args.prompt + args.new + 16
    if server == "surogate":
        words = [*SUROGATE, "serve", f"{MODEL}={path}", "--context", str(context), "--max-sequences", str(places)]
        return [*words, "--backend", args.backend, "--recipe", args.recipe, "--port"]
    context = -(-context // 256) * 256  # places are rounded up to that anyway
    words = [args.peer, "--model", str(path), "--alias", MODEL, "--parallel", str(places)]
    words += ["--ctx-size", str(places * context), "--flash-attn", "on", "--cache-ram", "0", "--no-ui"]
    words += ["--batch-size", "2048", "--ubatch-size", "2048", "--n-gpu-layers", "all" if args.backend == "cuda" else "0"]
    return [*words, *shlex.split(args.peer_options), "--port"]


def measure(server: str, path: Path, turn: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A server's turn: one row for each number of clients."""
    began, rows = time.perf_counter(), []
    with running(command(server, path, args)) as (url, _):
        started = round(time.perf_counter() - began, 2)
        words = [*SUROGATE, "bench", "serve", url, "--burst", "--concurrency", args.clients, "--model", MODEL]
        words += ["--prompt-tokens", str(args.prompt), "--output-tokens", str(args.new), "--seed", str(turn)]
        words += ["--repetitions", str(args.repetitions), "--ids-below", str(last_id(str(path)))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as load:
            for line in load.stdout:
                result = json.loads(line)
                emit("serve_cuda", result, server=server, file=path.stem, round=turn, start_seconds=started)
                rows.append(result | {"server": server})
        if load.returncode != 0:
            raise SystemExit(f"{server}: the load ended with {load.returncode}")
    return rows


def report(rows: list[dict[str, Any]], name: str, servers: list[str]) -> None:
    for clients in sorted({row["concurrency"] for row in rows}):
        figures: dict[str, Any] = {}
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            values = {server: [] for server in servers}
            for row in rows:
                if row["concurrency"] == clients and row[key]:
                    values[row["server"]].append(row[key])
            medians = {server: statistics.median(each) for server, each in values.items() if each}
            figures[key] = dict(medians)
            if len(medians) == 2:
                figures[key]["ours_over_theirs"] = round(medians["surogate"] / medians["llama.cpp"], 3)
        emit("serve_cuda", figures, file=name, clients=clients, kind="medians")


# -- a file of random weights -----------------------------------------------------------------------------------------


def write_random(preset: str, form: str, path: Path) -> None:
    """A GGUF of the preset's architecture, which both servers read."""
    from surogate_core.bench.presets import architecture
    from surogate_core.bench.random_model import random_model
    from surogate_core.generate import installed_families
    from surogate_core.weights.export import write_gguf
    from surogate_core.weights.tensor import from_f32

    mixed = {"q4_k", "q6_k"} if form == "q4_k_m" else {form, "q6_k"} if form == "q4_0" else {form}
    models = {each: random_model(architecture(preset), installed_families(), each) for each in mixed}
    model = models[min(mixed)]
    family, h = model.family, model.hyperparameters
    names, parameters = family.gguf_names(h), dict(model.dsl().parameters())
    files = {name: names.file_names(name)[0] for name in parameters}
    tied, stored = "output.weight" not in files.values(), {}
    for name, parameter in parameters.items():
        chosen = format_of(files[name], form, h.num_layers, tied)
        stored[name] = models[chosen].names.load(models[chosen].store, name, parameter.shape)
    tensors = dict(names.export(stored)) | {k: from_f32(k, v) for k, v in family.gguf_extra_tensors(h).items()}
    write_gguf(path, tensors, family.gguf_metadata(h), words(h.vocab_size), None)


def format_of(tensor: str, form: str, layers: int, tied: bool) -> str:
    """What llama.cpp's own quantizer gives a tensor of this name in such a file."""
    if form == "q8_0":
        return form
    is_head = tensor == "output.weight" or (tied and tensor == "token_embd.weight")
    if is_head:
        return "q6_k"
    if form == "q4_0":
        return form
    return "q6_k" if tensor.endswith(("attn_v.weight", "ffn_down.weight")) and _finer(tensor, layers) else "q4_k"


def _finer(tensor: str, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    layer, eighth = int(tensor.split(".")[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def words(size: int) -> Any:
    """A tokenizer of ``size`` tokens: bytes, an end, and made-up words, so that every id has a text."""
    from surogate_core.testing.tiny import write_byte_tokenizer
    from surogate_core.weights.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        merges = [("w", "0")]  # a GGUF's list of them may not be empty
        file = write_byte_tokenizer(folder, ["<|end|>"], merges=merges, eos_token="<|end|>") / "tokenizer.json"
        spec = json.loads(file.read_text(encoding="utf-8"))
        spec["model"]["vocab"] |= {f"w{number}": number for number in range(258, size)}
        file.write_text(json.dumps(spec), encoding="utf-8")
        return Tokenizer.from_hf_folder(folder)


if __name__ == "__main__":
    main()
