"""What a request can ask for: stops, limits, forced and forbidden tokens, log-probabilities, grammars."""

from __future__ import annotations

import math

import numpy as np
import pytest

from .conftest import CONTEXT, Client, Model, prompts

PROMPT = prompts(1, seed=1, low=30, high=30)[0]


@pytest.fixture
def client(tiny, opened):
    loop = tiny.open()
    opened.append(loop)
    return Client(loop)


def with_stops(tiny, opened, stops: list[int], **options) -> Client:
    loop = tiny.open(start=False, **options)
    opened.append(loop)
    loop.set_tokenizer(*tiny.tokens(), stops)
    loop.start()
    return Client(loop)


def first_of(tokens: list[int], at: int) -> int:
    """A token of an answer from ``at`` on that was not there before."""
    return next(i for i in range(at, len(tokens)) if tokens[i] not in tokens[:i])


# ---- stops


def test_the_models_own_stop(tiny, opened):
    wanted = tiny.greedy(PROMPT, 40)
    at = first_of(wanted, 3)
    client = with_stops(tiny, opened, [wanted[at]])
    answer = client.ask(PROMPT)
    assert answer.tokens == wanted[: at + 1] and (answer.finish, answer.stop) == ("stop", None)
    assert len(answer.pieces) <= at + 1 and not answer.pieces[-1:] == [(wanted[at], chr(wanted[at]))]  # without its text
    assert client.ask(PROMPT, ignore_eos=True, max_tokens=40).tokens == wanted
    again = client.ask(PROMPT, ignore_eos=True, stop_token_ids=[wanted[at]])
    assert again.tokens == wanted[: at + 1] and again.stop is None


def test_a_stop_token_of_the_request(tiny, client):
    wanted = tiny.greedy(PROMPT, 40)
    at = first_of(wanted, 4)
    answer = client.ask(PROMPT, stop_token_ids=[257, wanted[at]])
    assert answer.tokens == wanted[: at + 1] and (answer.finish, answer.stop) == ("stop", wanted[at])


def test_min_tokens(tiny, opened):
    wanted = tiny.greedy(PROMPT, 40)
    at = first_of(wanted, 3)
    client = with_stops(tiny, opened, [wanted[at]])
    answer = client.ask(PROMPT, min_tokens=at + 4)
    assert answer.tokens[:at] == wanted[:at] and answer.tokens[at] != wanted[at]
    assert len(answer.tokens) >= at + 4 and wanted[at] not in answer.tokens[: at + 3]
    assert client.ask(PROMPT, min_tokens=3).tokens == wanted[: at + 1]
    ignored = client.ask(PROMPT, min_tokens=at + 4, ignore_eos=True, max_tokens=at + 5)
    assert ignored.tokens == wanted[: at + 5]


def test_stop_strings(tiny, client):
    """On bytes that are characters: what comes out ends before the string, and nothing of it comes early."""
    bias = [(ord(letter), 50.0) for letter in "abc"]
    fields = dict(logit_bias=bias, temperature=1.0, seed=3, max_tokens=60)
    whole = client.ask(PROMPT, **fields)
    assert set(whole.text) <= set("abc") and len(whole.text) == 60
    stop = whole.text[20:23]
    answer = client.ask(PROMPT, stop=["zzz", stop], **fields)
    end = whole.text.index(stop)
    assert (answer.text, answer.finish, answer.stop) == (whole.text[:end], "stop", stop)
    assert len(answer.tokens) == end + 3
    included = client.ask(PROMPT, stop=[stop], include_stop=True, **fields)
    assert included.text == whole.text[: end + 3]
    after = client.ask(PROMPT, stop=[stop], stop_after=259, **fields)
    assert after.text == whole.text and after.finish == "length"


def test_text_is_that_of_the_tokens(client):
    answer = client.ask(PROMPT, temperature=2.0, seed=1, max_tokens=90)
    whole = b"".join(bytes([token]) for token in answer.tokens if token < 256)
    assert answer.text == whole.decode("utf-8", "replace")


# ---- limits


def test_nothing_but_the_prompt(client):
    answer = client.ask(PROMPT, max_tokens=0)
    assert (answer.tokens, answer.finish) == ([], "length")
    answer = client.ask([1] * CONTEXT, max_tokens=0, prompt_logprobs=True)
    assert (answer.tokens, answer.finish, len(answer.prompt_logprobs)) == ([], "length", CONTEXT)


