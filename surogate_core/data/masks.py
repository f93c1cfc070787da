"""Which tokens are trained on. The whole rendered conversation is tokenized once; labels come from character offsets.

So a marker that tokenizes differently in its surroundings cannot be missed, and the ids are those that a server sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import DataError
from .formats import Example
from .template import ChatTemplate, Message
from .turns import Turn, TurnFinder

TRAIN_ON = ("assistant", "last", "all", "completion")


class TokenizerLike(Protocol):
    """What this package needs of a tokenizer. Offsets are characters [start, end) of the text."""

    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Encoded:
    """One tokenized row.

    ids: i32[n]. weights: f32[n], how much token i counts as a target (0: masked). offsets: [n] of characters in `text`.
    """

    text: str
    ids: np.ndarray
    weights: np.ndarray
    offsets: list[tuple[int, int]]

    @property
    def num_supervised(self) -> int:
        """Targets: the first token of a document is nobody's next token."""
        return int(np.count_nonzero(self.weights[1:]))


@dataclass(frozen=True)
class _Span:
    start: int
    end: int
    weight: float


class Encoder:
    """Turns examples into ids and label weights.

    template: None is enough for rows of plain text. train_on: `assistant` (every assistant turn), `last` (those after
    the last user message), `completion` (from where the row says the completion starts, else the last assistant turn),
    `all`. Plain text is trained on whole; a prompt/completion row of strings from its completion on, unless `all`.
    empty_think: train on thought-less think blocks that the template itself writes. system_prompt: put before
    conversations that have none.
    """

    def __init__(self, tokenizer: TokenizerLike, template: ChatTemplate | None, train_on: str = "assistant",
                 empty_think: bool = False, system_prompt: str | None = None) -> None:
        if train_on not in TRAIN_ON:
            raise DataError(f"train_on is {train_on!r}", f"Known: {', '.join(TRAIN_ON)}.")
        self._tokenizer, self._template, self._train_on = tokenizer, template, train_on
        self._finder = TurnFinder(template, empty_think) if template is not None else None
        self._system_prompt = system_prompt
        self._adds_bos = adds_bos(tokenizer)

    def encode(self, example: Example) -> Encoded:
        """Raises DataError with the reason where no right mask can be made for this row."""
        if example.messages is None:
            return self._text(example)
        return self._conversation(example)

    def _text(self, example: Example) -> Encoded:
        text = example.text or ""
        start = example.completion_start if example.completion_start and self._train_on != "all" else 0
        return self._tokenize(text, [_Span(start, len(text), 1.0)], 0.0, eos_weight=1.0)

    def _conversation(self, example: Example) -> Encoded:
        if self._finder is None or self._template is None:
            raise DataError("the tokenizer has no chat template, and this row is a conversation",
                            "Set `chat_template` (for instance `chatml`).")
        messages = list(example.messages or [])
        start = example.completion_start
        if self._system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._system_prompt})
            start = start + 1 if start is not None else None
        shown = [{key: value for key, value in message.items() if key not in ("train", "weight")}
                 for message in messages]
        weights = message_weights(messages, self._train_on, start)
        if self._train_on == "all" and all(weights[i] == 1 for i, m in enumerate(messages) if m["role"] == "assistant"):
            text, turns = self._template.render(shown, example.tools, **example.template_variables), []
        else:
            text, turns = self._finder.find(shown, example.tools, **example.template_variables)
        spans = [_Span(turn.start, turn.end, weights[turn.message]) for turn in turns]
        return self._tokenize(text, spans, 1.0 if self._train_on == "all" else 0.0,
                              eos_weight=self._missing_eos(messages, turns, weights))

    def _missing_eos(self, messages: list[Message], turns: list[Turn], weights: list[float]) -> float | None:
        """A template that ends no turn would teach a model never to stop: the last answer then gets the EOS token."""
        last = len(messages) - 1
        if turns and turns[-1].message == last and not turns[-1].terminated:
            return weights[last]
        return None

    def _tokenize(self, text: str, spans: Sequence[_Span], elsewhere: float, eos_weight: float | None) -> Encoded:
        ids, offsets = encode_rendered(self._tokenizer, text, self._adds_bos)
        weights = _token_weights(text, offsets, spans, elsewhere)
        eos = self._tokenizer.eos_token_id
        if eos_weight is not None and eos is not None and (not ids or ids[-1] != eos):
            ids, offsets, weights = [*ids, eos], [*offsets, (len(text), len(text))], [*weights, eos_weight]
        return Encoded(text, np.asarray(ids, np.int32), np.asarray(weights, np.float32), offsets)


