"""Text from a model: prompts in chunks and tokens one by one through programs with a key-value cache.

Generator().chat(messages) and .complete(text) decode one sequence; `Decoder` underneath runs any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import engine
from .data.adopted import adopt_choice, adopt_saved_template
from .data.masks import encode_rendered
from .data.template import load_template
from .errors import DataError, SurogateError
from .model import AppliedAdapter, FrozenWeights, LoadedModel, cached_program
from .passes.paged_kv import BLOCK_SIZE
from .program import Program

PROMPT_CHUNK = 512
"""Tokens of a prompt that go through the model together."""


class Decoder:
    """A model with a cache of ``context`` tokens for each of ``sequences`` sequences.

    Programs are planned for the token counts that are asked for: 1, 2, 4, ... up to PROMPT_CHUNK.
    """

    def __init__(
        self, model: LoadedModel, weights: FrozenWeights, recipe: Any, context: int, sequences: int = 1,
        adapter: AppliedAdapter | None = None, threads: int | None = None,
    ) -> None:
        self.model, self.weights, self.recipe, self.adapter = model, weights, recipe, adapter
        self.threads = threads
        self.blocks = -(-context // BLOCK_SIZE)
        self.context, self.sequences = self.blocks * BLOCK_SIZE, sequences
        self._sessions: dict[int, engine.Session] = {}
        self._programs: dict[int, Program] = {}
        self._caches: dict[str, engine.Memory] = {}
        if adapter is not None:
            for name, array in adapter.arrays.items():
                weights.adopt(name, "f32", array)

    def logits(
        self, tokens: Sequence[int], sequence_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> np.ndarray:
        """float32 [len(rows), vocab]: logits after the tokens at ``rows``."""
        bucket = 1 << (len(tokens) - 1).bit_length()
        session = self.session(bucket)
        self._fill(session, tokens, sequence_ids, positions, rows)
        session.run("forward")
        return session.read("logits")[:len(rows)]

    def _fill(self, session: engine.Session, tokens, sequence_ids, positions, rows) -> None:
        """Writes a run's inputs, padded to its bucket."""
        positions = np.asarray(positions, np.int32)
        ids = np.asarray(sequence_ids, np.int32)
        if positions.max(initial=0) >= self.context:
            raise SurogateError(f"position {positions.max()} is past the cache of {self.context} tokens")
        for name, values, padding in (
            ("tokens", tokens, 0), ("positions", positions, 0), ("sequence_ids", ids, -1),
            ("slots", ids * self.context + positions, -1), ("rows", rows, rows[-1]),
        ):
            padded = np.full(session.shape(name), padding, np.int32)
            padded[:len(values)] = values
            session.write(name, padded)

    def session(self, bucket: int) -> engine.Session:
        """The session planned for ``bucket`` tokens a run, opened at first use."""
        if bucket not in self._sessions:
            self._sessions[bucket] = self._open(bucket)
        return self._sessions[bucket]

    def program(self, bucket: int) -> Program:
        """The program of that session."""
        return self._programs[bucket]

    def _open(self, bucket: int) -> engine.Session:
        bindings = {
            "T": bucket, "R": min(bucket, self.sequences), "S": self.context * self.sequences, "B": self.sequences,
            "M": self.blocks,
        }
        graph, program = cached_program(
            self.model, self.recipe, self.weights, bindings, max_positions=self.context,
            adapter=None if self.adapter is None else self.adapter.spec,
        )
        session = self.weights.open_session(graph, program, self.threads)
        for storage in program.external():
            if not storage.name.startswith("weight."):
                if storage.name not in self._caches:
                    self._caches[storage.name] = engine.Memory(self.weights.backend, storage.bytes, self.weights.device)
                session.bind(storage.name, self._caches[storage.name])
        table = np.arange(self.sequences * self.blocks, dtype=np.int32).reshape(self.sequences, self.blocks)
        session.write("block_tables", table)
        self._programs[bucket] = program
        return session


def sample(logits: np.ndarray, temperature: float, top_p: float, generator: np.random.Generator) -> int:
    """One token id from float32 [vocab] logits; temperature 0 takes the largest (the lowest id on a tie)."""
    if temperature <= 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1.0:
        order = np.argsort(-probabilities, kind="stable")
        keep = order[: int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1]
        kept = probabilities[keep] / probabilities[keep].sum()
        return int(keep[generator.choice(len(keep), p=kept)])
    return int(generator.choice(len(probabilities), p=probabilities))


