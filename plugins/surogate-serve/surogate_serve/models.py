"""A model that is served: what HTTP, the terminal and offline batches ask."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from surogate_core.data.template import load_template
from surogate_core.engine.serving import Loop, Refusal
from surogate_core.errors import ConfigError, WeightError
from surogate_core.model import LoadedModel
from surogate_core.plugins.manager import get_manager
from surogate_core.train import ADAPTER_FOLDER, MODEL_FOLDER
from surogate_core.weights.embedding import Pooling
from surogate_core.weights.files import read_json
from surogate_core.weights.peft_adapter import CONFIG_NAME

from .embedding_model import EmbeddingModel
from .engine import EngineOptions
from .engine.adapters import Adapters, HeldAdapter, adapter_rank
from .engine.embedding import Embedder
from .engine.loop import delta_of, fields_of, mute, refused
from .engine.pump import AsyncMailbox, EngineDead, Mailbox, Pump, ThreadMailbox
from .engine.runtime import Runtime, bank_of
from .grammars import Grammars
from .parsers import Parser, choose_format
from .render import render
from .templates import choose_template, warn_of_another
from .types import Delta, Generation, Prompt, Refused, Take


class ServedModel:
    """A model that writes text.

    ``name``; ``created``: seconds since 1970; ``context``: tokens of prompt and answer together; ``tokenizer``;
    ``adapters``: names of those that are loaded; ``main``: the names that were asked for when it was opened, its own or
    those of adapters (what a run made is its adapter, and its base comes with it); ``parser``: of its answers;
    ``grammars``: of its tokens; ``vectors``: what makes vectors of texts; ``dead``: why the engine ended, or None.

    Opened by `open`, closed by `close`. `read`, `embed`, `load_adapter` and `unload_adapter` are for coroutines, the others
    for any thread.
    """

    writes_text = True

    def __init__(
        self, name: str, model: LoadedModel, options: EngineOptions = EngineOptions(),
        adapters: Mapping[str, str | Path] | None = None, main: Sequence[str] = (), chat_template: str | None = None,
    ) -> None:
        """main: as the attribute; none: the model itself. chat_template: as for `open`. Raises SurogateError where the model
        cannot be served here, and `Refused` for an adapter that cannot be loaded."""
        self.name, self.created, self.options = name, int(time.time()), options
        self.main = tuple(main) or (name,)
        self.tokenizer = model.tokenizer()
        self.dead: str | None = None
        adapters = adapters or {}
        choose_template(self.tokenizer, chat_template, adapters, self.main)
        recipe = get_manager().recipes[options.recipe]
        bank = bank_of(options, [adapter_rank(path, model) for path in adapters.values()])
        self.runtime = Runtime(model, recipe, options, bank)
        self._adapters = Adapters(model, bank, recipe.compute, options.adapter_memory)
        self._loop = self._open_loop()
        self.context = self._loop.context
        self._adapters.bind(self.runtime.memories, self._loop.uses)
        self.vectors = Embedder(self.runtime)
        for each, path in adapters.items():
            self._adapters.load(each, path)
        self._pump = Pump(self._poll, self._died, name)
        self._pump.start()

    @classmethod
    def open(
        cls, path: str | Path | ModelPath, name: str | None = None, options: EngineOptions = EngineOptions(),
        adapters: Mapping[str, str | Path] | None = None, chat_template: str | None = None,
    ) -> ServedModel | EmbeddingModel:
        """path: a Hugging Face folder, a GGUF file, or a run's folder. name: as requests call it; None: the path's last part.
        chat_template: a name that a plugin brings, a file, or Jinja text; None: what the run was trained with, or the model's
        own. A model without a head is an `EmbeddingModel`."""
        place = path if isinstance(path, ModelPath) else ModelPath.of(path, name)
        manager = get_manager()
        manager.load_kernels()
        model = LoadedModel.open(place.base, manager.families.values())
        adapters = {**place.adapters, **(adapters or {})}
        if model.writes_text:
            return cls(place.name, model, options, adapters, place.main, chat_template)
        if adapters:
            raise ConfigError(f"{place.name} makes vectors of texts, and takes no adapters", "Leave --adapter out.")
        if chat_template is not None:
            raise ConfigError(f"{place.name} makes vectors of texts, not of chats", "Leave --chat-template out.")
        return EmbeddingModel(place.name, model, options)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def read(self, generation: Generation, take: Take) -> None:
        """Gives all choices' deltas to ``take``, in this event loop's thread, until each choice had one with a finish, or no more
        is wanted. Cancelling this cancels the request. Raises `Refused` before the first delta where the request is not taken,
        and what ``take`` raises."""
        asked = time.perf_counter()
        held = None if generation.adapter is None else await self._adapters.acquire(generation.adapter)
        waited = 0.0 if held is None else time.perf_counter() - asked

        def follow(deltas: list[Delta]) -> bool:
            running.take(deltas)
            if waited:
                for delta in deltas:
                    delta.queued = None if delta.queued is None else delta.queued + waited
            return take(deltas) or not running.unfinished

        box = AsyncMailbox(follow)
        running = self._submit(generation, held, box)
        generation.watchers.append(running.end)
        try:
            await box.end()
        except EngineDead as death:
            error, left = f"the engine is dead: {death}", sorted(running.unfinished)
            take([Delta(choice, [], "", [], finish="error", error=error) for choice in left])
        finally:
            generation.watchers.remove(running.end)
            self._end(running)

    def generate_many(self, generations: Sequence[Generation]) -> Iterator[tuple[int, Delta]]:
        """Deltas as they come, each with the index of its request. Closing this cancels what is left. Raises `Refused` where
        one of the requests is not taken; those before it are cancelled then."""
        shared: queue.SimpleQueue[tuple[Any, list[Delta] | str]] = queue.SimpleQueue()
        running: dict[int, Running] = {}
        try:
            for index, generation in enumerate(generations):
                held = None if generation.adapter is None else self._adapters.acquire_now(generation.adapter)
                running[index] = self._submit(generation, held, ThreadMailbox(index, shared))
            while running:
                index, told = shared.get()
                if isinstance(told, str):
                    raise Refused(f"the engine is dead: {told}", 503, "engine_dead")
                running[index].take(told)
                for delta in told:
                    yield index, delta
                if not running[index].unfinished:
                    self._end(running.pop(index))
        finally:
            for each in running.values():
                self._end(each)

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling | None = None) -> np.ndarray:
        """float32 [len(prompts), width], neither cut nor normalised; see `vectors`. pooling: None for the model's own.
        Raises `Refused`."""
        self._check_alive()
        return await asyncio.to_thread(self.vectors.embed, prompts, pooling)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> Prompt:
        """A conversation through the model's chat template, whose variables ``options`` are. Raises `Refused`."""
        if self.template is None:
            words = f"{self.name} has no chat template: send a text to /v1/completions, or serve it with --chat-template"
            raise Refused(words, 400, "no_chat_template")
        return render(self.template, self.tokenizer, messages, tools, **options)

    @cached_property
    def template(self) -> Any:
        return load_template(None, self.tokenizer)

    @cached_property
    def parser(self) -> Parser:
        chosen = choose_format(self.tokenizer.chat_template, dict(get_manager().parsers.items()))
        return Parser(chosen, self.tokenizer)

    def parser_named(self, name: str) -> Parser:
        """Raises PluginError for a name that no plugin brings."""
        return Parser(get_manager().parsers[name], self.tokenizer)

    # -- adapters ------------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        return self._adapters.names

    @property
    def names(self) -> list[str]:
        """All that it can be asked by, `main` first."""
        return sorted([self.name, *self.adapters], key=lambda name: name not in self.main)

    def adapter_details(self) -> list[dict[str, object]]:
        return self._adapters.describe()

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a PEFT folder under ``name``, or in place of the one that has it. Raises `Refused`."""
        await asyncio.to_thread(self._adapters.load, name, path)
        warn_of_another(name, path, self.tokenizer)

    async def unload_adapter(self, name: str) -> None:
        """Requests that run with it go on. Raises `Refused`."""
        await asyncio.to_thread(self._adapters.unload, name)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What `Loop.stats` tells, and kv_usage (0 to 1), prefix_queries, prefix_hits (tokens), adapters."""
        stats = self._loop.stats()
        blocks = stats["blocks"]
        return {
            **stats, "kv_usage": blocks["used"] / max(blocks["total"], 1), "prefix_queries": stats["cache_queries"],
            "prefix_hits": stats["cache_hits"], "adapters": self.adapter_details(), "context": self.context,
            "places": self.runtime.places,
        }

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, and waits until those there are complete; whether they are."""
        return self._loop.drain(timeout)

    def close(self, timeout: float = 0.0) -> None:
        """Drains for ``timeout`` seconds, then ends what is left as cancelled."""
        if timeout > 0 and self.dead is None:
            self._loop.drain(timeout)
        self._loop.stop()
        self._pump.stop()
        self.grammars.close()

    def _open_loop(self) -> Loop:
        runtime, options = self.runtime, self.options
        loop = Loop(
            places=runtime.places, num_blocks=runtime.blocks, context=runtime.context, token_budget=runtime.token_budget,
            vocab=runtime.vocab, run_ahead=options.backend != "cpu" if options.run_ahead is None else options.run_ahead,
        )
        for opened in runtime.open():
            bucket = opened.bucket
            loop.add_session(opened.session, bucket.tokens, bucket.rows, opened.adapters, bucket.decode)
        known = self.tokenizer.vocab_size
        special = {self.tokenizer.token_id(text) for text in self.tokenizer.special_tokens}
        texts = [self.tokenizer.token_bytes(token) if token < known else b"" for token in range(runtime.vocab)]
        loop.set_tokenizer(texts, [token in special for token in range(runtime.vocab)], self.tokenizer.stop_token_ids)
        self.grammars = Grammars(self.tokenizer, runtime.vocab, texts, self.parser)
        loop.set_mask_source(self.grammars)
        loop.start()
        return loop

    def _submit(self, generation: Generation, held: HeldAdapter | None, box: Mailbox) -> Running:
        """Takes over ``held``, also where it raises `Refused`."""
        choices, is_mute = set(range(generation.n)), generation.max_tokens == 0
        running = Running(-1, choices, held, cancel=self._loop.cancel, is_mute=is_mute)
        try:
            self._check_alive()
            if generation.grammar is not None:
                running.grammars = self.grammars.open(generation.grammar, generation.n)
            fields = fields_of(generation, running.grammars, None if held is None else (held.slot, held.key))
            running.number = self._pump.submit(lambda: self._loop.submit(generation.prompt, **fields), box)
            return running
        except BaseException as error:
            running.unfinished.clear()
            self._end(running)
            if isinstance(error, Refusal):
                raise refused(error, generation, self.context) from None
            if isinstance(error, EngineDead):
                raise Refused(f"the engine is dead: {error}", 503, "engine_dead") from None
            raise

    def _end(self, running: Running) -> None:
        self._pump.forget(running.number)
        if running.unfinished:
            self._loop.cancel(running.number)
        if running.grammars:
            self.grammars.release(running.grammars)
        if running.held is not None:
            self._adapters.release(running.held)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise Refused(f"the engine is dead: {self.dead}", 503, "engine_dead")

    def _poll(self, timeout: float) -> Iterator[tuple[int, Delta]]:
        return map(delta_of, self._loop.poll(timeout))

    def _died(self, reason: str) -> None:
        self.dead = reason


@dataclass
class Running:
    """A request of the loop's: its id, the choices that have not ended, and what it holds until they have."""

    number: int
    unfinished: set[int]
    held: HeldAdapter | None = None
    grammars: list[int] = field(default_factory=list)
    cancel: Callable[[int, int], None] = lambda number, choice: None
    is_mute: bool = False
    """The engine ends a prompt with a token; where none was asked for, it is not told."""

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self.is_mute:
                mute(delta)
            if delta.finish is not None:
                self.unfinished.discard(delta.choice)

    def end(self, choice: int) -> None:
        """Ends a choice in the engine too."""
        if choice in self.unfinished:
            self.cancel(self.number, choice)


