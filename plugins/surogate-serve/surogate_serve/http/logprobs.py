"""Log-probabilities as OpenAI's two generating APIs write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..types import TokenLogprob

LOWEST = -9999.0
"""What OpenAI documents for a token that is as good as impossible; infinity is no JSON."""


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = lru_cache(maxsize=65536)(tokenizer.token_bytes)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes(token)

    def text_of(self, token: int) -> str:
        """A token that is part of a character is told by its bytes, so that two of them are told apart."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float:
    """At least `LOWEST`; NaN too is as good as impossible."""
    return logprob if logprob is not None and logprob >= LOWEST else LOWEST


def chat_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        raw = texts.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    return [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for each in logprobs
    ]


class CompletionLogprobs:
    """The four lists of a completion, which grow with its text. offset: where the first token's text begins."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts, self._offset = texts, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lists(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the tokens that came now. The first token of a prompt has neither a log-probability nor alternatives. The
        token itself is among its alternatives, as its likelihood is asked for there."""
        texts = self._texts
        tokens, values, tops, offsets = [], [], [], []
        for each in logprobs:
            text = texts.text_of(each.token)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(texts.bytes_of(each.token)))
            if each.logprob is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(each.logprob))
            top: dict[str, float] = {}
            for token, logprob in (*each.top, (each.token, each.logprob)):
                top.setdefault(texts.text_of(token), finite(logprob))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
