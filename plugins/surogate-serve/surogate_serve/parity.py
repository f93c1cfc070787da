"""The same conversations through the trainer, the server, and the model exported as GGUF: do they agree?

The server answers each conversation with its likeliest tokens. What the trainer's forward pass says of those tokens is what
everything else is held to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from surogate_core.engine import run_op
from surogate_core.errors import ConfigError
from surogate_core.export import export, merge
from surogate_core.generate import installed_families
from surogate_core.model import AppliedAdapter, FrozenWeights, LoadedModel, loss_program
from surogate_core.ops.sample import DRAW, TARGET
from surogate_core.ops.token_logprobs import MOST
from surogate_core.plugins.manager import get_manager

from .engine import EngineOptions
from .models import ServedModel
from .types import Generation, Refused, Sampling

CONVERSATIONS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "What is the capital of France?"},),
    ({"role": "user", "content": "Write a Python function that adds two numbers."},),
    ({"role": "user", "content": "Count from one to ten."},),
    ({"role": "user", "content": "Réponds en français : où est la mer ? 🌊 \t\u00a0\u4f60\u597d"},),
    (
        {"role": "user", "content": "I have 3 apples and buy 4 more."},
        {"role": "assistant", "content": "Then you have 7 apples."},
        {"role": "user", "content": "I eat two. How many are left?"},
    ),
    ({"role": "user", "content": "Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * 12},),
)
ADAPTER = "adapter"


@dataclass
class Row:
    """One way of computing, beside the trainer. tokens: compared. differ: of these, where the likeliest token is another one.
    mean, largest: differences of the log-probabilities of the answers' tokens. prompts_differ: conversations that were cut
    into other tokens, which are left out of the rest."""

    name: str
    tokens: int = 0
    differ: int = 0
    mean: float = 0.0
    largest: float = 0.0
    prompts_differ: int = 0
    _total: float = field(default=0.0, repr=False)

    def add(self, ours: Scores, theirs: Scores) -> None:
        gaps = np.abs(ours.logprobs - theirs.logprobs)
        self.tokens += len(gaps)
        self.differ += int(np.count_nonzero(ours.best != theirs.best))
        self._total += float(gaps.sum())
        self.largest = max(self.largest, float(gaps.max(initial=0.0)))
        self.mean = self._total / max(self.tokens, 1)

    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


@dataclass(frozen=True)
class Scores:
    """Of an answer's tokens: their log-probabilities, and the likeliest token at each place."""

    logprobs: np.ndarray
    best: np.ndarray


class Trainer:
    """The forward pass that training runs, without its backward."""

    def __init__(self, model: LoadedModel, adapter: Path | None, options: EngineOptions, tokens: int) -> None:
        """tokens: of the longest conversation with its answer."""
        recipe = get_manager().recipes[options.recipe]
        weights = FrozenWeights(model, recipe.compute, options.backend, options.device)
        applied = None if adapter is None else AppliedAdapter.open(adapter, model)
        for name, array in ({} if applied is None else applied.arrays).items():
            weights.adopt(name, "f32", array)
        self.length = tokens
        graph, program = loss_program(
            model, recipe, weights, {"T": tokens, "D": 2}, max_positions=tokens, output="logits",
            adapter=None if applied is None else applied.spec,
        )
        self.session = weights.open_session(graph, program, options.threads, batch_invariant=options.batch_invariant)

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> Scores:
        tokens = [*prompt, *answer]
        padded = np.zeros(self.length, np.int32)
        padded[:len(tokens)] = tokens
        self.session.write("tokens", padded)
        self.session.write("positions", np.arange(self.length, dtype=np.int32))
        self.session.write("doc_starts", np.array([0, self.length], np.int32))
        self.session.run("forward")
        logits = self.session.read("logits")[len(prompt) - 1:len(tokens) - 1]
        return Scores(_logprobs(logits, np.array(answer, np.int32)), logits.argmax(axis=1))


