"""Grammars that hold answers to a form: compiled beside the engine's loop, followed token by token inside it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from .constraints import Constraint, lark
from .parsers import Parser
from .types import Refused

COMPILE_LIMIT = 5.0
"""Seconds that a request waits for its grammar."""
MASK_LIMIT = 0.25
"""Seconds that a grammar's first mask may take: the engine's loop waits for masks."""
WAITING_LIMIT = 64
"""Grammars that may wait to be compiled."""
KEPT = 128
"""Compiled grammars that are kept for other requests."""

_SIDE_BY_SIDE = 4  # masks, from which on threads are worth their start
_EVERY_TOKEN = 0xFFFFFFFF  # a word of a mask


class GrammarTokenizer(Protocol):
    """What is needed of a tokenizer; the core's has it."""

    bos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    added_tokens: dict[str, int]
    special_tokens: frozenset[str]

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, and when it begins. opening: the token with which the model may open reasoning first, None
    where it may not. in_reasoning: the prompt opened it already. closing: what ends reasoning, as a token or as
    bytes."""

    matcher: Any = field(repr=False)
    opening: int | None = None
    in_reasoning: bool = False
    closing: int | bytes | None = None


class Grammars:
    """The grammars of one model. `compile` makes one, `open` begins it for choices, `fill` and `accept` are what the
    engine's loop calls, `release` ends it."""

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        vocab: int,
        token_bytes: Sequence[bytes] | None = None,
        parser: Parser | None = None,
    ) -> None:
        """vocab: the model's, that is, of the masks. token_bytes: of every token, where they are known already.
        parser: the model's own; its markers are tokens of their own in grammars too."""
        self._tokenizer, self._vocab, self._token_bytes, self._parser = tokenizer, vocab, token_bytes, parser
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._own: _Vocabulary | None = None
        self._waiting = 0
        self._handles = itertools.count(1)
        self._walks: dict[int, _Walk] = {}
        self._executor: LLExecutor | None = None

    # -- for requests -------------------------------------------------------------------------------------------------

    async def compile(
        self, constraint: Constraint, param: str, parser: Parser | None = None, tail: str = ""
    ) -> Grammar:
        """A grammar for a request. param: the request's field, which errors name. parser, tail: of the answer; where
        it may begin with reasoning, the grammar holds behind that. Raises Refused: 400 for a constraint that is
        malformed, too large or takes too long, 429 where too many wait."""
        if self._own is None:
            await asyncio.to_thread(self.prepare)
        job = self._begin(constraint, param, parser, tail)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), COMPILE_LIMIT)
        except TimeoutError:
            raise _too_slow(param) from None

    def prepare(self) -> None:
        """Reads the vocabulary, once; else the first request waits for it. Takes seconds for large ones, in which the
        library keeps Python's lock."""
        self._vocabulary()

    def open(self, grammar: Grammar, choices: int = 1) -> list[int]:
        """Handles for the choices of a request, each at the grammar's beginning."""
        vocabulary = self._vocabulary()
        handles = list(itertools.islice(self._handles, choices))
        self._walks.update((handle, _Walk(grammar, vocabulary)) for handle in handles)
        return handles

    def release(self, handles: Sequence[int]) -> None:
        """The choices are over."""
        for handle in handles:
            self._walks.pop(handle, None)

    def close(self) -> None:
        """Nothing is compiled any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- for the engine's loop ----------------------------------------------------------------------------------------

    def fill(self, handles: Sequence[int], rows: np.ndarray) -> None:
        """rows: uint32 [len(handles), ceil(vocab / 32)]; bit v % 32 of word v // 32 is set where token v may come
        next. Released handles: every token, since a step may be on its way when its reader leaves. Raises RuntimeError
        where a grammar has come to an error."""
        walks = [self._walks.get(handle) for handle in handles]
        held = [(walk.matcher, i) for i, walk in enumerate(walks) if walk is not None and not walk.is_free]
        row_bytes = rows.shape[1] * rows.itemsize
        if len(held) >= _SIDE_BY_SIDE:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(held, rows.ctypes.data, row_bytes, len(handles))
        else:
            for matcher, i in held:
                matcher.unsafe_compute_mask_ptr(rows.ctypes.data + i * row_bytes, row_bytes)
        for walk, row in zip(walks, rows, strict=True):
            if walk is None:
                row[:] = _EVERY_TOKEN
            else:
                walk.finish_row(row)

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The choices went on with these tokens. For each: 0, it goes on (or was released); 1, the answer is complete; -1,
        the grammar does not allow the token."""
        walks = map(self._walks.get, handles)
        return [0 if walk is None else walk.accept(token) for walk, token in zip(walks, tokens, strict=True)]

    # -- compiling ----------------------------------------------------------------------------------------------------

    def _begin(self, constraint: Constraint, param: str, parser: Parser | None, tail: str) -> Future[Grammar]:
        text = _lark(constraint, param, parser)
        with self._lock:
            if self._waiting >= WAITING_LIMIT:
                raise Refused("too many grammars wait to be compiled", 429, "rate_limit_exceeded", param, retry_after=1)
            self._waiting += 1
        job = self._pool.submit(lambda: _placed(self._compiled(text, param), parser, tail))
        job.add_done_callback(self._compiled_one)
        return job

    def _compiled_one(self, job: Future[Grammar]) -> None:
        with self._lock:
            self._waiting -= 1

    def _compiled(self, text: str, param: str) -> Any:
        """The matcher of a grammar's text, at its beginning."""
        with self._lock:
            matcher = self._kept.get(text)
            if matcher is not None:
                self._kept.move_to_end(text)
                return matcher
        vocabulary = self._vocabulary()
        # Less fuel than the library gives: nested repetitions would burn seconds of it.
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=200_000)
        matcher = LLMatcher(vocabulary.tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        if matcher.is_error():
            raise Refused(f"{param}: {_words(matcher.get_error())}", param=param)
        started = time.monotonic()
        matcher.compute_bitmask()
        if matcher.is_error():
            raise Refused(f"{param}: {_words(matcher.get_error())}", param=param)
        if time.monotonic() - started > MASK_LIMIT:
            raise Refused(
                f"{param}: the grammar is too complex: every token of it would hold up all answers", param=param
            )
        with self._lock:
            self._kept[text] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _vocabulary(self) -> _Vocabulary:
        with self._lock:
            if self._own is None:
                self._own = _Vocabulary(self._tokenizer, self._vocab, self._token_bytes, self._parser)
                self._token_bytes = None
            return self._own


def _lark(constraint: Constraint, param: str, parser: Parser | None) -> str:
    """The grammar's text. A schema comes from outside and may have anything anywhere."""
    try:
        text = lark(constraint, param, parser)
        text.encode()
    except UnicodeEncodeError:
        raise Refused(f"{param}: text that is not Unicode (a lone surrogate)", param=param) from None
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        raise Refused(f"{param}: this is not a JSON schema", param=param) from None
    return text


def _too_slow(param: str) -> Refused:
    return Refused(f"{param}: the grammar takes more than {COMPILE_LIMIT:g} s to compile", param=param)


def _words(error: str) -> str:
    """An error of the library in one line."""
    return " ".join(error.split("<state>")[0].split())[:300]


def _placed(matcher: Any, parser: Parser | None, tail: str) -> Grammar:
    """The grammar behind the reasoning that the answer may begin with."""
    if parser is None or parser.format.reasoning is None:
        return Grammar(matcher)
    opening, closing = parser.format.reasoning
    end = parser.token_ids.get(closing, closing.encode())
    if parser.opens_reasoning(tail):
        return Grammar(matcher, in_reasoning=True, closing=end)
    if closing in tail:  # reasoning was switched off by the prompt
        return Grammar(matcher)
    return Grammar(matcher, opening=parser.token_ids.get(opening), closing=end)


class _Vocabulary:
    """A tokenizer as the grammar library needs it, and the rows of masks that are the same for all grammars."""

    def __init__(
        self, tokenizer: GrammarTokenizer, vocab: int, token_bytes: Sequence[bytes] | None, parser: Parser | None
    ) -> None:
        markers = set(parser.token_ids) if parser is not None else set()
        special = [number for text, number in tokenizer.added_tokens.items()
                   if number < vocab and (text in tokenizer.special_tokens or text in markers)]  # fmt: skip
        known = (
            list(token_bytes[:vocab]) if token_bytes is not None else [tokenizer.token_bytes(i) for i in range(vocab)]
        )
        self.tokens = known + [b""] * (vocab - len(known))
        self.encode = tokenizer.encode
        wrapped = TokenizerWrapper(_Tokens(tokenizer, self.tokens, sorted(special)))
        stops = [number for number in tokenizer.stop_token_ids if number < vocab]
        self.tokenizer = LLTokenizer(wrapped, eos_token=stops or None)
        newlines = [number for number, each in enumerate(self.tokens) if each in (b"\n", b"\n\n")]
        self.newline_tokens = frozenset(newlines)
        self.newlines = _row(newlines, vocab)
        # Reasoning is not the end: the answer that is asked for has to come.
        self.free = _row([number for number, each in enumerate(self.tokens) if each and number not in stops], vocab)


def _row(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """The row of a mask that allows these tokens."""
    row = np.zeros((vocab + 31) // 32, np.uint32)
    numbers = np.asarray(tokens, np.uint32)
    np.bitwise_or.at(row, numbers // 32, np.uint32(1) << numbers % 32)
    return row


class _Tokens:
    """What `TokenizerWrapper` reads."""

    def __init__(self, tokenizer: GrammarTokenizer, tokens: list[bytes], special: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = next(iter(tokenizer.stop_token_ids), 0)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text, parse_special=False)


class _Walk:
    """One choice on its way through a grammar. Before it may be reasoning, which is free, and newlines behind that."""

    def __init__(self, grammar: Grammar, vocabulary: _Vocabulary) -> None:
        self.matcher = grammar.matcher.deep_copy()
        self._grammar, self._vocabulary = grammar, vocabulary
        self._phase: Literal["first", "reasoning", "newlines", "held"] = "held"
        if grammar.in_reasoning:
            self._phase = "reasoning"
        elif grammar.opening is not None:
            self._phase = "first"
        self._end = b""  # of the reasoning's bytes, where its end is text
        self._newlines = 0

    @property
    def is_free(self) -> bool:
        return self._phase == "reasoning"

    def finish_row(self, row: np.ndarray) -> None:
        """Adds what the grammar does not know of. Raises RuntimeError where it is broken."""
        if self._phase == "reasoning":
            row[:] = self._vocabulary.free
            return
        if self.matcher.is_error():
            raise RuntimeError(f"a grammar failed: {_words(self.matcher.get_error())}")
        opening = self._grammar.opening
        if self._phase == "first" and opening is not None:
            row[opening // 32] |= np.uint32(1 << opening % 32)
        elif self._phase == "newlines":
            row |= self._vocabulary.newlines

    def accept(self, token: int) -> int:
        if self._phase == "reasoning":
            return self._accept_reasoning(token)
        if self._phase == "first" and token == self._grammar.opening:
            self._phase = "reasoning"
            return 0
        if self._phase == "newlines" and token in self._vocabulary.newline_tokens and self._newlines < 2:
            self._newlines += 1
            self._phase = "newlines" if self._newlines < 2 else "held"
            return 0
        self._phase = "held"
        return self._consume([token])

    def _accept_reasoning(self, token: int) -> int:
        closing = self._grammar.closing
        if isinstance(closing, int):
            if token == closing:
                self._phase = "newlines"
            return 0
        assert closing is not None
        self._end += self._vocabulary.tokens[token]
        before, found, after = self._end.partition(closing)
        if not found:
            self._end = before[-len(closing) :]
            return 0
        # The token that completed the end may go on behind it.
        self._phase = "newlines"
        rest = after.lstrip().decode(errors="replace")
        return self._consume(self._vocabulary.encode(rest)) if rest else 0

    def _consume(self, tokens: list[int]) -> int:
        if not self.matcher.consume_tokens(tokens):
            return -1
        return 1 if self.matcher.is_stopped() else 0
