"""A tiny random Llama, and loops that serve it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine.serving import Loop
from surogate_core.generate import Decoder
from surogate_core.model import FrozenWeights, LoadedModel
from surogate_core.model.serving import ServingShape, serving_graph, serving_program
from surogate_core.passes import RECIPES
from surogate_core.passes.paged_kv import BLOCK_SIZE
from surogate_core.plugins import get_manager

from ..train import runs

CONTEXT = 128


@dataclass
class Answer:
    """What one choice gained, all together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[tuple[int, str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    cached: int = 0
    finish: str | None = None
    stop: Any = None
    error: str | None = None
    queued: float | None = None

    def add(self, row: tuple) -> None:
        assert self.finish is None, "nothing follows the end of a choice"
        _, _, tokens, text, pieces, logprobs, prompt, self.cached, self.finish, self.stop, self.error, self.queued = row
        assert text == "".join(piece for _, piece in pieces)
        self.tokens += tokens
        self.text += text
        self.pieces += pieces
        self.logprobs += logprobs or []
        self.prompt_logprobs = prompt if prompt is not None else self.prompt_logprobs


class Client:
    """Submits to a loop and gathers what it tells."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.answers: dict[tuple[int, int], Answer] = {}
        self.wanted: set[tuple[int, int]] = set()

    def submit(self, prompt: list[int], **fields: Any) -> int:
        fields.setdefault("temperature", 0.0)
        id = self.loop.submit(prompt, **fields)
        for choice in range(fields.get("n", 1)):
            self.answers[id, choice] = Answer()
            self.wanted.add((id, choice))
        return id

    def poll(self, timeout: float = 0.05) -> None:
        for row in self.loop.poll(timeout):
            self.answers[row[0], row[1]].add(row)
            if row[8] is not None:
                self.wanted.remove((row[0], row[1]))

    def wait(self, until: Callable[[], bool] | None = None, seconds: float = 60.0) -> None:
        """Until all answers are complete, or until what is asked for is so."""
        end = time.monotonic() + seconds
        while not (until() if until is not None else not self.wanted):
            assert time.monotonic() < end, f"not complete after {seconds} s: {self.wanted}, {self.loop.stats()}"
            self.poll()

    def ask(self, prompt: list[int], **fields: Any) -> Answer:
        id = self.submit(prompt, **fields)
        self.wait()
        return self.answers[id, 0]


class Gate:
    """A grammar that allows everything, and in which the loop can be held: the model is too fast to be met by chance.

    Requests with ``grammars=[0]`` pass it at each of their tokens.
    """

    def __init__(self) -> None:
        self._passed, self._hold_at = 0, 0
        self._reached, self._go = threading.Event(), threading.Event()

    def fill(self, handles: list[int], rows: np.ndarray) -> None:
        rows[:] = 0xFFFFFFFF
        self._passed += 1
        if self._passed == self._hold_at:
            self._reached.set()
            assert self._go.wait(60)

    def accept(self, handles: list[int], tokens: list[int]) -> None:
        return None

    def hold(self, at: int) -> None:
        """The loop is to stop at token number ``at`` of those that pass. Before it gets there."""
        self._reached.clear()
        self._go.clear()
        self._hold_at = at

    def wait(self) -> None:
        """Until it stands there."""
        assert self._reached.wait(60)

    def release(self, hold_at: int = 0) -> None:
        """Lets it go on, to the next token at which it is held."""
        go, self._go = self._go, threading.Event()
        self._reached.clear()
        self._hold_at = hold_at
        go.set()


class Model:
    """The tiny Llama in fp32, and its programs of each shape."""

    def __init__(self, folder: Path, backend: str = "cpu") -> None:
        self.loaded = LoadedModel.open(folder, get_manager().families.values())
        self.recipe = RECIPES["fp32"]
        self.weights = FrozenWeights(self.loaded, self.recipe.compute, backend)
        self.backend = backend
        self.graph = serving_graph(self.loaded, self.recipe, self.weights, max_positions=CONTEXT)
        self.vocab = self.graph.outputs["logits"].shape[1]
        self.decoder: Decoder | None = None
        self._greedy: dict[tuple, list[int]] = {}

    def open(self, places=4, blocks=64, budget=64, buckets=None, context=CONTEXT, start=True, rows=None, masks=None,
             graphs=True, **options) -> Loop:
        """A loop with decode programs 1, 2, 4, ... and mixed ones of the budget and of half of it."""
        loop = Loop(places=places, num_blocks=blocks, context=context, token_budget=budget, vocab=self.vocab, **options)
        queue = engine.Queue(self.backend, threads=1)
        rows = rows or places
        shapes = [(count, rows, False) for count in buckets or (budget, max(budget // 2, places))]
        shapes += [(1 << i, 1 << i, True) for i in range(places.bit_length())]
        dtypes, memories = self.weights.dtypes(self.graph), {}
        most = max(shape[1] for shape in shapes)
        for tokens, count, decode in sorted(set(shapes), reverse=True):
            shape = ServingShape(tokens, count, places, blocks, context // BLOCK_SIZE, most)
            program = serving_program(self.graph, self.recipe, dtypes, shape, BLOCK_SIZE)
            session = self.weights.open_session(self.graph, program, graphs=graphs, queue=queue)
            for storage in program.external():
                if not storage.name.startswith("weight.") and storage.name not in self.graph.constants:
                    if storage.name not in memories:
                        memories[storage.name] = engine.Memory(self.backend, storage.bytes)
                    session.bind(storage.name, memories[storage.name])
            loop.add_session(session, tokens, count, decode_only=decode)
        loop.set_tokenizer(*self.tokens(), [])
        if masks is not None:
            loop.set_mask_source(masks)
        if start:
            loop.start()
        return loop

    def tokens(self) -> tuple[list[bytes], list[bool]]:
        """Byte i is token i; the rest is special."""
        names = [bytes([i]) if i < 256 else f"<{i}>".encode() for i in range(self.vocab)]
        return names, [i >= 256 for i in range(self.vocab)]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What the simple decoder answers, one token after another."""
        key = (tuple(prompt), count)
        if key not in self._greedy:
            if self.decoder is None:
                weights = FrozenWeights(self.loaded, self.recipe.compute)
                self.decoder = Decoder(self.loaded, weights, self.recipe, CONTEXT, threads=1)
            count_of = len(prompt)
            first = self.decoder.logits(prompt, [0] * count_of, range(count_of), [count_of - 1])
            tokens = [int(first[0].argmax())]
            while len(tokens) < count:
                position = len(prompt) + len(tokens) - 1
                tokens.append(int(self.decoder.logits([tokens[-1]], [0], [position], [0])[0].argmax()))
            self._greedy[key] = tokens
        return self._greedy[key]


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, generator.integers(low, high + 1)).tolist() for _ in range(count)]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    runs.write_model(folder, dtype="f32")
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Model:
    return Model(tiny_folder)


@pytest.fixture
def opened() -> Iterator[list[Loop]]:
    """Loops put in here are stopped, and must have given all blocks back."""
    loops: list[Loop] = []
    yield loops
    for loop in loops:
        loop.stop()
        blocks = loop.stats()["blocks"]
        assert blocks["used"] == 0 and blocks["free"] + blocks["cached"] == blocks["total"]
