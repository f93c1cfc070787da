"""Loads on a server: bursts, a closed loop, an open loop. Prompts are random token ids; greedy, to the full length."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surogate_core.errors import TrainingError

from .client import Endpoint, Timing, complete

LAST_ID = 20000
"""Ids of prompts lie below: there in every vocabulary of note."""


def last_id(target: str) -> int:
    """The bound of ids for a server's URL, a model, or a preset: of a preset or a GGUF file no more than its vocabulary has."""
    from surogate_core.bench.presets import presets
    from surogate_core.generate import installed_families
    from surogate_core.model import LoadedModel

    known = presets()
    if target in known:
        return min(LAST_ID, known[target]["vocab_size"])
    if Path(target).is_file():
        return min(LAST_ID, LoadedModel.open(target, installed_families()).hyperparameters.vocab_size)
    return LAST_ID


@dataclass(frozen=True)
class Load:
    """What is asked. shared: tokens that all prompts begin with. requests: of a closed or an open loop. rate: requests a
    second of an open loop, at random moments (a Poisson process). last_id: ids of prompts lie below, past the first quarter.
    ``fields``: more of the request's JSON."""

    model: str
    prompt_tokens: int = 512
    output_tokens: int = 128
    shared: int = 0
    requests: int = 64
    rate: float | None = None
    seed: int = 0
    last_id: int = LAST_ID
    fields: dict[str, Any] = field(default_factory=dict)


class Prompts:
    """Prompts that no server has in its cache, but for what they share; other ones for each number of ``clients``, which load
    the same server one after another."""

    def __init__(self, load: Load, clients: int) -> None:
        self._load, self._random = load, random.Random(load.seed)
        self._shared = self._ids(load.shared)
        self._random.seed(f"{load.seed} {clients}")

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._load.last_id // 4, self._load.last_id) for _ in range(count)]

    def body(self, output_tokens: int) -> bytes:
        load = self._load
        prompt = self._shared + self._ids(load.prompt_tokens - load.shared)
        return json.dumps({
            "model": load.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **load.fields,
        }).encode()


@dataclass
class Result:
    """seconds: from the first request's begin to the last one's end."""

    seconds: float
    timings: list[Timing]

    def __post_init__(self) -> None:
        failed = [t.error for t in self.timings if t.error]
        if len(failed) == len(self.timings):
            raise TrainingError(f"no request succeeded: {failed[0]}")

    def report(self) -> dict[str, Any]:
        """Rates in tokens a second, times in milliseconds."""
        good = [t for t in self.timings if not t.error]
        first = [t.first for t in good if t.first is not None]
        gaps = [b - a for t in good for a, b in zip(t.arrivals, t.arrivals[1:])]
        made = sum(t.completion_tokens for t in good)
        return {
            "requests": len(good), "failed": len(self.timings) - len(good),
            "errors": sorted({t.error for t in self.timings if t.error})[:3],
            "seconds": round(self.seconds, 3), "prompt_tokens": sum(t.prompt_tokens for t in good),
            "cached_tokens": sum(t.cached_tokens for t in good), "output_tokens": made,
            "output_tokens_per_second": round(made / self.seconds, 1),
            "requests_per_second": round(len(good) / self.seconds, 3),
            "first_token_ms": spread(first), "inter_token_ms": spread(gaps),
            "request_ms": spread([t.ended - t.begun for t in good]),
        }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in at.items()}
    found = {"mean": statistics.fmean(ordered), **found, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


async def run_load(endpoint: Endpoint, load: Load, concurrency: int) -> dict[str, Any]:
    """A closed loop of ``concurrency`` clients, or with ``load.rate`` an open loop, in which ``concurrency`` is not looked at."""
    prompts = Prompts(load, concurrency)
    bodies = [prompts.body(load.output_tokens) for _ in range(load.requests)]
    begun = time.perf_counter()
    if load.rate is None:
        timings = await _closed(endpoint, bodies, concurrency)
    else:
        timings = await _open(endpoint, bodies, load.rate, random.Random(load.seed + 1))
    kind = {"loop": "closed", "concurrency": concurrency} if load.rate is None else {"loop": "open", "rate": load.rate}
    return {**kind, **Result(time.perf_counter() - begun, timings).report()}


async def _closed(endpoint: Endpoint, bodies: list[bytes], concurrency: int) -> list[Timing]:
    waiting, timings = iter(bodies), []

    async def client() -> None:
        for body in waiting:
            timings.append(await complete(endpoint, body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return timings


async def _open(endpoint: Endpoint, bodies: list[bytes], rate: float, random_: random.Random) -> list[Timing]:
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(complete(endpoint, body)))
        await asyncio.sleep(random_.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def run_burst(endpoint: Endpoint, load: Load, size: int, repetitions: int) -> dict[str, Any]:
    """``size`` requests at once, for one token and for all of them; medians over the repetitions.

    decode = size (n - 1) / (seconds for n tokens - seconds for 1 token); prefill = size x prompt / seconds for 1 token.
    """
    prompts = Prompts(load, size)

    async def seconds(tokens: int) -> tuple[float, list[Timing]]:
        bodies = [prompts.body(tokens) for _ in range(size)]
        begun = time.perf_counter()
        timings = await asyncio.gather(*(complete(endpoint, body) for body in bodies))
        taken = time.perf_counter() - begun
        wrong = next((t.error for t in timings if t.error), None)
        if wrong is None and any(t.completion_tokens != tokens for t in timings):
            wrong = f"a request for {tokens} tokens got {min(t.completion_tokens for t in timings)}"
        if wrong is not None:
            raise TrainingError(f"a burst of {size} failed: {wrong}")
        return taken, timings

    await seconds(4)
    ones = [(await seconds(1))[0] for _ in range(repetitions)]
    runs = [await seconds(load.output_tokens) for _ in range(repetitions)]
    gaps = [b - a for _, timings in runs for t in timings for a, b in zip(t.arrivals, t.arrivals[1:])]
    figures = burst_figures(load, size, ones, [taken for taken, _ in runs])
    return {"loop": "burst", "concurrency": size, "repetitions": repetitions, **figures, "inter_token_ms": spread(gaps)}


def burst_figures(load: Load, size: int, ones: Sequence[float], wholes: Sequence[float]) -> dict[str, Any]:
    """``ones``, ``wholes``: seconds of bursts of one token and of all tokens.

    The decode rate is None, with the reason, unless every burst of all tokens took longer than every burst of one: what
    lies between them would be the machine's noise."""
    one, whole = statistics.median(ones), statistics.median(wholes)
    figures: dict[str, Any] = {
        "one_token_ms": round(one * 1e3, 3), "all_tokens_ms": round(whole * 1e3, 3),
        "prefill_tokens_per_second": round(size * load.prompt_tokens / one, 1), "decode_tokens_per_second": None,
        "output_tokens_per_second": round(size * load.output_tokens / whole, 1),
    }
    longest, shortest = max(ones), min(wholes)
    if longest < shortest:
        figures["decode_tokens_per_second"] = round(size * (load.output_tokens - 1) / (whole - one), 1)
    else:
        figures["decode_not_told"] = (
            f"a burst of one token took {longest * 1e3:.1f} ms, one of {load.output_tokens} took {shortest * 1e3:.1f} ms: "
            "ask for more tokens, or on a quieter machine"
        )
    return figures