def _logprobs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log-probabilities [T] of ``targets`` by logits [T, V], by the op that the server has: what is compared is the logits."""
    count = len(targets)
    draw = np.zeros((count, DRAW), np.int32)
    draw[:, TARGET] = targets
    logprobs, top_ids = np.zeros(count, np.float32), np.zeros((count, MOST), np.int32)
    outputs = [logprobs, top_ids, np.zeros((count, MOST), np.float32)]
    run_op("token_logprobs", [np.ascontiguousarray(logits), targets, draw], outputs)
    return logprobs


class Server:
    """A served model, asked for answers and for what it says of them."""

    def __init__(self, model: ServedModel, adapter: str | None) -> None:
        self.model, self.adapter = model, adapter

    def prompts(self) -> list[list[int]]:
        """The conversations as tokens; as plain texts where there is no chat template."""
        if self.model.template is None:
            return [self.model.tokenizer.encode(talk[-1]["content"], add_special_tokens=True) for talk in CONVERSATIONS]
        return [list(self.model.render(talk).tokens) for talk in CONVERSATIONS]

    def answers(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], Scores]]:
        """The likeliest tokens after each prompt, side by side, and what decoding says of them."""
        generations = [self._generation(prompt, max_tokens=count, ignore_eos=True, logprobs=1) for prompt in prompts]
        found: list[list[Any]] = [[] for _ in prompts]
        for index, delta in self.model.generate_many(generations):
            if delta.error is not None:
                raise Refused(delta.error, 500)
            found[index] += delta.logprobs or ()
        return [([one.token for one in each], _scores(each)) for each in found]

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> Scores:
        """What is said of an answer that is part of the prompt."""
        generation = self._generation([*prompt, *answer], max_tokens=0, logprobs=1, prompt_logprobs=True)
        told: list[Any] = []
        for _, delta in self.model.generate_many([generation]):
            told = delta.prompt_logprobs or told
        return _scores(told[len(prompt):])

    def _generation(self, prompt: Sequence[int], **fields: Any) -> Generation:
        return Generation(prompt, sampling=Sampling(temperature=0.0), adapter=self.adapter, **fields)


def _scores(told: Sequence[Any]) -> Scores:
    return Scores(np.array([one.logprob for one in told]), np.array([one.top[0][0] for one in told]))


def compare(path: Path, adapter: Path | None, gguf: Path | bool, options: EngineOptions, count: int = 32) -> list[Row]:
    """Rows of the server decoding, the server reading, and (unless ``gguf`` is False) the server on a GGUF: a file, or True to
    export one. ``count``: tokens of an answer. Raises SurogateError and `Refused`."""
    named = {} if adapter is None else {ADAPTER: adapter}
    with _served(path, options, named) as model:
        server = Server(model, None if adapter is None else ADAPTER)
        prompts = server.prompts()
        answers = server.answers(prompts, count)
        loaded = LoadedModel.open(path, installed_families())
        trainer = Trainer(loaded, adapter, options, max(map(len, prompts)) + count)
        want = [trainer.scores(prompt, answer) for prompt, (answer, _) in zip(prompts, answers, strict=True)]
        decoding, reading = Row("server, decoding"), Row("server, reading")
        for prompt, (answer, decoded), wanted in zip(prompts, answers, want, strict=True):
            decoding.add(decoded, wanted)
            reading.add(server.scores(prompt, answer), wanted)
    rows = [decoding, reading]
    if gguf is not False:
        with _gguf(path, adapter, gguf) as file, _served(file, options, {}) as model:
            rows += _of_gguf(Server(model, None), prompts, [answer for answer, _ in answers], want)
    return rows


def _of_gguf(
    server: Server, prompts: Sequence[list[int]], answers: Sequence[list[int]], want: Sequence[Scores]
) -> list[Row]:
    row = Row("GGUF, reading")
    for prompt, theirs, answer, wanted in zip(prompts, server.prompts(), answers, want, strict=True):
        if prompt != theirs:
            row.prompts_differ += 1
        else:
            row.add(server.scores(prompt, answer), wanted)
    return [row]


@contextmanager
def _served(path: Path, options: EngineOptions, adapters: dict[str, Path]) -> Iterator[ServedModel]:
    slots = 1 if adapters else 0
    model = ServedModel.open(path, options=replace(options, adapter_slots=slots), adapters=adapters)
    try:
        if not isinstance(model, ServedModel):
            raise ConfigError(f"{path} makes vectors of texts, and there is no text to compare")
        yield model
    finally:
        model.close()


@contextmanager
def _gguf(path: Path, adapter: Path | None, given: Path | bool) -> Iterator[Path]:
    """The file that was given, or one that is exported for the while: with the adapter folded in, of bf16; else as stored."""
    if not isinstance(given, bool):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="surogate-parity-") as folder:
        file = Path(folder) / "model.gguf"
        if adapter is None:
            export(path, file, None)
        else:
            merge(path, adapter, file)
        yield file