def test_the_context_ends(tiny, client):
    answer = client.ask(PROMPT)
    assert answer.finish == "context" and len(answer.tokens) == CONTEXT - 30
    assert answer.tokens == tiny.greedy(PROMPT, CONTEXT - 30)
    assert client.ask([3] * (CONTEXT - 1), max_tokens=1_000_000_000).finish == "context"


# ---- what must and must not come


def test_thinking_ends_by_budget(tiny, client):
    wanted = tiny.greedy(PROMPT, 5)
    end = [250, 251, 252]
    answer = client.ask(PROMPT, thinking_budget=5, thinking_end=end, max_tokens=20, logprobs=0)
    assert answer.tokens[:8] == wanted + end
    assert answer.tokens[8:] == tiny.greedy(PROMPT + wanted + end, 12)
    assert len(answer.logprobs) == 20 and [row[1] for row in answer.logprobs[5:8]] == [0.0] * 3


@pytest.mark.parametrize("budget", [0, 1, 2, 17])
def test_forced_tokens_across_a_block_leave_the_cache_right(tiny, client, budget):
    wanted = tiny.greedy(PROMPT, budget) if budget else []
    end = [250, 251, 252]
    for _ in range(2):
        answer = client.ask(PROMPT, thinking_budget=budget, thinking_end=end, max_tokens=budget + 8)
        assert answer.tokens == [*wanted, *end, *tiny.greedy([*PROMPT, *wanted, *end], 5)]
        assert client.ask(PROMPT, max_tokens=12).tokens == tiny.greedy(PROMPT, 12)


def test_no_thinking_at_all(tiny, client):
    answer = client.ask(PROMPT, thinking_budget=0, thinking_end=[250, 251], max_tokens=6, n=1)
    assert answer.tokens == [250, 251, *tiny.greedy([*PROMPT, 250, 251], 4)]
    assert client.ask(PROMPT, thinking_budget=0, thinking_end=[250, 251], max_tokens=1).tokens == [250]


def test_thinking_that_the_answer_has_to_open(tiny, client):
    wanted = tiny.greedy(PROMPT, 12)
    end = [250, 251]
    fields = dict(thinking_end=end, max_tokens=12)
    opened = client.ask(PROMPT, thinking_budget=3, opening=wanted[0], **fields)
    assert opened.tokens == [*wanted[:4], *end, *tiny.greedy([*PROMPT, *wanted[:4], *end], 6)]
    none = client.ask(PROMPT, thinking_budget=0, opening=wanted[0], **fields)
    assert none.tokens[:3] == [wanted[0], *end]
    other = (wanted[0] + 1) % 250
    assert client.ask(PROMPT, thinking_budget=3, opening=other, **fields).tokens == wanted


def test_no_thinking_and_log_probabilities_of_the_prompt(tiny, client):
    """What is written before the first draw is not of the prompt."""
    answer = client.ask(PROMPT, thinking_budget=0, thinking_end=[250, 251, 252], max_tokens=5, prompt_logprobs=True)
    assert answer.tokens == [250, 251, 252, *tiny.greedy([*PROMPT, 250, 251, 252], 2)]
    assert [row[0] for row in answer.prompt_logprobs] == PROMPT


def test_thinking_that_ends_by_itself(tiny, client):
    wanted = tiny.greedy(PROMPT, 12)
    answer = client.ask(PROMPT, thinking_budget=6, thinking_end=wanted[2:4], max_tokens=12)
    assert answer.tokens == wanted


def test_bias(client, tiny):
    greedy = tiny.greedy(PROMPT, 10)
    answer = client.ask(PROMPT, logit_bias=[(65, 1000.0)], max_tokens=5)
    assert answer.tokens == [65] * 5
    banned = client.ask(PROMPT, logit_bias=[(token, -1000.0) for token in set(greedy)], max_tokens=10)
    assert not set(banned.tokens) & set(greedy)
    assert client.ask(PROMPT, max_tokens=10).tokens == greedy  # nothing of it stays at the place


