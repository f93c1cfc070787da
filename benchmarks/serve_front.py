"""What the HTTP front costs beside the model: microseconds of processor time a request and a streamed event.

    python benchmarks/serve_front.py
    python benchmarks/serve_front.py --routes /v1/chat/completions --streams 128 --profile front.prof

The server is the one of `surogate serve`, in a process of its own, in front of an engine that computes nothing: every
``--step-ms`` each running request gets a token. "request_us" is what the event loop's thread spends on a request whose
answer is one token, from its connection to its end; "event_us" what it spends on each further token, with so many streams
at once; "process" is the same of all threads; each is the least of several bursts. Processor time depends little on who
else uses the machine; "added_ms", from the engine's step to the client's read, depends much.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import cProfile
import json
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import emit

VOCAB = 32000
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}answer: {% endif %}"
LONGEST = 8192


class Engine:
    """The part of the native loop that a served model uses. A step is a token of each request."""

    context = LONGEST

    def __init__(self, step: float) -> None:
        self._step, self._next = step, time.perf_counter()
        self._left: dict[int, int] = {}
        self._count = 0
        self.steps: list[float] = []

    def submit(self, prompt: Any, **fields: Any) -> int:
        self._count += 1
        self._left[self._count] = fields["max_tokens"]
        return self._count

    def cancel(self, number: int, choice: int | None = None) -> None:
        self._left.pop(number, None)

    def poll(self, timeout: float) -> list[tuple]:
        time.sleep(max(self._next - time.perf_counter(), 0))
        self._next = time.perf_counter() + self._step
        rows = []
        for number, left in list(self._left.items()):
            token = 1000 + (self._count * 7 + number * 31 + left) % (VOCAB - 1000)
            text = f"w{token}"
            finish = None if left > 1 else "length"
            rows.append((number, 0, [token], text, [(token, text)], None, None, 0, finish, None, None, 0.0))
            self._left[number] = left - 1
            if left == 1:
                self.cancel(number)
        if rows:
            self.steps.append(time.perf_counter())
        return rows

    def stats(self) -> dict[str, Any]:
        nothing = {"waiting": 0, "blocks": {"used": 0, "total": 1}, "cache_queries": 0, "cache_hits": 0}
        return {"running": len(self._left), **nothing}

    def stop(self) -> None:
        self._left.clear()


def served(step: float) -> Any:
    """A served model of nothing but words."""
    from types import SimpleNamespace

    from surogate_serve.bench.server import _words
    from surogate_serve.engine.pump import Pump
    from surogate_serve.grammars import Grammars
    from surogate_serve.models import ServedModel

    class Words(ServedModel):
        def __init__(self) -> None:
            self.name, self.created, self.main, self.dead, self.context = "words", 0, ("words",), None, LONGEST
            self.tokenizer, self._loop = _words(VOCAB), Engine(step)
            self.tokenizer.chat_template = TEMPLATE
            self._adapters = SimpleNamespace(names=[], describe=list)
            self.vectors = None
            self.runtime = SimpleNamespace(places=128)
            texts = [self.tokenizer.token_bytes(token) for token in range(VOCAB)]
            self.grammars = Grammars(self.tokenizer, VOCAB, texts, self.parser)
            self._pump = Pump(self._poll, self._died, self.name)
            self._pump.start()

    return Words()


def server(step: float, profile: str | None) -> None:
    """Serves until its input ends. Each line asks for the seconds of its threads and the moments of its steps."""
    from surogate_serve.http.app import create_app
    from surogate_serve.http.limits import Settings
    from surogate_serve.http.server import listen, run

    model, thread = served(step), threading.get_ident()

    def tell() -> None:
        for _ in sys.stdin:
            steps, model._loop.steps = model._loop.steps, []
            used = time.clock_gettime(time.pthread_getcpuclockid(thread))
            print(json.dumps({"loop": used, "process": time.process_time(), "steps": steps}), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(url: str) -> None:
        print(url, flush=True)
        threading.Thread(target=tell, daemon=True).start()

    app, listener = create_app({model.name: model}, Settings()), listen("127.0.0.1", 0)
    if profile is None:
        run(app, listener, ready)
    else:
        profiler = cProfile.Profile(time.thread_time)
        profiler.runcall(run, app, listener, ready)
        profiler.dump_stats(profile)
    model.close()


class Server:
    """The process, seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = process.stdout.readline().strip()

    def used(self) -> dict[str, Any]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def running(step: float, profile: str | None) -> Iterator[Server]:
    words = [sys.executable, __file__, "--serve", json.dumps([step, profile])]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        process.stdin.close()
        process.wait(60)


