"""Continued texts in the shapes of completions: whole, and as chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..types import Delta, Refused, TokenLogprob, Usage
from .chat_reply import usage_body
from .errors import openai_error
from .logprobs import CompletionLogprobs, TokenTexts
from .requests import FINGERPRINT, json_bytes
from .sse import DONE, Frames, data_frame, quoted

FINISH = {"stop": "stop", "length": "length", "context": "length"}
Read = Callable[[Callable[[int, list[Delta]], None]], Awaitable[None]]
"""Gives the deltas of several prompts to what it is called with, each with the prompt's place."""


@dataclass
class Choice:
    """One continuation as it goes on."""

    logprobs: CompletionLogprobs
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    of_tokens: list[TokenLogprob] = field(default_factory=list)
    started: bool = False
    finish: str | None = None
    stop: str | int | None = None

    def mean_logprob(self) -> float:
        values = [each.logprob for each in self.of_tokens if each.logprob is not None]
        return sum(values) / len(values) if values else float("-inf")


class Continued:
    """A prompt and its continuations. text: of the prompt, where it is echoed."""

    def __init__(self, tokens: list[int], text: str, echo: bool, choices: int, texts: TokenTexts) -> None:
        self.tokens, self.text, self.echo = tokens, text, echo
        self.choices = [Choice(CompletionLogprobs(texts)) for _ in range(choices)]
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached = 0


class CompletionReply:
    """One answer. keep: how many continuations of each prompt are told, the likeliest ones. no_tokens: nothing is
    generated beside what an echo asks for."""

    def __init__(
        self,
        *,
        id: str,
        model: str,
        created: int,
        prompts: list[Continued],
        keep: int,
        logprobs: bool,
        include_usage: bool,
        token_ids: bool,
        no_tokens: bool,
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._prompts, self._keep, self._logprobs = prompts, keep, logprobs
        self._include_usage, self._token_ids = include_usage, token_ids
        self.needs_engine = not no_tokens or (logprobs and prompts[0].echo)

    # -- whole -------------------------------------------------------------------------------------------------------

    async def whole(self, read: Read) -> dict[str, Any]:
        """The whole answer. Raises `Refused` where a continuation ended in an error."""

        def take(place: int, deltas: list[Delta]) -> None:
            for delta in deltas:
                self._take(self._prompts[place], delta)

        await read(take)
        choices = []
        for place, continued in enumerate(self._prompts):
            best = continued.choices
            if len(best) > self._keep:
                best = sorted(best, key=Choice.mean_logprob, reverse=True)[: self._keep]
            choices += [self._choice(place * self._keep + i, continued, choice) for i, choice in enumerate(best)]
        return self._head | {"choices": choices, "usage": usage_body(self._usage()), "system_fingerprint": FINGERPRINT}

    def _take(self, continued: Continued, delta: Delta) -> tuple[Choice, str, list[TokenLogprob]]:
        """Notes a delta; gives its choice, and text and log-probabilities of it with what an echo puts before the
        first."""
        if delta.finish is not None and delta.finish in ("error", "cancelled"):
            raise Refused(delta.error or "the engine could not finish this answer", 500, "generation_failed")
        choice = continued.choices[delta.choice]
        if delta.cached_tokens > continued.cached:
            continued.cached = delta.cached_tokens
        text, logprobs = delta.text, delta.logprobs or []
        if delta.prompt_logprobs is not None:
            continued.prompt_logprobs = delta.prompt_logprobs
        if not choice.started:
            choice.started = True
            if continued.echo:
                text, logprobs = continued.text + text, [*continued.prompt_logprobs, *logprobs]
        choice.text.append(text)
        choice.tokens += delta.tokens
        choice.of_tokens += logprobs
        if delta.finish is not None:
            choice.finish, choice.stop = FINISH[delta.finish], delta.stop
        return choice, text, logprobs

    def _choice(self, index: int, continued: Continued, choice: Choice) -> dict[str, Any]:
        if not self.needs_engine:
            choice.text, choice.finish = [continued.text], "length"
        body: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.logprobs.lists(choice.of_tokens) if self._logprobs else None,
            "finish_reason": choice.finish,
        }
        if choice.stop is not None:
            body["stop_reason"] = choice.stop
        if self._token_ids:
            body |= {"token_ids": choice.tokens, "prompt_token_ids": continued.tokens}
        return body

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(each.tokens) for each in self._prompts),
            cached_tokens=sum(each.cached for each in self._prompts),
            completion_tokens=sum(len(choice.tokens) for each in self._prompts for choice in each.choices),
        )

    # -- chunks ------------------------------------------------------------------------------------------------------

    async def stream(self, read: Read, out: Frames) -> None:
        """Puts the chunks. Raises `Refused` where a continuation ended in an error."""
        head = b"data: " + json_bytes(self._head | {"system_fingerprint": FINGERPRINT})[:-1]
        tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        begin = head + b',"choices":[{"index":'
        heads = [
            [begin + b'%d,"text":' % (place * self._keep + i) for i in range(self._keep)]
            for place in range(len(self._prompts))
        ]
        plain, detailed = b',"logprobs":null,"finish_reason":null' + tail, self._logprobs or self._token_ids
        unfinished = sum(len(each.choices) for each in self._prompts)

        def take(place: int, deltas: list[Delta]) -> None:
            nonlocal unfinished
            for delta in deltas:
                choice, text, logprobs = self._take(self._prompts[place], delta)
                rest = plain
                if delta.finish is not None:
                    unfinished -= 1
                    rest = self._rest(choice, delta, logprobs) + tail
                elif not (text or (self._logprobs and logprobs)):
                    continue
                elif detailed:
                    rest = self._rest(choice, delta, logprobs) + tail
                out.put(heads[place][delta.choice] + quoted(text) + rest)
            if unfinished:  # the last leave together with what follows them
                out.flush()

        await read(take)
        if not self.needs_engine:
            for of_prompt, continued in zip(heads, self._prompts, strict=True):
                for each in of_prompt:
                    out.put(each + quoted(continued.text) + b',"logprobs":null,"finish_reason":"length"' + tail)
        if self._include_usage:
            out.put(head + b',"choices":[],"usage":' + json_bytes(usage_body(self._usage())) + b"}\n\n")
        out.put(DONE)

    def _rest(self, choice: Choice, delta: Delta, logprobs: list[TokenLogprob]) -> bytes:
        """What follows the text."""
        lists = json_bytes(choice.logprobs.lists(logprobs)) if self._logprobs else b"null"
        rest = b',"logprobs":' + lists + b',"finish_reason":'
        rest += b"null" if delta.finish is None else json_bytes(choice.finish)
        if delta.finish is not None and choice.stop is not None:
            rest += b',"stop_reason":' + json_bytes(choice.stop)
        if self._token_ids:
            rest += b',"token_ids":' + json_bytes(delta.tokens)
        return rest

    def ending(self, refused: Refused) -> bytes:
        """What ends a stream that cannot go on."""
        return data_frame(json_bytes(openai_error(refused))) + DONE
