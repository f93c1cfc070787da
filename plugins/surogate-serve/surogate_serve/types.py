"""What the HTTP face, the parsers and the engine hand to each other. Every API's request becomes a `Generation`; what comes
back are `Delta`s (tokens and text of one choice), which a parser turns into `Event`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
"""stop: a stop token, a stop string, or a grammar that is complete; length: max_tokens; context: the model's context is
full; error: the engine could not go on with this request (`Delta.error` says why)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the largest logit (the lowest id on a tie). top_k 0: all. Order:
    penalties, logit_bias, grammar mask, temperature, top_k, top_p, min_p. seed None: drawn for the request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """A budget of reasoning tokens: after ``budget`` tokens without ``end`` the engine writes ``end`` itself. Only where
    reasoning begins in the prompt or is opened by the model as its first token."""

    budget: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to the engine. prompt: token ids. max_tokens: of an answer, None for what fits; 0: the prompt
    is computed and nothing is told but its end. n: choices, which share
    the prompt. stop: strings, matched on the answer's text, and only after ``stop_after`` (a token id) was generated where that
    is given. logprobs: how many alternatives beside the token itself (0..20), None for no log-probabilities at all.
    prompt_logprobs: also those of the prompt's tokens. cache_salt: prompts share cached blocks only under one salt. adapter:
    name, None for the base. grammar: what `Grammars.compile` made, None for free text."""

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_after: int | None = None
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    grammar: Any = None
    thinking: Thinking | None = None
    opening: int | None = None
    """The token with which the model may begin reasoning as its first; where it begins with another, there is no
    reasoning, and `stop_after` and `thinking` mean nothing. None: the prompt began it."""
    watchers: list[Callable[[int], None]] = field(default_factory=list, repr=False, compare=False)
    """Called by `end`; those who generate put themselves here while they do."""

    def end(self, choice: int) -> None:
        """No more of a choice is wanted: whoever reads has found its end. What still comes of it means nothing."""
        for watcher in self.watchers:
            watcher(choice)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of one token, from the raw logits. top: (token id, log-probability), best first. Finite numbers; None only for the
    first token of a prompt."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """What one choice gained. text: what is certain by now of the tokens so far (whole characters, nothing that may still
    be part of a stop string). pieces: (token id, its text) of ``text`` in order, for parsers; text that completes a character
    or was held back belongs to the token that completed it. finish: on the last delta of a choice only. stop: the stop string,
    or the id of the stop token that is not among the model's own."""

    choice: int
    tokens: list[int]
    text: str
    pieces: list[tuple[int, str]]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    queued: float | None = None
    """Seconds that its request waited until the engine began with it; None before that."""


Take = Callable[[list[Delta]], Any]
"""Is given what the choices of a request gained, as it comes, in its event loop's thread. True: nothing more is wanted."""


class Refused(Exception):
    """A request that is not taken, or ends in an error. status: of HTTP. code: as OpenAI's `error.code` (such as
    "context_length_exceeded", "model_not_found"), or None. param: the field that is wrong. retry_after: seconds."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None,
        retry_after: float | None = None, **details: Any,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param, self.retry_after = message, status, code, param, retry_after
        self.details = details
        """More fields of the error's body, such as n_prompt_tokens and n_ctx."""


# -- an answer, parsed ---------------------------------------------------------------------------------------------------


# Those of text are made for every token, and a frozen one takes twice as long to make.


@dataclass(slots=True)
class Reasoning:
    choice: int
    text: str


@dataclass(slots=True)
class Content:
    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """index: 0, 1, ... within the choice."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the call's arguments; all fragments of a complete call together are one JSON object."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    choice: int
    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice. reason "tool_calls": all its calls are complete and the model ended its turn."""

    choice: int
    reason: Literal["stop", "length", "context", "tool_calls", "cancelled", "error"]
    stop: str | int | None = None
    error: str | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0


Event = Union[Reasoning, Content, ToolCallBegin, ToolCallArguments, ToolCallEnd, Finished]


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


# -- a prompt --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. tail: the text of the prompt after the last turn began, from which a parser takes its first
    state (a template may have opened the reasoning already)."""

    tokens: Sequence[int]
    tail: str = ""
