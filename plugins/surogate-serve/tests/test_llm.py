"""Offline batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surogate_serve import LLM, EngineOptions, Sampling
from surogate_serve.types import Refused


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    options = EngineOptions(recipe="fp32", threads=2, context=128, max_sequences=3, kv_memory=1 << 20)
    with LLM(tiny, options=options) as model:
        yield model


def test_one_text_is_a_batch_of_one(llm):
    (answer,) = llm.generate("abc", max_tokens=4, ignore_eos=True)
    assert len(answer.tokens) == 4 and answer.choices[0].finish == "length"
    assert llm.generate([answer.prompt], max_tokens=4, ignore_eos=True)[0].tokens == answer.tokens
    assert llm.generate(list(answer.prompt), max_tokens=4, ignore_eos=True)[0].tokens == answer.tokens


def test_batches_are_in_order_and_the_same_as_alone(llm):
    texts = [f"text {i} " * (i + 1) for i in range(7)]
    together = llm.generate(texts, max_tokens=6, ignore_eos=True)
    apart = [llm.generate(text, max_tokens=6, ignore_eos=True)[0] for text in texts]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in apart]
    assert llm.generate([]) == []


def test_conversations(llm):
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, max_tokens=5)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": one.text}, {"role": "user", "content": "on"}]], max_tokens=5)
    assert two[0].tokens == one.tokens and two[1].choices[0].finish in ("stop", "length")


def test_choices_seeds_and_log_probabilities(llm):
    sampling = Sampling(temperature=1.0, seed=3)
    (first,), (second,) = (llm.generate("x", sampling, max_tokens=8, n=3, logprobs=2, ignore_eos=True) for _ in range(2))
    assert [c.tokens for c in first.choices] == [c.tokens for c in second.choices]
    assert len({tuple(c.tokens) for c in first.choices}) > 1
    for choice in first.choices:
        assert [each.token for each in choice.logprobs] == choice.tokens
        assert all(len(each.top) == 2 and each.logprob <= 0 for each in choice.logprobs)


def test_what_is_not_taken_is_refused_and_nothing_is_left(llm):
    with pytest.raises(Refused):
        llm.generate(["good", "y" * 500], max_tokens=50)
    assert len(llm.generate("good", max_tokens=2, ignore_eos=True)[0].tokens) == 2
    stats = llm.served.stats()
    assert stats["blocks"]["used"] == 0 and stats["running"] == 0