def body(route: str, prompt: int, tokens: int, draw: random.Random) -> bytes:
    """prompt: tokens; of a chat, letters, each of which is a token here."""
    fields = {"model": "words", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
              "stream_options": {"include_usage": True}}
    if route == "/v1/completions":
        return json.dumps({**fields, "prompt": [draw.randrange(5000, 20000) for _ in range(prompt)]}).encode()
    text = "".join(draw.choices(string.ascii_lowercase, k=prompt))
    return json.dumps({**fields, "messages": [{"role": "user", "content": text}]}).encode()


async def burst(endpoint: Any, bodies: list[bytes]) -> list[Any]:
    from surogate_serve.bench.client import complete

    timings = await asyncio.gather(*(complete(endpoint, each) for each in bodies))
    wrong = next((each.error for each in timings if each.error), None)
    if wrong is not None:
        raise SystemExit(f"a request failed: {wrong}")
    return timings


def measure(server: Server, route: str, streams: int, prompt: int, events: int, repetitions: int) -> dict[str, Any]:
    """Microseconds a request and an event; milliseconds that a token is on its way. events: 0 for requests alone."""
    import uvloop

    from surogate_serve.bench.client import Endpoint

    endpoint, draw = Endpoint(server.url, route, None), random.Random(prompt)

    def seconds(tokens: int, times: int) -> tuple[float, float, list[float]]:
        """Least of the bursts, of a stream: of the event loop's thread, of all; and how long tokens were on their way."""
        loop, process, delays = [], [], []
        for _ in range(times):
            bodies = [body(route, prompt, tokens, draw) for _ in range(streams)]
            before = server.used()
            timings = uvloop.run(burst(endpoint, bodies))
            after = server.used()
            loop.append((after["loop"] - before["loop"]) / streams)
            process.append((after["process"] - before["process"]) / streams)
            steps = after["steps"]
            arrivals = [arrival for timing in timings for arrival in timing.arrivals[1:]]
            delays += [arrival - steps[bisect.bisect_right(steps, arrival) - 1] for arrival in arrivals]
        return min(loop), min(process), sorted(delays)

    seconds(2, 1)
    loop, process, _ = seconds(1, repetitions)
    found = {"request_us": round(1e6 * loop, 1), "request_process_us": round(1e6 * process, 1)}
    if events:
        whole, whole_process, delays = seconds(1 + events, -(-repetitions // 3))
        found |= {
            "event_us": round(1e6 * (whole - loop) / events, 2),
            "event_process_us": round(1e6 * (whole_process - process) / events, 2),
            "added_ms": {f"p{p}": round(1e3 * delays[len(delays) * p // 100], 2) for p in (50, 99)},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", nargs="+", default=["/v1/completions", "/v1/chat/completions"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 4096], help="tokens, beside 512")
    parser.add_argument("--events", type=int, default=64, help="of a stream")
    parser.add_argument("--repetitions", type=int, default=12, help="bursts; a third as many where events are counted")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--profile", help="a file for cProfile's figures of the event loop's thread, which cost time")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        server(*json.loads(arguments.serve))
        return
    with running(arguments.step_ms / 1e3, arguments.profile) as process:
        for route in arguments.routes:
            for streams in arguments.streams:
                found = measure(process, route, streams, 512, arguments.events, arguments.repetitions)
                emit("serve_front", found, route=route, streams=streams, prompt=512)
            for prompt in arguments.prompts:
                found = measure(process, route, max(arguments.streams), prompt, 0, arguments.repetitions)
                emit("serve_front", found, route=route, streams=max(arguments.streams), prompt=prompt)


if __name__ == "__main__":
    main()
