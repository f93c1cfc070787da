"""The loop that serves a model: sequences that come and go, run together step by step on a thread without the GIL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import EngineError
from .library import load
from .session import Session

Reason = Literal["invalid", "context", "full", "draining", "dead"]

Row = tuple[
    int, int, list[int], str, list[tuple[int, str]], list[tuple] | None, list[tuple] | None, int, str | None,
    str | int | None, str | None, float | None,
]
"""id, choice, tokens, text, pieces (token, text), logprobs, prompt_logprobs, cached_tokens, finish, stop, error, queued
(seconds until the request began; None before that). A log-probability is (token, logprob or None,
((token, logprob), ...))."""


class Refusal(EngineError):
    """A request that the loop does not take. reason: "invalid" (a setting), "context" (the prompt leaves no room), "full"
    (too many requests), "draining", "dead"."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MaskSource(Protocol):
    """What grammars allow. Called from the loop's thread."""

    def fill(self, handles: list[int], rows: np.ndarray) -> None:
        """Writes uint32 [len(handles), ceil(vocab / 32)]: bit v % 32 of word v // 32 is set where token v may come next.
        `rows` is valid during the call only."""

    def accept(self, handles: list[int], tokens: list[int]) -> Sequence[int] | None:
        """Each handle's choice went on with the token beside it. Returns for each 0 (it goes on), 1 (nothing more may
        come) or -1 (the token is not allowed); None: all go on."""


class Loop:
    """Serves one model with the programs of :mod:`surogate_core.model.serving`, opened on one queue.

    places: sequences that run at once. num_blocks, block_size: of the key/value cache. context: tokens of a sequence, at
    most what its table and the whole cache hold. token_budget: tokens of a step. run_ahead: launch a step before the one
    ahead of it was read; of use on devices. step_overhead: what a step costs beside its tokens, in tokens (None: 128 with
    run_ahead, else 32). max_requests: that may run and wait. model_key: which weights; blocks computed with others are
    never found.

    Once started a thread runs, until :meth:`stop`. All other methods may be called from any thread.
    """

    __slots__ = ("_loop", "_masks")

    def __init__(
        self, *, places: int, num_blocks: int, context: int, token_budget: int, vocab: int, block_size: int = 16,
        run_ahead: bool = False, step_overhead: int | None = None, max_requests: int = 1 << 20, hash_key: bytes | None = None,
        model_key: bytes = b"",
    ) -> None:
        """hash_key: 16 bytes that the names of cached blocks depend on; None: random. Raises :class:`EngineError`."""
        overhead = (128 if run_ahead else 32) if step_overhead is None else step_overhead
        self._loop = load().open_loop(
            places, num_blocks, block_size, context, token_budget, vocab, run_ahead, overhead, max_requests,
            hash_key or os.urandom(16), model_key,
        )
        self._masks: MaskSource | None = None

    def add_session(
        self, session: Session, tokens: int, rows: int, with_adapters: bool = False, decode_only: bool = False
    ) -> None:
        """A program for steps of up to that many tokens and rows. decode_only: only for steps in which every sequence has
        one token and a row. The largest one that is not must have as many rows as there are places. Raises
        :class:`EngineError`."""
        self._loop.add_session(session.native, tokens, rows, with_adapters, decode_only)

    def set_tokenizer(
        self, tokens: Sequence[bytes], special: Sequence[bool] | np.ndarray, stop_token_ids: Sequence[int]
    ) -> None:
        """The bytes of every token id, which of them are special, and which end an answer."""
        self._loop.set_tokenizer(tokens, np.asarray(special, np.uint8), list(stop_token_ids))

    def set_mask_source(self, source: MaskSource) -> None:
        self._masks = source
        self._loop.set_mask_source(source)

    def start(self) -> None:
        """After all sessions were added. On a device every program is run, and recorded, before this returns: nobody's first
        token waits for that. Raises :class:`EngineError`."""
        self._loop.start()

    @property
    def context(self) -> int:
        """Tokens of a sequence, as the cache allows it. Known once started."""
        return self._loop.context()

    def submit(self, prompt: Sequence[int], **fields: Any) -> int:
        """Takes a request and returns its id, which is never used again. Fields, all optional: max_tokens (None: what
        fits; 0: only the prompt is computed), temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty,
        repetition_penalty, seed (unsigned, 64 bits), logit_bias (pairs), n, stop, stop_after, include_stop, special_text
        (special tokens have text too), stop_token_ids, ignore_eos, min_tokens, logprobs, prompt_logprobs, priority (the
        smaller goes first), cache_salt (bytes), adapter_slot, adapter_key (bytes), grammars (handles of the mask source,
        one a choice), thinking_budget, thinking_end and opening (the token that begins thinking: an answer that begins
        with another has none, and then neither budget nor stop_after mean anything). None stands for the default. Raises
        :class:`Refusal`."""
        fields = {name: value for name, value in fields.items() if value is not None}
        unknown = fields.keys() - _FIELDS
        if unknown:
            raise TypeError(f"submit: unknown fields {sorted(unknown)}")
        try:
            id, reason, message = self._loop.submit({"prompt": list(prompt), **fields})
        except EngineError as error:
            raise Refusal("invalid", str(error)) from None
        if id is None:
            raise Refusal(reason, message)
        return id

    def cancel(self, id: int, choice: int | None = None) -> None:
        """Ends a request, or one of its choices, wherever it is, within a step; its last rows have finish
        "cancelled"."""
        self._loop.cancel(id, -1 if choice is None else choice)

    def poll(self, timeout: float) -> list[Row]:
        """What all choices gained since the last call, in order; waits for something, `timeout` seconds at most. For one
        thread. Raises :class:`EngineError` once the loop is dead and everything was told."""
        return self._loop.poll(timeout)

    def stats(self) -> dict[str, Any]:
        """blocks (total, free, cached, used, evictions), running, waiting (sequences), requests (taken), finished (choices
        by reason), prompt_tokens, cached_tokens, generated_tokens, discarded_tokens (sampled past an end), steps,
        step_tokens, padded_tokens, failures, preemptions, cache_queries and cache_hits (tokens), seconds (planning,
        launching, reading: of the thread's processor; waiting: for the device), alive, dead (why, or None)."""
        return self._loop.stats()

    def uses(self, adapter_slot: int) -> int:
        """How many requests, waiting ones included, use an adapter's slot; its memory may be written where it is 0."""
        return self._loop.uses(adapter_slot)

    def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits until those there are complete; whether they are."""
        return self._loop.drain(timeout)

    def stop(self) -> None:
        """Ends the thread. What is not complete ends as "cancelled"; :meth:`poll` still tells it."""
        self._loop.stop()


_FIELDS = frozenset((
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "n", "stop", "stop_after", "include_stop", "special_text", "stop_token_ids", "ignore_eos",
    "min_tokens", "logprobs", "prompt_logprobs", "priority", "cache_salt", "adapter_slot", "adapter_key", "grammars",
    "thinking_budget", "thinking_end", "opening",
))  # fmt: skip
