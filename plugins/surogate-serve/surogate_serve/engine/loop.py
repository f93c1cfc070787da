"""Requests and answers in this package's types, on one side; the native loop's, on the other."""

from __future__ import annotations

import random
from typing import Any

from surogate_core.engine.serving import Refusal, Row

from ..types import Delta, Generation, Refused, TokenLogprob

_STATUS = {"invalid": 400, "context": 400, "full": 429, "draining": 503, "dead": 503}
_CODE = {"context": "context_length_exceeded", "full": "queue_full", "draining": "draining", "dead": "engine_dead"}
_RETRY = {"full": 1.0, "draining": 5.0}
_random = random.Random()
"""Of seeds that nobody chose: one of its own, which no library seeds."""


def fields_of(generation: Generation, grammars: list[int], adapter: tuple[int, bytes] | None) -> dict[str, Any]:
    """What `Loop.submit` is given beside the prompt. grammars: a handle for each choice. adapter: its slot and key."""
    sampling = generation.sampling
    fields: dict[str, Any] = {
        "max_tokens": generation.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": _random.getrandbits(64) if sampling.seed is None else sampling.seed % (1 << 64),
        "logit_bias": list(sampling.logit_bias.items()),
        "n": generation.n,
        "stop": list(generation.stop),
        "stop_after": generation.stop_after,
        "opening": generation.opening,
        "include_stop": generation.include_stop,
        "stop_token_ids": list(generation.stop_token_ids),
        "ignore_eos": generation.ignore_eos,
        "min_tokens": generation.min_tokens,
        "logprobs": generation.logprobs,
        "prompt_logprobs": generation.prompt_logprobs,
        "priority": generation.priority,
        "cache_salt": generation.cache_salt.encode("utf-8", "surrogatepass"),
        "grammars": grammars,
    }
    if adapter is not None:
        fields["adapter_slot"], fields["adapter_key"] = adapter
    if generation.thinking is not None:
        fields["thinking_budget"] = generation.thinking.budget
        fields["thinking_end"] = list(generation.thinking.end)
    return fields


def refused(refusal: Refusal, generation: Generation, context: int) -> Refused:
    """How an API tells it."""
    reason = refusal.reason
    details = {"n_prompt_tokens": len(generation.prompt), "n_ctx": context} if reason == "context" else {}
    return Refused(refusal.message, _STATUS.get(reason, 400), _CODE.get(reason), retry_after=_RETRY.get(reason), **details)


def delta_of(row: Row) -> tuple[int, Delta]:
    """The request's id, and what one of its choices gained. The fields of a row are a delta's, behind the id."""
    delta = Delta(*row[1:])
    if delta.logprobs is not None:
        delta.logprobs = [TokenLogprob(*each) for each in delta.logprobs]
    if delta.prompt_logprobs is not None:
        delta.prompt_logprobs = [TokenLogprob(*each) for each in delta.prompt_logprobs]
    return row[0], delta


def mute(delta: Delta) -> None:
    """Leaves of it what is about the prompt, and its end."""
    delta.tokens, delta.text, delta.pieces, delta.stop = [], "", [], None
    delta.logprobs = None if delta.logprobs is None else []
    if delta.finish in ("stop", "context"):
        delta.finish = "length"
