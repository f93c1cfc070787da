"""What the HTTP front costs beside the model: processor time of a request and of a streamed event, and how much later a token is.

    python benchmarks/serve_front.py
    python benchmarks/serve_front.py --routes /v1/chat/completions --streams 128 --profile front.prof
    python benchmarks/serve_front.py --paces 8.4 2 --streams 128 --only-paces

The server is the one of `surogate serve`, in a process of its own, in front of an engine that computes nothing: every step each
running request has one more token, whose text is the moment at which it was drawn. Steps come when they are due, whether the
server keeps up or not, as those of an engine with a thread of its own do.

Bursts: "request_us" is what the event loop's thread spends on a request whose answer is one token, from its connection to its
end; "event_us" what it spends on each further token, with so many streams at once; "process" is the same of all threads; each is
the least of several bursts. Processor time depends little on who else uses the machine.

Paces: all streams run, a token each every so many milliseconds, for ``--seconds``. "loop_cores" and "cores" are processor time
of the event loop's thread and of the server's process by the clock, "event_us" the former by tokens; "added_ms" is the time
from the moment at which a token was drawn to that at which a client, in another process, had read it from its socket; "reads"
are the clients' reads a second, fewer than tokens where several came together. This depends much on who else uses the machine,
and on clients that have cores.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import random
import re
import selectors
import signal
import socket
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
    """The part of the native loop that a served model uses. A step is a token of each request; its text is the step's moment
    in nanoseconds of `time.perf_counter_ns`, which all processes of a machine share."""

    context = LONGEST

    def __init__(self, step: float) -> None:
        """step: seconds."""
        self._step, self._next = int(step * 1e9), time.perf_counter_ns()
        self._left: dict[int, int] = {}
        self._count = 0

    def submit(self, prompt: Any, **fields: Any) -> int:
        self._count += 1
        self._left[self._count] = fields["max_tokens"]
        return self._count

    def cancel(self, number: int, choice: int | None = None) -> None:
        self._left.pop(number, None)

    def poll(self, timeout: float) -> list[tuple]:
        """Of all steps that were due by now; waits for one."""
        time.sleep(max(self._next - time.perf_counter_ns(), 0) / 1e9)
        due = range(self._next, time.perf_counter_ns() + 1, self._step)
        self._next = due[-1] + self._step
        drawn = [(1000 + moment % (VOCAB - 1000), f"w{moment}") for moment in due]
        rows = []
        for number, left in list(self._left.items()):
            pieces = drawn[:left]
            tokens, text = [token for token, _ in pieces], "".join(text for _, text in pieces)
            finish = None if left > len(pieces) else "length"
            rows.append((number, 0, tokens, text, pieces, None, None, 0, finish, None, None, 0.0))
            self._left[number] = left - len(pieces)
            if finish is not None:
                self.cancel(number)
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
    """Serves until its input ends. Each line asks for the seconds of its threads."""
    from surogate_serve.http.app import create_app
    from surogate_serve.http.limits import Settings
    from surogate_serve.http.server import listen, run

    model, thread = served(step), threading.get_ident()

    def tell() -> None:
        for _ in sys.stdin:
            used = time.clock_gettime(time.pthread_getcpuclockid(thread))
            print(json.dumps({"loop": used, "process": time.process_time()}), flush=True)
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

    def used(self) -> dict[str, float]:
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
    if route == "/v1/responses":
        return json.dumps({"model": "words", "max_output_tokens": tokens, "stream": True, "input": text}).encode()
    if route == "/v1/messages":
        fields = {"model": "words", "max_tokens": tokens, "stream": True}
    return json.dumps({**fields, "messages": [{"role": "user", "content": text}]}).encode()


# -- bursts ----------------------------------------------------------------------------------------------------------------


async def burst(endpoint: Any, bodies: list[bytes]) -> None:
    from surogate_serve.bench.client import complete

    timings = await asyncio.gather(*(complete(endpoint, each) for each in bodies))
    wrong = next((each.error for each in timings if each.error), None)
    if wrong is not None:
        raise SystemExit(f"a request failed: {wrong}")


def measure(server: Server, route: str, streams: int, prompt: int, events: int, repetitions: int) -> dict[str, Any]:
    """Microseconds a request and an event. events: 0 for requests alone."""
    import uvloop

    from surogate_serve.bench.client import Endpoint

    endpoint, draw = Endpoint(server.url, route, None), random.Random(prompt)

    def seconds(tokens: int, times: int) -> tuple[float, float]:
        """Least of the bursts, of a stream: of the event loop's thread, and of all."""
        loop, process = [], []
        for _ in range(times):
            bodies = [body(route, prompt, tokens, draw) for _ in range(streams)]
            before = server.used()
            uvloop.run(burst(endpoint, bodies))
            after = server.used()
            loop.append((after["loop"] - before["loop"]) / streams)
            process.append((after["process"] - before["process"]) / streams)
        return min(loop), min(process)

    seconds(2, 1)
    loop, process = seconds(1, repetitions)
    found = {"request_us": round(1e6 * loop, 1), "request_process_us": round(1e6 * process, 1)}
    if events:
        whole, whole_process = seconds(1 + events, -(-repetitions // 3))
        found |= {
            "event_us": round(1e6 * (whole - loop) / events, 2),
            "event_process_us": round(1e6 * (whole_process - process) / events, 2),
        }
    return found


# -- paces -----------------------------------------------------------------------------------------------------------------


def read_streams(url: str, route: str, streams: int) -> None:
    """A client's process. Says when all its streams have begun; then a line gives a window, as two moments in nanoseconds,
    after whose end the streams are left. Prints how long each token drawn in the window was on its way, in microseconds,
    and how many reads brought them."""
    from surogate_serve.bench.client import Endpoint

    endpoint, draw, waiting = Endpoint(url, route, None), random.Random(streams), selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection((endpoint.host, endpoint.port))
        connection.sendall(endpoint.request(body(route, 16, LONGEST - 512, draw)))
        waiting.register(connection, selectors.EVENT_READ, bytearray())
    waiting.register(sys.stdin, selectors.EVENT_READ)
    begun: set[int] = set()
    reads: list[tuple[int, int, bytes]] = []
    window = None
    while window is None or time.perf_counter_ns() < window[1]:
        for key, _ in waiting.select(0.1):
            if key.fileobj is sys.stdin:
                window = [int(word) for word in sys.stdin.readline().split()]
                waiting.unregister(sys.stdin)
                continue
            data = key.fileobj.recv(65536)
            reads.append((time.perf_counter_ns(), key.fd, data))
            if not data:
                raise SystemExit("the server closed a stream")
            if len(begun) < streams and key.fd not in begun:
                begun.add(key.fd)
                if len(begun) == streams:
                    print("begun", flush=True)
    delays, brought, rests = [], 0, {}
    for moment, fd, data in reads:
        *whole, rests[fd] = (rests.get(fd, b"") + data).split(b"\n\n")
        drawn = [int(stamp) for frame in whole for stamp in re.findall(rb"w(\d+)", frame)]
        delays += [(moment - stamp) // 1000 for stamp in drawn if window[0] <= stamp < window[1] - 50_000_000]
        brought += any(window[0] <= stamp for stamp in drawn)
    print(json.dumps({"delays": delays, "reads": brought}), flush=True)


def pace(server: Server, route: str, streams: int, clients: int, seconds: float) -> dict[str, Any]:
    """Cores that the server uses, and milliseconds that a token is on its way, while all streams run."""
    counts = [streams // clients + (place < streams % clients) for place in range(clients)]
    readers = [
        subprocess.Popen(
            [sys.executable, __file__, "--read", json.dumps([server.url, route, count])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for count in counts
    ]  # fmt: skip
    for reader in readers:
        if reader.stdout.readline() != "begun\n":
            raise SystemExit("a client did not begin")
    time.sleep(0.3)
    begin, before = time.perf_counter_ns(), server.used()
    for reader in readers:
        reader.stdin.write(f"{begin} {begin + int(seconds * 1e9)}\n")
        reader.stdin.flush()
    time.sleep(seconds)
    after, wall = server.used(), (time.perf_counter_ns() - begin) / 1e9
    told = [json.loads(reader.communicate()[0]) for reader in readers]
    delays = sorted(delay for each in told for delay in each["delays"])
    taken = {name: after[name] - before[name] for name in after}
    return {
        "loop_cores": round(taken["loop"] / wall, 3), "cores": round(taken["process"] / wall, 3),
        "event_us": round(1e6 * taken["loop"] / wall / (len(delays) / (seconds - 0.05)), 2),
        "tokens_per_second": round(len(delays) / (seconds - 0.05)),
        "reads_per_second": round(sum(each["reads"] for each in told) / seconds),
        "added_ms": {f"p{p}": round(delays[len(delays) * p // 100] / 1e3, 2) for p in (50, 99)},
        "clients": clients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", nargs="+", default=["/v1/completions", "/v1/chat/completions"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 4096], help="tokens, beside 512")
    parser.add_argument("--events", type=int, default=64, help="of a stream")
    parser.add_argument("--repetitions", type=int, default=12, help="bursts; a third as many where events are counted")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of bursts")
    parser.add_argument("--paces", type=float, nargs="*", default=[20.0, 8.4], help="milliseconds of a step")
    parser.add_argument("--only-paces", action="store_true", help="no bursts")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a pace")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="processes of a pace")
    parser.add_argument("--profile", help="a file for cProfile's figures of the event loop's thread, which cost time")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        server(*json.loads(arguments.serve))
    elif arguments.read:
        read_streams(*json.loads(arguments.read))
    else:
        if not arguments.only_paces:
            all_bursts(arguments)
        for step in arguments.paces:
            with running(step / 1e3, arguments.profile) as process:
                for route in arguments.routes:
                    streams = max(arguments.streams)
                    found = pace(process, route, streams, arguments.clients, arguments.seconds)
                    emit("serve_front", found, route=route, streams=streams, pace_ms=step)


def all_bursts(arguments: argparse.Namespace) -> None:
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