@dataclass
class ModelPath:
    """``base``: the weights. ``name``: theirs. ``adapters``: that come with them, by name. ``main``: the names that were
    asked for, that of the weights or those of adapters."""

    base: Path
    name: str
    adapters: dict[str, Path]
    main: list[str]

    @classmethod
    def of(cls, path: str | Path, name: str | None = None) -> ModelPath:
        """Of a folder, a file, or a run's folder, which has a model, or an adapter and then is that, beside its base under
        the base's own name. name: None for the path's last part."""
        path = Path(path).expanduser()
        name = name or _last_part(path)
        if (path / MODEL_FOLDER / "config.json").exists():
            return cls(path / MODEL_FOLDER, name, {}, [name])
        for folder in (path / ADAPTER_FOLDER, path):
            if (folder / CONFIG_NAME).exists():
                base = read_adapter_base(folder)
                own = _last_part(base)
                return cls(base, f"{name}:base" if own == name else own, {name: folder}, [name])
        return cls(path, name, {}, [name])


def _last_part(path: Path) -> str:
    return path.resolve().name.removesuffix(".gguf")


def read_adapter_base(folder: Path) -> Path:
    """The model that a PEFT adapter says it was trained on. WeightError where it is not on this machine."""
    named = read_json(folder / CONFIG_NAME).get("base_model_name_or_path")
    for base in () if not named else (Path(named).expanduser(), folder / str(named)):
        if base.exists():
            return base
    raise WeightError(
        f"{folder} is an adapter of {named!r}, which is not on this machine",
        "Name the model first, and the adapter beside it: --adapter NAME=FOLDER.",
    )