class Generator:
    """A model that answers. ``model``: Hugging Face folder or GGUF file; ``adapter``: a PEFT LoRA folder; ``recipe``: name
    of a precision recipe; ``context``: tokens of prompt and answer together (default: the model's, at most 4096);
    ``sequences``: conversations that `chat_many` answers side by side; ``chat_template``: a name, a file or Jinja text
    (default: what the adapter was trained with, or the model's own)."""

    def __init__(
        self, model: str | Path, adapter: str | Path | None = None, recipe: str = "bf16", threads: int | None = None,
        context: int | None = None, sequences: int = 1, chat_template: str | None = None,
    ) -> None:
        self.loaded = LoadedModel.open(model, installed_families())
        self.tokenizer = self.loaded.tokenizer()
        chosen = _recipe(recipe)
        weights = FrozenWeights(self.loaded, chosen.compute)
        limit = context or min(self.loaded.hyperparameters.max_positions, 4096)
        held = None if adapter is None else AppliedAdapter.open(adapter, self.loaded)
        if chat_template is not None:
            adopt_choice(chat_template, self.tokenizer, _named_templates())
        elif adapter is not None:
            adopt_saved_template(adapter, self.tokenizer)
        self.decoder = Decoder(self.loaded, weights, chosen, limit, sequences, held, threads=threads)

    def chat(
        self, messages: Sequence[dict[str, Any]], max_new_tokens: int = 256, temperature: float = 0.0, top_p: float = 1.0,
        seed: int = 0, stream: Callable[[str], None] | None = None, tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The assistant's answer to a conversation. DataError when the model has no chat template."""
        prompt = self.prompt_tokens(messages, tools)
        return self._generate(prompt, max_new_tokens, temperature, top_p, seed, stream)

    def chat_many(self, conversations: Sequence[Sequence[dict[str, Any]]], max_new_tokens: int = 256) -> list[str]:
        """Greedy answers to many conversations, ``sequences`` of them at a time."""
        prompts = [self.prompt_tokens(messages, None) for messages in conversations]
        answers: list[str] = []
        for start in range(0, len(prompts), self.decoder.sequences):
            group = self._greedy_group(prompts[start:start + self.decoder.sequences], max_new_tokens)
            answers += [self.tokenizer.decode(ids) for ids in group]
        return answers

    def prompt_tokens(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The conversation rendered and cut as training has it."""
        template = load_template(None, self.tokenizer)
        if template is None:
            raise DataError("the model has no chat template", "Choose one (--chat-template), or use raw completion.")
        return encode_rendered(self.tokenizer, template.render(list(messages), tools, add_generation_prompt=True))[0]

    def _greedy_group(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Prompts one after another, then one token of every unfinished sequence a run."""
        answers: list[list[int]] = [[] for _ in prompts]
        following = [int(self.prefill(prompt, row).argmax()) for row, prompt in enumerate(prompts)]
        active = list(range(len(prompts)))
        for _ in range(max_new_tokens):
            active = [row for row in active if following[row] not in self.tokenizer.stop_token_ids]
            active = [row for row in active if len(prompts[row]) + len(answers[row]) < self.decoder.context]
            if not active:
                break
            positions = [len(prompts[row]) + len(answers[row]) for row in active]
            for row in active:
                answers[row].append(following[row])
            logits = self.decoder.logits([following[row] for row in active], active, positions, range(len(active)))
            for index, row in enumerate(active):
                following[row] = int(logits[index].argmax())
        return answers

    def complete(
        self, text: str, max_new_tokens: int = 256, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stream: Callable[[str], None] | None = None,
    ) -> str:
        """The continuation of a text."""
        ids = self.tokenizer.encode(text, add_special_tokens=True)
        return self._generate(ids, max_new_tokens, temperature, top_p, seed, stream)

    def _generate(self, prompt, max_new_tokens, temperature, top_p, seed, stream) -> str:
        ids: list[int] = []
        shown = ""
        for token in self.tokens(prompt, max_new_tokens, temperature, top_p, seed):
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if stream is not None and not text.endswith("\ufffd"):
                stream(text[len(shown):])
                shown = text
        text = self.tokenizer.decode(ids)
        if stream is not None and text != shown:
            stream(text[len(shown):])
        return text

    def tokens(
        self, prompt: Sequence[int], max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[int]:
        """Token ids after ``prompt``, up to a stop token (not yielded), the limit, or the end of the context."""
        if not prompt:
            raise DataError("the prompt has no tokens", "Give a text, or a model whose tokenizer adds a start token.")
        room = self.decoder.context - len(prompt)
        if room < 1:
            raise DataError(f"the prompt has {len(prompt)} tokens, the context holds {self.decoder.context}")
        generator = np.random.default_rng(seed)
        logits = self.prefill(prompt)
        for step in range(min(max_new_tokens, room)):
            token = sample(logits, temperature, top_p, generator)
            if token in self.tokenizer.stop_token_ids:
                return
            yield token
            if step + 1 < min(max_new_tokens, room):
                logits = self.decoder.logits([token], [0], [len(prompt) + step], [0])[0]

    def prefill(self, prompt: Sequence[int], sequence: int = 0) -> np.ndarray:
        """Logits [vocab] after the whole prompt, whose keys and values are then cached for ``sequence``."""
        for start in range(0, len(prompt), PROMPT_CHUNK):
            chunk = list(prompt[start:start + PROMPT_CHUNK])
            positions = np.arange(start, start + len(chunk))
            logits = self.decoder.logits(chunk, [sequence] * len(chunk), positions, [len(chunk) - 1])
        return logits[0]


def installed_families() -> list[Any]:
    """The families of all installed plugins, whose kernels are then loaded too."""
    from .plugins.manager import get_manager

    manager = get_manager()
    manager.load_kernels()
    return manager.families.values()


def _recipe(name: str) -> Any:
    from .plugins.manager import get_manager

    return get_manager().recipes[name]


def _named_templates() -> dict[str, str]:
    from .plugins.manager import get_manager

    return dict(get_manager().chat_templates.items())