def adds_bos(tokenizer: TokenizerLike) -> bool:
    """Whether this tokenizer puts its BOS token before plain text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]


def encode_rendered(tokenizer: TokenizerLike, text: str,
                    with_bos: bool | None = None) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and offsets with exactly one BOS where the tokenizer uses one: the template's, or one put before the text.

    Serving encodes its prompts with this function too. with_bos: the result of `adds_bos`, where the caller has it.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    bos = tokenizer.bos_token_id
    if (adds_bos(tokenizer) if with_bos is None else with_bos) and ids[:1] != [bos]:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    return list(ids), list(offsets)


def message_weights(messages: Sequence[Message], train_on: str, completion_start: int | None = None) -> list[float]:
    """How much each message counts: `train_on` first, then the message's own `train` and `weight`.

    Raises DataError where a message that is not the assistant's asks for what only a turn can have.
    """
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    first = {"assistant": 0, "all": 0, "last": users[-1] if users else 0,
             "completion": completion_start if completion_start is not None else assistants[-1] if assistants else 0}
    out = []
    for index, message in enumerate(messages):
        train, weight = message.get("train"), message.get("weight")
        if message["role"] != "assistant":
            if (train is True and train_on != "all") or (train is False and train_on == "all"):
                raise DataError(f"messages[{index}] ({message['role']}): train is {train}; only an assistant's turn "
                                f"can be chosen apart from `train_on: {train_on}`")
            out.append(1.0 if train_on == "all" else 0.0)
            continue
        counted = train if train is not None else index >= first[train_on]
        out.append(float(weight if weight is not None else 1.0) if counted else 0.0)
    return out


def _token_weights(text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[_Span],
                   elsewhere: float) -> list[float]:
    """A token counts with a span when it lies in it, or when it shares more than white space with it."""
    weights = []
    at = 0
    for start, end in offsets:
        while at < len(spans) and spans[at].end <= start:
            at += 1
        weight = elsewhere if end > start else 0.0
        if at < len(spans) and end > start and end > spans[at].start:
            span = spans[at]
            inside = start >= span.start and end <= span.end
            if inside or text[max(start, span.start):min(end, span.end)].strip():
                weight = span.weight
        weights.append(weight)
    return weights


def explain_mask(encoded: Encoded, tokenizer: TokenizerLike) -> list[tuple[str, bool]]:
    """(text of the token, trained on) for every token of a row; what `surogate data inspect` shows."""
    rows = []
    shown = 0
    for token, weight, (start, end) in zip(encoded.ids, encoded.weights, encoded.offsets, strict=True):
        if end > start:
            piece, shown = encoded.text[max(shown, start):end], max(shown, end)
        else:
            piece = tokenizer.decode([int(token)])
        rows.append((piece, bool(weight > 0)))
    return rows


def print_mask(console: Any, encoded: Encoded, tokenizer: TokenizerLike) -> None:
    """Prints the row on a rich console: what is trained on in green, the rest dim, and the counts. Where there are no
    colours, in a file or a pipe, what is trained on stands between ⟦ and ⟧."""
    from rich.text import Text

    line = Text()
    inside = False
    for piece, on in [*explain_mask(encoded, tokenizer), ("", False)]:
        if on != inside and not console.color_system:
            line.append("⟦" if on else "⟧")
        inside = on
        line.append(piece, style="bold green" if on else "dim")
    console.print(line)
    console.print(Text(f"{encoded.num_supervised} of {len(encoded.ids)} tokens are trained on", style="italic"))
