"""A server to be measured, as a process: `python -m surogate_serve.bench.server MODEL OPTIONS`, OPTIONS as JSON.

MODEL is a path, or a preset of `surogate bench train`, which gets random weights and a vocabulary of made-up words. Prints
its URL, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surogate_core.errors import TrainingError


@contextmanager
def server_of(model: str, options: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The URL, and the seconds until it was there. Raises TrainingError where it does not come up."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "surogate_serve.bench.server", model, json.dumps(dict(options))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdin is not None
        url = process.stdout.readline().strip()
        if not url:
            raise TrainingError(f"the server of {model} did not start (exit code {process.wait()}); its messages are above")
        yield url, time.perf_counter() - begun
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    from surogate_core.bench.presets import presets

    from ..engine import EngineOptions
    from ..http.app import create_app
    from ..http.limits import Settings
    from ..http.server import listen, run
    from ..models import ServedModel

    name, options = sys.argv[1], EngineOptions(**json.loads(sys.argv[2]))
    listener = listen("127.0.0.1", 0)
    model = ServedModel(name, _random(name), options) if name in presets() else ServedModel.open(Path(name), None, options)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        run(create_app({model.name: model}, Settings()), listener, lambda url: print(url, flush=True))
    finally:
        model.close()


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _random(preset: str) -> Any:
    """A preset's architecture with random weights and a tokenizer whose ids past the bytes are made-up words."""
    from surogate_core.bench.presets import architecture
    from surogate_core.bench.random_model import random_model
    from surogate_core.generate import installed_families
    from surogate_core.model import LoadedModel
    from surogate_core.weights.tokenizer import Tokenizer

    made = random_model(architecture(preset), installed_families())

    class WithWords(LoadedModel):
        def tokenizer(self) -> Tokenizer:
            return _words(self.hyperparameters.vocab_size)

    return WithWords(made.family, made.hyperparameters, made.store, made.names)


def _words(size: int) -> Any:
    import tokenizers
    from surogate_core.weights.tokenizer import Tokenizer
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(alphabet)}
    vocabulary |= {f"w{number}": number for number in range(len(alphabet), size)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        return Tokenizer.from_hf_folder(folder)


if __name__ == "__main__":
    main()
