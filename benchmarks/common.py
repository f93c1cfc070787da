"""What the benchmarks share: a clock that knows how much of the cores it had, and JSON lines.

A measurement is one JSON object on standard output: {"bench": name, ..., "metrics": {...}}. `share` is CPU time over wall time
and threads: rows below 0.85 had to share the cores and do not count.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

TEXT = (
    "Every spring the harbour office opens its ledgers and counts what the winter has left: boats that were hauled out and "
    "never went back, nets that were mended twice, three lamps, one bell. The clerk writes slowly. He was told that nobody "
    "reads these pages, and he believes it, so he puts the truth in them: 14 gulls on the roof, coffee at 6, and the tide late. "
)


class Clock:
    """Wall seconds and the share of ``threads`` cores that this process really had."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exception) -> None:
        self.wall = time.perf_counter() - self._wall
        self.share = (time.process_time() - self._cpu) / (self.wall * self.threads)


def peak_rss_mib() -> float:
    """Of this process; getrusage would count what its parent held when it forked."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) / 1024, 1)


def wait_until_quiet(limit: float) -> None:
    """Waits for an idle machine, at most ``limit`` seconds."""
    def idle_and_all() -> tuple[int, int]:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    end = time.monotonic() + limit
    while time.monotonic() < end:
        idle, total = idle_and_all()
        time.sleep(0.3)
        later_idle, later_total = idle_and_all()
        if later_total > total and (later_idle - idle) / (later_total - total) > 0.9:
            return


def emit(bench: str, metrics: dict, **facts) -> None:
    import surogate_core

    print(json.dumps({"bench": bench, "version": surogate_core.__version__, "cpu": cpu_name(), **facts, "metrics": metrics}),
          flush=True)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
