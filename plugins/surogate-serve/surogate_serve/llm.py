"""Offline batches: the served model without a server.

    with LLM("model.gguf") as llm:
        for answer in llm.chat([[{"role": "user", "content": "Hello"}]]):
            print(answer.text)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .engine import EngineOptions
from .models import ServedModel
from .types import Delta, FinishReason, Generation, Sampling, TokenLogprob

Text = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass
class Choice:
    """One answer. logprobs: of its tokens, where they were asked for. error: why finish is "error"."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if delta.finish is not None:
            self.finish, self.stop, self.error = delta.finish, delta.stop, delta.error


@dataclass
class Answer:
    """What one prompt gave: ``choices``, the first of which ``text`` and ``tokens`` are of."""

    prompt: Sequence[int]
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens


class LLM:
    """A model, for whoever calls. ``served`` is the model underneath."""

    def __init__(
        self, path: str | Path, adapters: Mapping[str, str | Path] | None = None,
        options: EngineOptions = EngineOptions(), chat_template: str | None = None,
    ) -> None:
        """path: a Hugging Face folder, a GGUF file, or a run's folder. adapters: PEFT folders by name, beside a run's own, which
        has the run's name. chat_template: as for `ServedModel.open`. Raises SurogateError."""
        self.served = ServedModel.open(path, options=options, adapters=adapters, chat_template=chat_template)

    def generate(
        self, prompts: Text | Iterable[Text], sampling: Sampling = Sampling(temperature=0.0), *, max_tokens: int | None = None,
        adapter: str | None = None, **fields: Any,
    ) -> list[Answer]:
        """Goes on after each of ``prompts`` (texts, or their token ids; one by itself is a batch of one), all side by side.

        adapter: by name; None: a run's own where ``path`` was a run's folder, else none. The base's own name
        (`served.name`) asks that without an adapter. fields: others of `Generation`, such as n, stop, logprobs. Raises
        `Refused` for a prompt that is not taken.
        """
        given = [prompts] if _is_one(prompts) else list(prompts)
        tokenizer = self.served.tokenizer
        ids = [tokenizer.encode(each, add_special_tokens=True) if isinstance(each, str) else list(each) for each in given]
        adapter = self._adapter(adapter)
        return self._answers([
            Generation(each, max_tokens=max_tokens, sampling=sampling, adapter=adapter, **fields) for each in ids
        ])

    def chat(
        self, conversations: Sequence[Message] | Iterable[Sequence[Message]], sampling: Sampling = Sampling(temperature=0.0), *,
        max_tokens: int | None = None, adapter: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None, **fields: Any,
    ) -> list[Answer]:
        """The assistant's next turn in each conversation (one by itself is a batch of one). template: variables of the chat
        template; the others as in `generate`. Raises `Refused`."""
        given = list(conversations)
        given = [given] if given and isinstance(given[0], Mapping) else given
        prompts = [self.served.render(each, list(tools) if tools else None, **(template or {})) for each in given]
        adapter = self._adapter(adapter)
        return self._answers([
            Generation(each.tokens, max_tokens=max_tokens, sampling=sampling, adapter=adapter, **fields) for each in prompts
        ])

    def close(self) -> None:
        self.served.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _adapter(self, name: str | None) -> str | None:
        name = self.served.main[0] if name is None else name
        return None if name == self.served.name else name

    def _answers(self, generations: Sequence[Generation]) -> list[Answer]:
        answers = [Answer(each.prompt, [Choice() for _ in range(each.n)]) for each in generations]
        for index, delta in self.served.generate_many(generations):
            answer = answers[index]
            answer.choices[delta.choice].take(delta)
            answer.cached_tokens = max(answer.cached_tokens, delta.cached_tokens)
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        return answers


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int))
