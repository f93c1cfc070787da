"""Figures for Prometheus, and the model wrapper that takes them: every route's generation passes it, whatever its
API."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..types import Delta, Generation, Refused, Take
from .limits import Limits
from .log import Exchange, current

PREFIX = "surogate_"
_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_LONG = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_WAITS = (0.0001, 0.0003, 0.001, *_LONG)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _LONG),
    "inter_token_latency_seconds": ("Between tokens of one choice.", _SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", _LONG),
    "request_queue_time_seconds": ("From a request's arrival at the engine to its beginning there.", _WAITS),
    "request_prefill_time_seconds": ("From a request's beginning in the engine to its first token.", _LONG),
    "request_decode_time_seconds": ("From a request's first token to its last.", _LONG),
}
# Of the engine's own statistics: (key, metric, is it a counter, what it is).
ENGINE_FIGURES = (
    ("running", "num_requests_running", False, "Sequences that are being computed."),
    ("waiting", "num_requests_waiting", False, "Sequences that wait for a place."),
    ("kv_usage", "kv_cache_usage_perc", False, "Share of the cache's blocks that hold running sequences, 0 to 1."),
    ("prefix_queries", "prefix_cache_queries", True, "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_hits", "prefix_cache_hits", True, "Prompt tokens that were found in the prefix cache."),
    ("preemptions", "num_preemptions", True, "Sequences that gave up their place to others."),
    ("steps", "engine_steps", True, "Steps of the engine."),
)


class Histogram:
    """Counts by upper bound. Kept by hand because it is fed for every token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that)."""
        total, result = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


class ModelFigures:
    """What is counted for one model."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.finished: dict[str, int] = defaultdict(int)
        self.rejected: dict[str, int] = defaultdict(int)
        self.in_flight = 0