def test_penalties(client):
    """With all alike (a bias that drowns the model) a penalty decides, and what was said is not said again."""
    bias = [(token, 10000.0) for token in (65, 66, 67, 68)]
    fields = dict(logit_bias=bias, max_tokens=8, frequency_penalty=2000.0)
    answer = client.ask(PROMPT, **fields)
    assert sorted(answer.tokens[:4]) == sorted(answer.tokens[4:]) == [65, 66, 67, 68]
    present = client.ask(PROMPT, logit_bias=bias, max_tokens=5, presence_penalty=2000.0)
    assert sorted(present.tokens[:4]) == [65, 66, 67, 68]
    assert len(set(client.ask(PROMPT, max_tokens=30, repetition_penalty=1000.0).tokens)) == 30


def test_penalties_survive_giving_way(tiny, opened):
    loops = tiny.open(), tiny.open(places=3, blocks=10, budget=16)
    opened += loops
    fields = dict(max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.3)
    alone = Client(loops[0]).ask(PROMPT, **fields)
    client = Client(loops[1])
    for prompt in prompts(4, seed=30, low=30, high=40):
        client.submit(prompt, max_tokens=60, priority=-1)
    id = client.submit(PROMPT, **fields)
    client.wait(lambda: len(client.answers[id, 0].tokens) > 10)
    for prompt in prompts(4, seed=31, low=30, high=40):
        client.submit(prompt, max_tokens=60, priority=-1)
    client.wait()
    assert client.answers[id, 0].tokens == alone.tokens and loops[1].stats()["preemptions"] > 0


# ---- log-probabilities


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def test_logprobs(tiny, client):
    answer = client.ask(PROMPT, max_tokens=6, logprobs=3)
    tokens = PROMPT + answer.tokens
    tiny.greedy(PROMPT, 1)
    logits = tiny.decoder.logits(tokens[:-1], [0] * 35, range(35), [29])
    expected = log_softmax(logits[0])
    token, logprob, top = answer.logprobs[0]
    assert token == answer.tokens[0] == top[0][0] and logprob == pytest.approx(expected[token], abs=1e-4)
    best = np.argsort(-expected)[:3]
    assert [id for id, _ in top] == best.tolist()
    np.testing.assert_allclose([p for _, p in top], expected[best], atol=1e-4)
    assert len(answer.logprobs) == 6 and all(len(row[2]) == 3 for row in answer.logprobs)
    assert client.ask(PROMPT, max_tokens=2).logprobs == []
    assert all(row[2] == () for row in client.ask(PROMPT, max_tokens=2, logprobs=0).logprobs)


@pytest.mark.parametrize("budget", [4, 16, 64])
def test_prompt_logprobs(tiny, opened, budget):
    loop = tiny.open(budget=budget, buckets=[budget])
    opened.append(loop)
    client = Client(loop)
    client.ask(PROMPT, max_tokens=1)  # in the cache, which is of no use here
    id = client.submit(PROMPT, max_tokens=3, prompt_logprobs=True, logprobs=2, n=2)
    client.wait()
    answer = client.answers[id, 0]
    assert answer.cached == 0 and answer.tokens == tiny.greedy(PROMPT, 3)
    rows = answer.prompt_logprobs
    assert [row[0] for row in rows] == PROMPT and rows[0][1:] == (None, ())
    for i in (1, 7, 29):
        logits = tiny.decoder.logits(PROMPT[:i], [0] * i, range(i), [i - 1])[0]
        expected = log_softmax(logits)
        assert rows[i][1] == pytest.approx(expected[PROMPT[i]], abs=1e-4)
        assert [id for id, _ in rows[i][2]] == np.argsort(-expected)[:2].tolist()
    assert client.answers[id, 1].prompt_logprobs is None and client.answers[id, 1].tokens == answer.tokens


def test_a_row_of_no_numbers(tiny, tiny_folder, opened):
    """A token whose embedding is NaN ends its own request, and leaves nothing in the cache."""
    model = Model(tiny_folder)
    name, shape = next((name, p.shape) for name, p in model.loaded.dsl().parameters() if "embed" in name)
    table = model.weights.array(name, shape).copy()
    table[259] = np.nan
    model.weights.adopt(name, "f32", table)
    loop = model.open(budget=16, buckets=[16])  # the prompt's first chunks end well
    opened.append(loop)
    client = Client(loop)
    good, bad = client.submit(PROMPT, max_tokens=12), client.submit([*PROMPT, 259, *PROMPT], max_tokens=12)
    client.wait()
    assert client.answers[good, 0].tokens == tiny.greedy(PROMPT, 12)
    assert client.answers[bad, 0].finish == "error" and "not numbers" in client.answers[bad, 0].error
    assert client.ask(PROMPT, max_tokens=12).tokens == tiny.greedy(PROMPT, 12)
    assert loop.stats()["alive"] and loop.stats()["failures"] == 0


