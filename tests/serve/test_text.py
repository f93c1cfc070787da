"""Text from tokens: whole characters and stop strings, beside a slow oracle that sees the whole text at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surogate_core.engine import EngineError
from surogate_core.engine.library import native

Piece = tuple[int, str]
SMILE, FAMILY = "\N{GRINNING FACE}", "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def stream(tokens: list[bytes], stops: list[str] | None = None, special: tuple[int, ...] = (), **options: Any) -> Any:
    """A stream over a tokenizer whose token i is tokens[i]."""
    tokenizer = native().Tokenizer(tokens, bytes(i in special for i in range(len(tokens))))
    return native().TextStream(tokenizer, None if stops is None else native().StopStrings(stops), **options)


def fed(text: Any, count: int) -> list[list[Piece]]:
    """What each of the tokens 0, 1, ... brought out, and what the end brought out; up to a stop string."""
    result = []
    for token in range(count):
        result.append(text.feed([token]))
        if text.stop >= 0:
            return result
    return [*result, text.finish()]


def together(steps: list[list[Piece]]) -> str:
    return "".join(text for step in steps for _, text in step)


def certain_text(data: bytes) -> str:
    """What ``data`` decodes to whatever bytes follow it. (Python's own incremental decoder waits longer than it must,
    such as for the third byte of a surrogate.)"""
    follow = [b"A", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80\x80"]
    return os.path.commonprefix([(data + more).decode("utf-8", "replace") for more in follow])


# -- characters --------------------------------------------------------------------------------------------------------


def test_an_emoji_of_four_tokens_comes_out_whole() -> None:
    tokens = [b"a", *(bytes([byte]) for byte in SMILE.encode()), b"b"]
    assert fed(stream(tokens), 6) == [[(0, "a")], [(1, "")], [(2, "")], [(3, "")], [(4, SMILE)], [(5, "b")], []]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_no_cut_of_a_text_makes_a_replacement_character(size: int) -> None:
    data = f"né {FAMILY} 漢字{SMILE}!".encode()
    tokens = [data[i : i + size] for i in range(0, len(data), size)]
    steps = fed(stream(tokens), len(tokens))
    assert together(steps) == data.decode()
    assert all(len(step) == 1 for step in steps[:-1])
    assert steps[-1] == []


def test_bytes_that_are_no_character_are_replaced_where_that_is_certain() -> None:
    tokens = [b"\xe2", b"\x82x", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf0\x9f\x98"]
    assert fed(stream(tokens), 6) == [
        [(0, "")],
        [(1, REPLACEMENT + "x")],  # two bytes of a character that does not come: one
        [(2, REPLACEMENT)],
        [(3, REPLACEMENT * 2)],  # overlong
        [(4, REPLACEMENT * 3)],  # a surrogate
        [(5, "")],
        [(5, REPLACEMENT)],  # what the end left incomplete
    ]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.binary(max_size=5) | st.text(max_size=2).map(lambda text: text.encode()), max_size=12))
def test_bytes_are_decoded_as_soon_as_they_can_be(tokens: list[bytes]) -> None:
    text = stream(tokens)
    for index in range(len(tokens)):
        before, now = (certain_text(b"".join(tokens[:end])) for end in (index, index + 1))
        assert text.feed([index]) == [(index, now[len(before) :])]
    data = b"".join(tokens)
    assert certain_text(data) + "".join(piece for _, piece in text.finish()) == data.decode("utf-8", "replace")


def test_every_sequence_of_bytes_that_may_be_a_character() -> None:
    """All pairs, and the borders of the longer ones, against Python."""
    firsts = [0x7F, 0x80, 0xBF, *range(0xC0, 0x100)]
    borders = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xE2, 0xFF]
    tokens = [bytes([first, second]) for first in firsts for second in range(256)]
    tokens += [bytes([a, b, c, d]) for a in firsts for b in borders for c in borders for d in (0x41, 0x80)]
    tokenizer = native().Tokenizer(tokens, bytes(len(tokens)))
    for index, token in enumerate(tokens):
        text = native().TextStream(tokenizer)
        steps = [text.feed([index]), text.finish()]
        assert together(steps) == token.decode("utf-8", "replace"), token


# -- special tokens, and tokens without text ---------------------------------------------------------------------------


def test_special_tokens_have_text_only_where_it_is_asked_for() -> None:
    tokens = [b"a", b"<end>", b"b"]
    assert fed(stream(tokens, special=(1,)), 3) == [[(0, "a")], [(1, "")], [(2, "b")], []]
    assert fed(stream(tokens, special=(1,), special_text=True), 3) == [[(0, "a")], [(1, "<end>")], [(2, "b")], []]


def test_a_token_may_be_fed_without_its_text() -> None:
    text = stream([b"a", b"stop"])
    assert text.feed([0]) + text.feed([1], with_text=False) + text.finish() == [(0, "a"), (1, "")]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    text = stream([b"a"])
    assert text.feed([0, 1, 2**31 - 1, -1]) == [(0, "a"), (1, ""), (2**31 - 1, ""), (-1, "")]


def test_a_marker_comes_behind_all_text_before_it() -> None:
    """A special token while "ab" of the stop string "abc" is held back waits for its turn."""
    tokens = [b"xab", b"<call>", b"d", b"c"]
    assert fed(stream(tokens[:3], ["abc"], special=(1,)), 3) == [[], [], [(0, "xab"), (1, ""), (2, "d")], []]
    text = stream(tokens, ["abc"], special=(1,))
    assert text.feed([0, 1, 3]) == [(0, "x")]  # one text: the marker lies within the stop string
    assert text.stop == 0


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_leaks_nothing() -> None:
    tokens = [b"x", b"a", b"b", b"cd"]
    assert fed(stream(tokens, ["abc"]), 4) == [[(0, "x")], [], [], []]
    assert fed(stream(tokens, ["abc"], include_stop=True), 4) == [[(0, "x")], [], [], [(1, "a"), (2, "b"), (3, "c")]]


def test_what_was_held_back_comes_when_it_is_no_stop_string() -> None:
    tokens = [b"a", b"ab", b"d", b"ab"]
    assert fed(stream(tokens, ["aabc", "abc"]), 4) == [[], [], [(0, "a"), (1, "ab"), (2, "d")], [], [(3, "ab")]]


def test_the_stop_string_that_ends_first_counts_and_then_the_longest() -> None:
    text = stream([b"xabcde"], ["abcde", "bc", "abc", "abc"])
    assert text.feed([0]) == [(0, "x")]
    assert text.stop == 2


def test_an_emoji_as_a_stop_string_and_one_that_only_begins_like_it() -> None:
    other = "\N{GRINNING FACE WITH SMILING EYES}"
    tokens = [SMILE.encode()[:2], SMILE.encode()[2:], other.encode()[:3], other.encode()[3:]]
    assert fed(stream(tokens, [other]), 4) == [[(0, "")], [(1, SMILE)], [(2, "")], []]
    assert fed(stream(tokens, [SMILE]), 4) == [[(0, "")], []]


def test_a_stop_string_in_the_reasoning_is_none() -> None:
    tokens = [b"think END", b"</think>", b"E", b"ND"]
    text = stream(tokens, ["END"], special=(1,), stop_after=1)
    assert fed(text, 4) == [[(0, "think END")], [(1, "")], [], []]
    assert text.stop == 0
    tokens = [b"E", b"</think>", b"ND"]
    assert together(fed(stream(tokens, ["END"], special=(1,), stop_after=1), 3)) == "END"  # begins before it


def test_without_its_opening_there_is_no_reasoning() -> None:
    opened = [b"<think>", b"END", b"</think>", b"x", b"END"]
    text = stream(opened, ["END"], special=(0, 2), stop_after=2, opening=0)
    assert together(fed(text, 5)) == "ENDx" and text.stop == 0
    text = stream([b"an END", b"</think>"], ["END"], special=(1,), stop_after=1, opening=7)
    assert together(fed(text, 2)) == "an " and text.stop == 0


def test_a_replacement_character_at_the_end_may_complete_a_stop_string() -> None:
    text = stream([b"a\xe2"], ["a" + REPLACEMENT])
    assert fed(text, 1) == [[], []]
    assert text.stop == 0


def test_nothing_follows_an_end() -> None:
    text = stream([b"ab"], ["a"])
    assert text.feed([0]) == []
    assert text.finish() == []
    with pytest.raises(EngineError, match="token 0 was fed to a text that has ended"):
        text.feed([0])
    text = stream([b"ab"])
    assert text.feed([0]) + text.finish() + text.finish() == [(0, "ab")]
    with pytest.raises(EngineError, match="has ended"):
        text.feed([0])


def test_misuse_is_told() -> None:
    with pytest.raises(EngineError, match="stop string 1 is empty"):
        native().StopStrings(["a", ""])
    with pytest.raises(EngineError, match="2 flags and 2 offsets"):
        native().Tokenizer([b"a"], bytes(2))


# -- beside the oracle -------------------------------------------------------------------------------------------------


@dataclass
class Case:
    tokens: list[bytes]
    stops: list[str]
    include_stop: bool
    stop_after: int


class Oracle:
    """Quadratic and worse, on whole strings."""

    def __init__(self, case: Case) -> None:
        self.case = case
        count = len(case.tokens)
        self.text = b"".join(case.tokens).decode("utf-8", "replace")
        self.ends = [len(certain_text(b"".join(case.tokens[: i + 1]))) for i in range(count)]
        self.from_token = case.stop_after + 1  # how many tokens there must be before stop strings count
        self.begin = [0, *self.ends, len(self.text)][min(self.from_token, count + 1)]
        self.stop, self.stop_end = self.first_stop()

    def first_stop(self) -> tuple[int, int]:
        for end in range(self.begin + 1, len(self.text) + 1):
            found = [stop for stop in self.case.stops if self.text[self.begin : end].endswith(stop)]
            if found:
                return self.case.stops.index(max(found, key=len)), end
        return -1, len(self.text)

    def final(self) -> str:
        if self.stop < 0 or self.case.include_stop:
            return self.text[: self.stop_end]
        return self.text[: self.stop_end - len(self.case.stops[self.stop])]

    def certain(self, count: int) -> int:
        """How many of the first ``count`` tokens are out, where no stop string has been completed."""
        end = self.ends[count - 1]
        if count >= self.from_token:
            tail = self.text[self.begin : end]
            held = [size for stop in self.case.stops for size in range(1, len(stop)) if tail.endswith(stop[:size])]
            end -= max(held, default=0)
        return sum(1 for other in self.ends[:count] if other <= end)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alphabet = st.sampled_from(["a", "b", "ab", "é", SMILE, REPLACEMENT])
    data = "".join(draw(st.lists(alphabet, max_size=24))).encode()
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(min_size=1, max_size=2)) + data[at:]
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=16)))
    tokens = [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]
    text = data.decode("utf-8", "replace")
    begins = st.integers(0, max(len(text) - 1, 0))
    within = st.tuples(begins, st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = draw(st.lists(within | st.lists(alphabet, min_size=1, max_size=5).map("".join), max_size=4))
    stop_after = draw(st.just(-1) | st.integers(0, len(tokens)))
    return Case(tokens, [stop for stop in stops if stop], draw(st.booleans()), stop_after)


@settings(max_examples=500, deadline=None)
@example(Case([b"aaa"], ["aaaa"], False, -1))
@example(Case([b"a", b"a", b"b"], ["ab"], True, -1))
@given(cases())
def test_a_stream_is_what_the_whole_text_says(case: Case) -> None:
    oracle = Oracle(case)
    text = stream(case.tokens, case.stops, include_stop=case.include_stop, stop_after=case.stop_after)
    steps = fed(text, len(case.tokens))
    assert text.stop == oracle.stop
    assert together(steps) == oracle.final()
    out: list[Piece] = []
    for count, step in enumerate(steps, start=1):
        out += step
        assert oracle.final().startswith("".join(piece for _, piece in out))
        if count < len(steps):
            certain = oracle.certain(count)
            begins = [0, *oracle.ends]
            assert out == [(i, oracle.text[begins[i] : oracle.ends[i]]) for i in range(certain)]
    assert [token for token, _ in out] == sorted(token for token, _ in out)


def test_long_texts_with_hard_stop_strings_take_linear_time() -> None:
    """A stop string that nearly is there at every byte, and many that share beginnings: a byte costs no more."""
    size = 200_000
    stops = ["a" * 2000 + "b"] + ["a" * i + "c" for i in range(1, 200)]
    text = stream([b"a", b"ab"], stops)
    out = text.feed([0] * size)
    assert len(out) == size - 2000
    assert text.feed([1]) == [(0, "a")]  # one more than what was held back lies before it
    assert text.stop == 0


def test_what_is_held_back_moves_to_the_front_of_its_buffer() -> None:
    """Something is held back at every token of a long text, so that the buffer is never empty."""
    text = stream([b"ba" * 50], ["ac"])
    out = text.feed([0] * 1000) + text.finish()
    assert out == [(0, "ba" * 50)] * 1000
