"""A server process of a tiny model, for programs that know nothing of us."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SUROGATE = Path(sys.executable).with_name("surogate")


class Process:
    """`surogate serve` with these words."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._output = folder / "server.log"
        with open(self._output, "wb") as file:
            self.process = subprocess.Popen([SUROGATE, "serve", *words, "--port", "0"], stdout=file, stderr=file)
        until = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:[1-9]\d*", self.output())):
            assert self.process.poll() is None and time.monotonic() < until, self.output()
            time.sleep(0.1)
        self.url = found[0]

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory, write_tiny: Callable[..., Path]) -> Iterator[Process]:
    """Serves "tiny" with 2,048 positions, whose answers may have calls, to those with the key "secret"."""
    folder = tmp_path_factory.mktemp("outside")
    model = write_tiny(folder / "tiny", max_position_embeddings=2048)
    words = ["--api-key", "secret", "--parser", "hermes", "--threads", "1", "--backend", "cpu", "--context", "1024"]
    running = Process(folder, [f"tiny={model}", *words, "--kv-memory", "64M"])
    yield running
    assert running.end() == 0