# ---- grammars


class Grammars:
    """Handle h: the letters of `words[h]`, one after another, or whatever a handle's behaviour says."""

    def __init__(self, words: dict[int, str], ends: bool = True) -> None:
        self.words, self.at, self.ends, self.calls = words, dict.fromkeys(words, 0), ends, 0
        self.broken: set[int] = set()

    def fill(self, handles: list[int], rows: np.ndarray) -> None:
        self.calls += 1
        if self.broken & set(handles):
            raise ValueError("no mask")
        rows[:] = 0
        for handle, row in zip(handles, rows):
            word = self.words[handle]
            if self.at[handle] < len(word):
                token = ord(word[self.at[handle]])
                row[token // 32] = 1 << (token % 32)

    def accept(self, handles: list[int], tokens: list[int]) -> list[int]:
        verdicts = []
        for handle, token in zip(handles, tokens):
            word, at = self.words[handle], self.at[handle]
            self.at[handle] += 1
            legal = at < len(word) and ord(word[at]) == token
            verdicts.append(-1 if not legal else int(self.ends and at + 1 == len(word)))
        return verdicts


def with_grammars(tiny, opened, grammars: Grammars, **options) -> Client:
    loop = tiny.open(start=False, **options)
    opened.append(loop)
    loop.set_mask_source(grammars)
    loop.start()
    return Client(loop)


def test_grammars(tiny, opened):
    client = with_grammars(tiny, opened, Grammars({7: "hello", 8: "good bye", 9: "abcdef"}), places=4)
    free = client.submit(PROMPT, max_tokens=12)
    first = client.submit(PROMPT, grammars=[7, 8], n=2, temperature=1.0, seed=1)
    short = client.submit([1, 2], grammars=[9], max_tokens=3)
    client.wait()
    assert client.answers[free, 0].tokens == tiny.greedy(PROMPT, 12)
    assert [client.answers[first, choice].text for choice in (0, 1)] == ["hello", "good bye"]
    assert {client.answers[first, choice].finish for choice in (0, 1)} == {"stop"}
    assert (client.answers[short, 0].text, client.answers[short, 0].finish) == ("abc", "length")


def test_a_grammar_that_allows_nothing(tiny, opened):
    """That request ends in an error; the others go on."""
    client = with_grammars(tiny, opened, Grammars({1: "ab"}, ends=False))
    free = client.submit(PROMPT, max_tokens=12)
    stuck = client.submit(PROMPT, grammars=[1])
    client.wait()
    assert client.answers[stuck, 0].finish == "error" and "none is allowed" in client.answers[stuck, 0].error
    assert client.answers[stuck, 0].text == "ab"
    assert client.answers[free, 0].tokens == tiny.greedy(PROMPT, 12)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_grammar_that_raises(tiny, opened):
    grammars = Grammars({1: "abc", 2: "xyz"})
    grammars.broken.add(1)
    client = with_grammars(tiny, opened, grammars)
    bad, good = client.submit(PROMPT, grammars=[1]), client.submit(PROMPT, grammars=[2])
    client.wait()
    assert (client.answers[bad, 0].finish, client.answers[bad, 0].tokens) == ("error", [])
    assert client.answers[good, 0].text == "xyz"
    grammars.words[3] = "q"  # accept knows nothing of it
    lost = client.submit(PROMPT, grammars=[3])
    client.wait()
    assert client.answers[lost, 0].finish == "error"


def test_a_grammar_and_thinking(tiny, opened):
    """What is written for the model is told to the grammar too."""
    word = "th" + chr(100) + chr(101) + "xy"
    client = with_grammars(tiny, opened, Grammars({1: word}))
    answer = client.ask(PROMPT, grammars=[1], thinking_budget=2, thinking_end=[100, 101])
    assert answer.text == word and answer.finish == "stop"