class Metrics(Collector):
    """All figures of a server."""

    def __init__(self) -> None:
        self.figures: dict[str, ModelFigures] = {}
        self._models: Mapping[str, Any] = {}
        self._requests: dict[tuple[str, str], int] = defaultdict(int)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, models: Mapping[str, Any], limits: Limits) -> dict[str, Metered]:
        """The models, wrapped so that what they generate is counted."""
        self._models = models
        self.figures = {name: ModelFigures() for name in models}
        return {name: Metered(model, self.figures[name], limits) for name, model in models.items()}

    @property
    def rests(self) -> bool:
        """Whether models have answered something, and nothing waits or runs."""
        figures = self.figures.values()
        return any(each.finished for each in figures) and not any(each.in_flight for each in figures)

    def request(self, exchange: Exchange) -> None:
        """Counts a request that is over. Paths are named only where a route was found, or clients could make up
        figures."""
        self._requests[exchange.route or "other", str(exchange.status)] += 1

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Any]:
        requests = CounterMetricFamily(
            PREFIX + "http_requests", "Requests by route and status.", labels=["route", "status"]
        )
        for labels, count in self._requests.items():
            requests.add_metric(list(labels), count)
        yield requests
        yield from self._collect_counted()
        yield from self._collect_engine()

    def describe(self) -> Iterable[Any]:
        """Nothing: names are only known once there are models."""
        return []

    def _collect_counted(self) -> Iterator[Any]:
        counters = (
            ("prompt_tokens", "Prompt tokens of requests that were taken."),
            ("cached_tokens", "Prompt tokens that did not have to be computed."),
            ("generation_tokens", "Tokens that were generated."),
        )
        for name, text in counters:
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            for model, figures in self.figures.items():
                family.add_metric([model], getattr(figures, name))
            yield family
        for field, name, label, text in (
            ("finished", "request_success", "finished_reason", "Choices that ended, by reason."),
            ("rejected", "admission_rejections", "reason", "Requests that were not taken, by status or code."),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
            for model, figures in self.figures.items():
                for reason, count in getattr(figures, field).items():
                    family.add_metric([model, reason], count)
            yield family
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            for model, figures in self.figures.items():
                one = figures.histograms[name]
                histogram.add_metric([model], buckets=one.buckets(), sum_value=one.sum)
            yield histogram

    def _collect_engine(self) -> Iterator[Any]:
        stats = {name: model.stats() for name, model in self._models.items()}
        for key, name, is_counter, text in ENGINE_FIGURES:
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(PREFIX + name, text, labels=["model_name"])
            for model, figures in stats.items():
                if key in figures:
                    family.add_metric([model], float(figures[key]))
            yield family
        phases = CounterMetricFamily(
            PREFIX + "engine_seconds", "Time of the engine's thread, by what it did.", labels=["model_name", "phase"]
        )
        for model, figures in stats.items():
            for phase, seconds in figures.get("seconds", {}).items():
                phases.add_metric([model, phase], float(seconds))
        yield phases
        adapters = GaugeMetricFamily(
            PREFIX + "lora_requests_info", "Adapters that are loaded.", labels=["model_name", "lora"]
        )
        for model_name, model in self._models.items():
            for adapter in model.adapters:
                adapters.add_metric([model_name, adapter], 1.0)
        yield adapters


class Metered:
    """A model whose generations are counted, for metrics and for the log of the request that the task works for. All
    else is the model's own."""

    def __init__(self, model: Any, figures: ModelFigures, limits: Limits) -> None:
        self._model, self._figures, self._limits = model, figures, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def read(self, generation: Generation, take: Take) -> None:
        """As the model's own. Raises `Refused` 429 where too many wait, 503 where this one waited too long."""
        figures, exchange = self._figures, current.get()
        if exchange is not None:
            exchange.model = exchange.model or self._model.name
        try:
            self._admit(generation)
        except Refused as refused:
            figures.rejected[refused.code or str(refused.status)] += 1
            raise
        figures.in_flight += generation.n
        meter = _Meter(figures, exchange, len(generation.prompt))
        generation.watchers.append(meter.ended)
        patience = _Patience(self._model, self._limits.queue_seconds)

        def count(deltas: list[Delta]) -> Any:
            if not meter.taken:
                patience.end()
            meter.count(deltas)
            return take(deltas)

        try:
            await self._model.read(generation, count)
        except asyncio.CancelledError:
            patience.raise_if_over()
            raise
        except Refused as refused:
            if not meter.taken:
                figures.rejected[refused.code or str(refused.status)] += 1
            raise
        finally:
            patience.end()
            figures.in_flight -= generation.n
            generation.watchers.remove(meter.ended)
            meter.end()

    def _admit(self, generation: Generation) -> None:
        if (reason := self._model.dead) is not None:
            raise Refused(f"the engine of this model is dead: {reason}", 503, "engine_dead")
        if self._figures.in_flight + generation.n > self._limits.queued:
            raise Refused(
                f"{self._figures.in_flight} choices wait or run and at most {self._limits.queued} may",
                429,
                "queue_full",
                retry_after=1,
            )


class _Patience:
    """For a first token. As long as others wait too, a request that has none for too long is taken to wait."""

    def __init__(self, model: Any, seconds: float) -> None:
        self._model, self._seconds = model, seconds
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._over = False
        self._timer = self._loop.call_later(seconds, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._task is not None and self._model.stats().get("waiting", 0):
            self._over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def raise_if_over(self) -> None:
        """Where it was this that cancelled the task."""
        if self._over and self._task is not None:
            self._task.uncancel()
            words = f"the request waited {self._seconds:g} s for its turn"
            raise Refused(words, 503, "queue_timeout", retry_after=5) from None


class _Meter:
    """The times and counts of one generation."""

    def __init__(self, figures: ModelFigures, exchange: Exchange | None, prompt_tokens: int) -> None:
        self._figures, self._exchange, self._prompt_tokens = figures, exchange, prompt_tokens
        self._asked = time.perf_counter()
        self._began = exchange.began if exchange is not None else self._asked
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._tokens = self._cached = 0
        self._gaps = figures.histograms["inter_token_latency_seconds"]
        self._finished: dict[int, str] = {}
        self.taken = False

    def ended(self, choice: int) -> None:
        """Its reader found the end, as a stop token would have been."""
        self._finished.setdefault(choice, "stop")

    def count(self, deltas: list[Delta]) -> None:
        self.taken, now = True, time.perf_counter()
        for delta in deltas:
            choice, tokens = delta.choice, len(delta.tokens)
            if choice in self._finished:
                continue
            if tokens:
                last = self._last.get(choice)
                if last is not None:
                    self._gaps.observe((now - last) / tokens, tokens)
                elif self._first is None:
                    self._first = now
                    self._begin(now, delta.queued)
                    if self._exchange is not None and self._exchange.first_token is None:
                        self._exchange.first_token = now
                self._last[choice] = now
                self._tokens += tokens
            if delta.cached_tokens > self._cached:
                self._cached = delta.cached_tokens
            if delta.finish is not None:
                self._finished.setdefault(choice, delta.finish)

    def _begin(self, now: float, queued: float | None) -> None:
        histograms = self._figures.histograms
        histograms["time_to_first_token_seconds"].observe(now - self._began)
        if queued is not None:
            histograms["request_queue_time_seconds"].observe(queued)
            histograms["request_prefill_time_seconds"].observe(max(now - self._asked - queued, 0.0))

    def end(self) -> None:
        """Adds up, however it ended."""
        figures, now = self._figures, time.perf_counter()
        if self.taken:
            figures.prompt_tokens += self._prompt_tokens
            figures.cached_tokens += self._cached
        if self._first is not None:
            figures.histograms["e2e_request_latency_seconds"].observe(now - self._began)
            figures.histograms["request_decode_time_seconds"].observe(now - self._first)
        figures.generation_tokens += self._tokens
        for reason in self._finished.values():
            figures.finished[reason] += 1
        if self._exchange is not None:
            self._exchange.prompt_tokens += self._prompt_tokens
            self._exchange.cached_tokens += self._cached
            self._exchange.completion_tokens += self._tokens
            self._exchange.finish += self._finished.values()
