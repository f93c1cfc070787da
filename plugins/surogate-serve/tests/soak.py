"""Mixed traffic on a server for as long as it takes to see a leak.

    python plugins/surogate-serve/tests/soak.py --minutes 30 --model /path/to/model.gguf
    python plugins/surogate-serve/tests/soak.py --seconds 20

Every kind of request at once, from clients that finish, that leave in the middle, that read slowly and that send
nonsense, while adapters are loaded, replaced and unloaded. It fails unless

- no request takes longer than ``--patience`` seconds, and every answer has the status that it should have;
- the resident memory, open files and threads of the server stay where they were after the first quarter;
- at the end nothing runs, no block of a cache is held, and the pool has as many blocks as at the beginning;
- every token is accounted for: what an answer's usage says is what the request log says of it, the log adds up to the
  figures of /metrics, and those to what the engine counted, but for what it had made for clients that left.

Prints one JSON object. A tiny random model is always served, for adapters; ``--model`` is served beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from conftest import SPECIAL, write_tiny_adapter, write_tiny_model

ADMIN = {"Authorization": "Bearer admin"}
WORDS = "the river ran over stones and under a bridge where nobody had walked for years".split()
TOOL = {"name": "look_up", "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["river", "stone"]}}, "required": ["word"],
                       "additionalProperties": False}}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
NONSENSE: list[tuple[str, bytes, int]] = [
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b"[]", 400),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', 400),
    ("/v1/chat/completions", b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 1000000}', 400),
    ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400),
    ("/v1/completions", b'{"model": "tiny", "prompt": "x", "structured_outputs": {"regex": "("}}', 400),
    ("/v1/completions", json.dumps({"model": "tiny", "prompt": [5] * 5000}).encode(), 400),
    ("/v1/messages", b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}', 400),
    ("/v1/responses", b'{"model": "tiny", "input": "x", "tools": [{"type": "web_search"}]}', 400),
    ("/v1/embeddings", b'{"model": "tiny", "input": {"a": 1}}', 400),
    ("/nowhere", b"{}", 404),
]


@dataclass
class Account:
    """What the clients saw. usage: (prompt, completion tokens) by request id."""

    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    left: int = 0

    def problem(self, text: str) -> None:
        self.problems.append(text[:300])


class Clients:
    """Requests of every kind; each method is one."""

    def __init__(self, http: httpx.AsyncClient, models: list[str], adapters: list[Path], seed: int) -> None:
        self.http, self.models, self.account = http, models, Account()
        self._adapters, self._random = adapters, random.Random(seed)
        self.calm = False

    async def work(self, until: float) -> None:
        kinds = [self.chat, self.completion, self.message, self.response, self.other, self.nonsense]
        leaving = [self.leave, self.leave, self.slow]
        while time.monotonic() < until:
            kind = self._random.choice(kinds if self.calm else kinds + leaving)
            self.account.kinds[kind.__name__] += 1
            try:
                await kind()
            except httpx.HTTPError as error:
                self.account.problem(f"{kind.__name__}: {type(error).__name__} {error}")

    async def administer(self, until: float) -> None:
        """Adapters come, change and go under requests that use them."""
        while time.monotonic() < until:
            await asyncio.sleep(self._random.uniform(0.2, 1.0))
            body = {"name": "tuned", "path": str(self._random.choice(self._adapters)), "model": "tiny"}
            loaded = await self.http.post("/admin/adapters", json=body, headers=ADMIN)
            self.account.kinds["adapter"] += 1
            if loaded.status_code != 200:
                self.account.problem(f"an adapter was not loaded: {loaded.text}")
            if self._random.random() < 0.2:
                await self.http.delete("/admin/adapters/tuned", headers=ADMIN)
                await self.http.post("/admin/adapters", json=body, headers=ADMIN)

    # -- kinds ---------------------------------------------------------------------------------------------------------

    async def chat(self) -> None:
        body: dict[str, Any] = {"messages": self._messages(), "max_tokens": self._random.randrange(1, 48)}
        body |= self._random.choice(
            [
                {"temperature": 0},
                {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40},
                {"n": 3, "frequency_penalty": 0.5, "logit_bias": {"10": -100}},
                {"logprobs": True, "top_logprobs": 5},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
                {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
                {"stop": ["e", "th"], "cache_salt": "somebody"},
            ]
        )
        model = self._model(adapters="tools" not in body)
        if self._random.random() < 0.5:
            await self._whole("/v1/chat/completions", body, model)
        else:
            await self._stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}}, model)

    async def completion(self) -> None:
        body = {"prompt": self._text(), "max_tokens": self._random.randrange(1, 32)}
        body |= self._random.choice([{}, {"n": 2, "best_of": 2}, {"echo": True, "logprobs": 1}, {"prompt": ["a", "b b"]}])
        await self._whole("/v1/completions", body, self._model())

    async def message(self) -> None:
        body: dict[str, Any] = {"messages": self._messages(), "max_tokens": self._random.randrange(1, 48)}
        if self._random.random() < 0.3:
            tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
            body |= {"tools": [tool], "tool_choice": {"type": "any"}}
        send = self._random.choice([self._whole, self._stream])
        await send("/v1/messages", body, self._model())

    async def response(self) -> None:
        body = {"input": self._text(), "max_output_tokens": self._random.randrange(16, 48)}
        send = self._random.choice([self._whole, self._stream])
        await send("/v1/responses", body | {"store": self._random.random() < 0.5}, self._model())

    async def other(self) -> None:
        model, text = self._model(adapters=False), self._text()
        path, body = self._random.choice(
            [
                ("/v1/embeddings", {"input": [text, "b"]}),
                ("/tokenize", {"prompt": text}),
                ("/v1/messages/count_tokens", {"messages": self._messages()}),
            ]
        )
        answer = await self.http.post(path, json=body | {"model": model})
        if answer.status_code != 200:
            self.account.problem(f"{path}: {answer.status_code} {answer.text}")

    async def nonsense(self) -> None:
        path, body, status = self._random.choice(NONSENSE)
        answer = await self.http.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code != status:
            self.account.problem(f"{path} {body[:60]!r}: {answer.status_code}, not {status}")

    async def leave(self) -> None:
        """Goes away: queued, in the prompt, in the answer; with a stream and without."""
        self.account.left += 1
        path, body = self._random.choice(
            [
                ("/v1/chat/completions", {"messages": self._messages(), "n": 2}),
                ("/v1/messages", {"messages": self._messages()}),
                ("/v1/responses", {"input": self._text() * 4}),
            ]
        )
        limit = "max_output_tokens" if "input" in body else "max_tokens"
        body |= {"model": self._model(), limit: 200, "stream": self._random.random() < 0.5}
        task = asyncio.ensure_future(self.http.post(path, json=body))
        await asyncio.wait({task}, timeout=self._random.expovariate(1 / 0.3))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def slow(self) -> None:
        body = {"messages": self._messages(), "max_tokens": 40, "stream_options": {"include_usage": True}}
        await self._stream("/v1/chat/completions", body, self._model(), pause=0.05)

    # -- how -----------------------------------------------------------------------------------------------------------

    async def _whole(self, path: str, body: dict[str, Any], model: str) -> None:
        answer = await self.http.post(path, json=body | {"model": model})
        if self._is_fine(path, answer.status_code, answer.text, model):
            self._count(answer.headers, answer.json())

    async def _stream(self, path: str, body: dict[str, Any], model: str, pause: float = 0.0) -> None:
        async with self.http.stream("POST", path, json=body | {"model": model, "stream": True}) as answer:
            if answer.status_code != 200:
                self._is_fine(path, answer.status_code, (await answer.aread()).decode(), model)
                return
            usage: dict[str, int] = {}
            async for frame in _frames(answer, pause):
                if "error" in frame and frame["error"]:
                    self.account.problem(f"{path}: {frame['error']}")
                found = frame.get("usage") or frame.get("message", {}).get("usage") or frame.get("response", {}).get("usage")
                usage |= found or {}
            if not usage:
                self.account.problem(f"{path}: a stream without usage")
            self._count(answer.headers, {"usage": usage})

    def _is_fine(self, path: str, status: int, text: str, model: str) -> bool:
        if status == 200:
            return True
        if not (status == 404 and model == "tuned"):  # it may have been unloaded just now
            self.account.problem(f"{path} of {model}: {status} {text}")
        return False

    def _count(self, headers: httpx.Headers, answer: dict[str, Any]) -> None:
        usage, request = answer["usage"], headers.get("x-request-id") or headers["request-id"]
        cached = usage.get("cache_read_input_tokens", 0)
        prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + cached
        made = usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
        self.account.usage[request] = (prompt, made)

    def _model(self, adapters: bool = True) -> str:
        return self._random.choice(self.models + ["tuned"] * adapters)

    def _text(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randrange(1, 20)))

    def _messages(self) -> list[dict[str, str]]:
        """A few beginnings, so that some prompts are found in the cache."""
        return [{"role": "user", "content": f"{self._random.choice(WORDS)} of the river, {self._text()}"}]


async def _frames(answer: httpx.Response, pause: float) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
            await asyncio.sleep(pause)


class Server:
    """`surogate serve` in a process of its own."""

    def __init__(self, folder: Path, model: str | None, threads: int) -> None:
        tiny = write_tiny_model(folder / "tiny")
        # The engine's stops are those that the reader of answers knows too: neither goes on where the other has ended.
        (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(257, 257 + len(SPECIAL)))}))
        names = [f"tiny={tiny}"] + ([f"big={model}"] if model else [])
        self.log = folder / "requests.jsonl"
        self._output = open(folder / "server.log", "w+b")  # noqa: SIM115 - closed by `end`
        command = [
            str(Path(sys.executable).with_name("surogate")), "serve", *names, "--port", "0", "--admin-key", "admin",
            "--request-log", str(self.log), "--threads", str(threads), "--max-sequences", "16", "--backend", "cpu",
            "--kv-memory", "256M", "--context", "256", "--parser", "hermes",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        for _ in range(1200):
            found = re.search(rb"http://127\.0\.0\.1:[1-9]\d*", self._text())
            if found or self.process.poll() is not None:
                break
            time.sleep(0.1)
        assert found, self._text().decode()
        return found[0].decode()

    def _text(self) -> bytes:
        return Path(self._output.name).read_bytes()

    def figures(self) -> dict[str, int]:
        """KiB of memory; counts of open files and threads."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        memory, threads = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("VmRSS", "Threads"))
        return {"rss_kib": memory, "files": len(os.listdir(f"/proc/{self.process.pid}/fd")), "threads": threads}

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._output.close()
        return code


