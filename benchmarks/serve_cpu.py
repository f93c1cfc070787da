"""Serving on the CPU, ours and llama.cpp's server in turns: answers of 128 tokens to prompts of 512, and a second turn.

    python benchmarks/serve_cpu.py --rounds 3
    python benchmarks/serve_cpu.py --peer /path/to/llama-server --rounds 5

Each server runs alone, in a process of its own, on the same threads; `surogate bench serve` loads both. One line of JSON
a measurement: 1 and 8 clients, and, as "turn", the time to the first token of a second turn of 8, 16 or 32 tokens behind a
prompt and its answer, where the server has seen these and where it has not. "share" says how much of the cores the server had
while it was loaded: lines below 0.85 do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common import emit, wait_until_quiet

SUROGATE = [sys.executable, "-c", "from surogate_core.cli import main; main()"]
"""`surogate`, also where its script is not installed."""
MODEL = "served"
MORE = (8, 16, 32)
"""New tokens of a second turn."""
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the fetched default model")
    parser.add_argument("--peer", help="llama.cpp's llama-server; without it only ours is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--quiet-wait", type=float, default=0.0, help="seconds to wait for an idle machine, before each server")
    arguments = parser.parse_args()
    from surogate_core.weights.default_model import fetch_default_model

    model = arguments.model or fetch_default_model()
    for turn in range(arguments.rounds):
        for server in ("surogate", "llama.cpp")[: 2 if arguments.peer else 1]:
            wait_until_quiet(arguments.quiet_wait)
            with running(command(server, model, arguments)) as (url, process):
                measure(server, url, process, turn, arguments)


def command(server: str, model: Path, arguments: argparse.Namespace) -> list[str]:
    """The words that start it, but for the port. Both get 8 places of 2,048 tokens."""
    if server == "surogate":
        words = [*SUROGATE, "serve", f"{MODEL}={model}", "--context", "2048", "--max-sequences", "8", "--backend", "cpu"]
        return [*words, "--threads", str(arguments.threads), "--port"]
    words = [arguments.peer, "--model", str(model), "--alias", MODEL, "--ctx-size", str(8 * 2048), "--parallel", "8"]
    return [*words, "--threads", str(arguments.threads), "--threads-batch", str(arguments.threads), "--port"]


@contextmanager
def running(words: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*words, str(port)], stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, output)
            yield url, process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], output: BinaryIO) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > until:
                output.seek(0)
                said = output.read().decode(errors="replace").strip().splitlines()[-20:]
                raise SystemExit("\n".join([*said, f"{process.args[0]} did not come up: {process.poll()}"])) from None
            time.sleep(0.1)


def measure(server: str, url: str, process: subprocess.Popen[bytes], turn: int, arguments: argparse.Namespace) -> None:
    sizes = ["--prompt-tokens", str(arguments.prompt), "--output-tokens", str(arguments.new)]
    facts = {"server": server, "round": turn, "threads": arguments.threads, "prompt": arguments.prompt, "new": arguments.new}
    for clients in map(int, arguments.clients.split(",")):
        words = [*SUROGATE, "bench", "serve", url, "--concurrency", str(clients), "--requests", str(2 * clients), *sizes]
        words += ["--seed", str(1000 * turn + clients)]  # no prompt twice: the cache would know it
        before = processor_seconds(process.pid)
        done = subprocess.run([*words, "--model", MODEL], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{server}: {done.stdout}{done.stderr}")
        result = json.loads(done.stdout.splitlines()[-1])
        share = (processor_seconds(process.pid) - before) / (result["seconds"] * arguments.threads)
        emit("serve_cpu", result | {"share": round(share, 3)}, clients=clients, **facts)
    for more in MORE:
        emit("serve_cpu", second_turn(url, arguments.prompt + arguments.new, more, turn), clients=1, kind="turn", **facts)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def second_turn(url: str, history: int, more: int, seed: int) -> dict[str, float]:
    """Milliseconds to the first token where ``more`` tokens stand behind a first turn and its answer, ``history`` tokens: new
    to the server, and with a first turn that it has seen; medians of five."""
    generator = random.Random(1000 * more + seed)
    new, again = [], []
    for _ in range(5):
        unseen, seen = ([generator.randrange(1000, 20000) for _ in range(history + more)] for _ in range(2))
        first_token(url, seen[:history])
        new.append(first_token(url, unseen))
        again.append(first_token(url, seen))
    first, second = statistics.median(new), statistics.median(again)
    return {"history": history, "more": more, "new_ms": round(first, 2), "again_ms": round(second, 2),
            "faster": round(first / second, 2)}


def first_token(url: str, prompt: list[int]) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "cache_prompt": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        took = [(time.perf_counter() - began) * 1e3 for line in answer if line.startswith(b"data:")]
    if not took:
        raise SystemExit("a stream without an answer")
    return took[0]  # the answer is read to its end: whoever asks again does not meet the one before


if __name__ == "__main__":
    main()
