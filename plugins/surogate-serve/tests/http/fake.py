"""A model that says what a test wrote down, with the methods of a served one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np

from surogate_core.weights.embedding import Embedding

from surogate_serve.grammars import Grammars
from surogate_serve.parsers import FORMATS, Parser
from surogate_serve.types import Delta, Generation, Prompt, Refused, Take, TokenLogprob

_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")


class FakeTokenizer:
    """A vocabulary that grows with what is asked of it: specials from 0, pieces of text from 16."""

    vocab_size = 100_000
    eos_token_id = 5
    stop_token_ids = (5,)
    special_tokens = frozenset(_SPECIAL)
    bos_token_id = None

    def __init__(self) -> None:
        self.added_tokens = {text: index for index, text in enumerate(_SPECIAL)}
        self._texts: dict[int, bytes] = {index: text.encode() for text, index in self.added_tokens.items()}
        self._ids: dict[bytes, int] = {text: index for index, text in self._texts.items()}

    def id_of(self, piece: str | bytes) -> int:
        raw = piece.encode() if isinstance(piece, str) else piece
        if raw not in self._ids:
            number = len(self._ids) + 16
            self._ids[raw], self._texts[number] = number, raw
        return self._ids[raw]

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, _SPECIAL)) + ")", text) if parse_special else [text]
        return [
            self.id_of(piece)
            for part in parts
            for piece in ([part] if parse_special and part in _SPECIAL else re.findall(r"\s?\w+|\s|[^\w\s]", part))
        ]

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return b"".join(self.token_bytes(each) for each in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._texts.get(token, b"?")


class _Bytes:
    """The specials, and a token for each byte: grammars need a vocabulary that stays."""

    bos_token_id = None
    stop_token_ids = FakeTokenizer.stop_token_ids
    special_tokens = FakeTokenizer.special_tokens
    added_tokens = {text: index for index, text in enumerate(_SPECIAL)}

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return [256 + byte for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return _SPECIAL[token].encode() if token < len(_SPECIAL) else bytes([token - 256]) if token >= 256 else b""


Script = Callable[[Generation, int], Sequence[str]]


class FakeModel:
    """script(generation, choice): the pieces of an answer, one a token. delay: seconds before each token. hold: while
    it is set, no request gets its first token."""

    writes_text = True

    def __init__(
        self, name: str = "fake", script: Script | None = None, parser: str = "hermes", context: int = 4096
    ) -> None:
        self.name, self.created, self.context = name, 1_700_000_000, context
        self.tokenizer = FakeTokenizer()
        self.parser = Parser(FORMATS[parser], self.tokenizer)
        self.grammars = Grammars(_Bytes(), 512, parser=self.parser)
        self.adapters: list[str] = []
        self.vectors = SimpleNamespace(embedding=Embedding(), width=4, longest=context)
        self.main: tuple[str, ...] = (name,)
        self.dead: str | None = None
        self.script: Script = script or (lambda generation, choice: ["Hello", " there", "!"])
        self.delay = 0.0
        self.queued: float | None = 0.25
        self.ended: list[int] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = self.waiting = self.cancelled = 0
        self.seen: list[Generation] = []
        self.rendered: list[tuple[list[dict[str, Any]], Any, dict[str, Any]]] = []
        self.refuse: Refused | None = None
        self.fail_after: int | None = None
        self.tail = ""

    def render(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Prompt:
        self.rendered.append((messages, tools, options))
        text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        return Prompt(self.tokenizer.encode(text + "<|im_start|>assistant\n"), self.tail)

    async def read(self, generation: Generation, take: Take) -> None:
        async with aclosing(self.generate(generation)) as deltas:
            async for delta in deltas:
                if take([delta]):
                    return

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        self.seen.append(generation)
        if self.refuse is not None:
            raise self.refuse
        self.waiting += 1
        try:
            await self.hold.wait()
        except BaseException:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        self.running += 1
        done = False
        streams = {choice: self._choice(generation, choice) for choice in range(generation.n)}
        self.ended = ended = []
        watcher = ended.append
        generation.watchers.append(watcher)
        try:
            while streams:
                if self.delay:
                    await asyncio.sleep(self.delay)
                for choice, stream in list(streams.items()):
                    delta = next(stream)
                    delta.queued = self.queued
                    if choice in ended:
                        delta = Delta(choice, [], "", [], finish="cancelled")
                    if delta.finish is not None:
                        del streams[choice]
                    yield delta
            done = True
        finally:
            generation.watchers.remove(watcher)
            self.running -= 1
            self.cancelled += not done

    def _choice(self, generation: Generation, choice: int) -> Any:
        pieces = [*self.script(generation, choice)]
        prompt = None
        if generation.prompt_logprobs:
            prompt = [self._logprob(token, generation.logprobs or 0) for token in generation.prompt]
            prompt[0] = TokenLogprob(prompt[0].token, None)
        text, limit = "", generation.max_tokens
        if limit == 0:
            yield Delta(choice, [], "", [], prompt_logprobs=prompt, finish="length")
            return
        for index, piece in enumerate(pieces):
            token = self.tokenizer.id_of(piece)
            shown, finish, stop = piece, None, None
            if self.fail_after is not None and index >= self.fail_after:
                yield Delta(choice, [], "", [], finish="error", error="the logits are not numbers")
                return
            for string in generation.stop:
                if string in text + piece:
                    shown, finish, stop = (text + piece).split(string)[0][len(text) :], "stop", string
            text += piece
            if finish is None and limit is not None and index + 1 >= limit:
                finish = "length"
            logprobs = None if generation.logprobs is None else [self._logprob(token, generation.logprobs)]
            pieces_told = [(token, shown)] if shown else []
            yield Delta(choice, [token], shown, pieces_told, logprobs, prompt, 3, finish, stop)
            prompt = None
            if finish is not None:
                return
        end = self.tokenizer.eos_token_id
        logprobs = None if generation.logprobs is None else [self._logprob(end, generation.logprobs)]
        yield Delta(choice, [end], "", [], logprobs, None, 3, "stop")

    def _logprob(self, token: int, alternatives: int) -> TokenLogprob:
        top = tuple((token + index, -0.5 - index) for index in range(alternatives))
        return TokenLogprob(token, -0.5, top)

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: str | None = None) -> np.ndarray:
        rows = np.array([[len(each), sum(each) % 97, 1.0, 2.0] for each in prompts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def stats(self) -> dict[str, Any]:
        return {"running": self.running, "waiting": self.waiting, "kv_usage": 0.25}

    def adapter_details(self) -> list[dict[str, Any]]:
        return [{"name": name} for name in self.adapters]

    @property
    def names(self) -> list[str]:
        return sorted([self.name, *self.adapters], key=lambda name: name not in self.main)

    async def load_adapter(self, name: str, path: str) -> None:
        if name not in self.adapters:
            self.adapters.append(name)

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise Refused(f"there is no adapter {name!r}", 404, "adapter_not_found", "name")
        self.adapters.remove(name)