async def soak(server: Server, folder: Path, seconds: float, clients: int, patience: float, models: list[str]) -> dict[str, Any]:
    adapters = [write_tiny_adapter(folder / f"adapter-{seed}", seed) for seed in range(3)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=patience, limits=limits) as http:
        before = (await http.get("/stats")).json()["models"]
        crowd = Clients(http, models, adapters, seed=1)
        samples: list[dict[str, int]] = []
        until = time.monotonic() + seconds
        watching = asyncio.ensure_future(_watch(server, samples, max(seconds / 400, 0.25)))
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.administer(until))
            for _ in range(clients):
                group.create_task(crowd.work(until))
        watching.cancel()
        after = await _rest(http, patience)
        exact = await _calm(http, crowd, clients, min(max(seconds / 10, 5.0), 60.0))
        text = (await http.get("/metrics")).text
        after = await _rest(http, patience)
    return _judge(crowd.account, samples, before, after, exact, text, server)


async def _watch(server: Server, samples: list[dict[str, int]], every: float) -> None:
    while True:
        samples.append(server.figures())
        await asyncio.sleep(every)


async def _rest(http: httpx.AsyncClient, patience: float) -> dict[str, Any]:
    """The engines' figures once nothing runs."""
    until = time.monotonic() + patience
    while True:
        stats = (await http.get("/stats")).json()["models"]
        if all(each["running"] == each["waiting"] == each["blocks"]["used"] == 0 for each in stats.values()):
            return stats
        if time.monotonic() > until:
            return stats
        await asyncio.sleep(0.2)


async def _calm(http: httpx.AsyncClient, crowd: Clients, clients: int, seconds: float) -> dict[str, int]:
    """A while without clients that leave: tokens that the engines made, and that usages tell."""
    begun, known = await _rest(http, seconds), set(crowd.account.usage)
    crowd.calm = True
    await asyncio.gather(*(crowd.work(time.monotonic() + seconds) for _ in range(clients)))
    ended = await _rest(http, seconds)
    made = sum(ended[name]["generated_tokens"] - begun[name]["generated_tokens"] for name in ended)
    told = sum(tokens for request, (_, tokens) in crowd.account.usage.items() if request not in known)
    return {"made": made, "told": told}


def _judge(
    account: Account, samples: list[dict[str, int]], before: dict[str, Any], after: dict[str, Any],
    exact: dict[str, int], metrics: str, server: Server,
) -> dict[str, Any]:
    """The report; its problems say what is wrong."""
    lines = {line["request_id"]: line for line in map(json.loads, server.log.read_text().splitlines())}
    for request, (prompt, made) in account.usage.items():
        line = lines.get(request)
        if line is None or (line["prompt_tokens"], line["completion_tokens"]) != (prompt, made):
            account.problem(f"usage {prompt}, {made} against the log's {line}")
    logged = sum(line["completion_tokens"] for line in lines.values())
    counted = int(sum(map(float, re.findall(r"^surogate_generation_tokens_total\{.*\} (\S+)$", metrics, re.M))))
    engine = sum(each["generated_tokens"] for each in after.values())
    if logged != counted:
        account.problem(f"the log has {logged} tokens, /metrics {counted}")
    if exact["made"] != exact["told"]:
        account.problem(f"without clients that leave, the engines made {exact['made']} tokens; usages tell {exact['told']}")
    if not 0 <= engine - counted <= 64 * account.left:
        account.problem(f"the engines made {engine} tokens; {counted} were delivered, and {account.left} clients left")
    for name, stats in after.items():
        blocks, first = stats["blocks"], before[name]["blocks"]
        at_rest = stats["running"] == stats["waiting"] == blocks["used"] == 0
        if not at_rest or blocks["total"] != first["total"] or blocks["free"] + blocks["cached"] < blocks["total"]:
            account.problem(f"{name} is not at rest: {stats['running']}, {stats['waiting']}, {blocks} after {first}")
        if stats["failures"] or stats["dead"]:
            account.problem(f"{name}: {stats['failures']} steps failed; {stats['dead']}")
    growth = _growth(samples)
    for key, allowed in (("rss_kib", 0.04), ("files", 0.5), ("threads", 0.25)):
        if len(samples) >= 100 and growth[key]["last"] > growth[key]["second"] * (1 + allowed):
            account.problem(f"{key} grew: {growth[key]}")
    return {
        "requests": len(lines), "by_kind": dict(account.kinds), "left": account.left, "statuses": dict(
            Counter(str(line["status"]) for line in lines.values())),
        "tokens": {"engine": engine, "delivered": counted, "logged": logged, "calm": exact}, "process": growth,
        "preemptions": sum(each["preemptions"] for each in after.values()),
        "cache_hits": sum(each["cache_hits"] for each in after.values()),
        "problems": account.problems[:20], "problem_count": len(account.problems),
    }  # fmt: skip


def _growth(samples: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Medians of each quarter of the time: the first warms up."""
    quarter = max(len(samples) // 4, 1)
    parts = {name: samples[i * quarter : (i + 1) * quarter] for i, name in enumerate(("first", "second", "third", "last"))}
    return {
        key: {name: statistics.median(each[key] for each in part or samples[-1:]) for name, part in parts.items()}
        for key in samples[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, help="instead of minutes")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--model", help="a model beside the tiny one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that one request may take")
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60 if arguments.seconds is None else arguments.seconds
    models = ["tiny"] + (["big"] if arguments.model else [])
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), arguments.model, arguments.threads)
        try:
            report = asyncio.run(soak(server, Path(name), seconds, arguments.clients, arguments.patience, models))
        finally:
            code = server.end()
    if code != 0:
        report["problems"].append(f"the server ended with {code}")
    print(json.dumps({"seconds": seconds, "clients": arguments.clients, **report}, indent=2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
