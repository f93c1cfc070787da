"""A served model beside `Decoder`, which decodes one sequence at a time with programs of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from surogate_core.errors import ConfigError
from surogate_core.generate import Decoder, installed_families
from surogate_core.model import FrozenWeights, LoadedModel
from surogate_core.passes import RECIPES
from surogate_serve.engine import EngineOptions, runtime
from surogate_serve.models import ServedModel
from surogate_serve.pulled import pulled
from surogate_serve.types import Delta, Generation, Refused, Sampling

GREEDY = Sampling(temperature=0.0)
IM_END = 258
OPTIONS = EngineOptions(recipe="fp32", threads=2, context=128, max_sequences=4, kv_memory=1 << 20)


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[ServedModel]:
    model = ServedModel.open(tiny, "tiny", OPTIONS)
    yield model
    model.close()


@pytest.fixture(scope="module")
def decoder(tiny: Path) -> Decoder:
    model = LoadedModel.open(tiny, installed_families())
    return Decoder(model, FrozenWeights(model, "f32"), RECIPES["fp32"], 128, threads=2)


def alone(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    logits = decoder.logits(prompt, [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])[0]
    tokens: list[int] = []
    while True:
        tokens.append(int(logits.argmax()))
        if len(tokens) == count or tokens[-1] == IM_END:
            return tokens
        logits = decoder.logits(tokens[-1:], [0], [len(prompt) + len(tokens) - 1], [0])[0]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, generator.integers(1, 70)).tolist() for _ in range(count)]


async def all_of(model: ServedModel, generation: Generation) -> list[Delta]:
    return [delta async for delta in deltas_of(model, generation)]


def deltas_of(model: ServedModel, generation: Generation) -> AsyncGenerator[Delta, None]:
    return pulled(partial(model.read, generation))


def tokens_of(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.tokens]


def test_many_at_once_get_what_each_would_get_alone(served, decoder):
    asked = prompts(11)
    generations = [Generation(prompt, max_tokens=24, sampling=GREEDY, ignore_eos=True) for prompt in asked]

    async def together() -> list[list[Delta]]:
        return await asyncio.gather(*(all_of(served, each) for each in generations))

    for prompt, deltas in zip(asked, asyncio.run(together()), strict=True):
        want = alone(decoder, prompt, 24)
        got = tokens_of(deltas)
        assert got[:len(want)] == want
        assert deltas[-1].finish == "length" and len(got) == 24
        assert all(delta.finish is None for delta in deltas[:-1])


def test_offline_batches_are_the_same(served, decoder):
    asked = prompts(9, seed=5)
    tokens: dict[int, list[int]] = {index: [] for index in range(len(asked))}
    for index, delta in served.generate_many([Generation(p, max_tokens=8, sampling=GREEDY, ignore_eos=True) for p in asked]):
        tokens[index] += delta.tokens
    for index, prompt in enumerate(asked):
        want = alone(decoder, prompt, 8)
        assert tokens[index][:len(want)] == want


def test_a_prompt_is_found_in_the_cache_and_answered_alike(served):
    prompt = prompts(1, seed=9)[0] * 3
    generation = Generation(prompt[:60], max_tokens=10, sampling=GREEDY, cache_salt="a")
    cold = asyncio.run(all_of(served, generation))
    warm = asyncio.run(all_of(served, generation))
    assert tokens_of(cold) == tokens_of(warm)
    assert max(delta.cached_tokens for delta in cold) == 0
    assert max(delta.cached_tokens for delta in warm) == 48
    other = Generation(prompt[:60], max_tokens=10, sampling=GREEDY, cache_salt="b")
    assert max(delta.cached_tokens for delta in asyncio.run(all_of(served, other))) == 0


@pytest.mark.parametrize(("more", "padding"), ((5, 3), (13, 3), (31, 1)))
def test_a_second_turn_takes_a_step_of_its_few_tokens(served, decoder, more, padding):
    first = prompts(1, seed=more)[0] * 64
    asyncio.run(all_of(served, Generation(first[:48], max_tokens=1, sampling=GREEDY, cache_salt=str(more))))
    before = served.stats()
    again = Generation(first[:48 + more], max_tokens=1, sampling=GREEDY, cache_salt=str(more))
    assert tokens_of(asyncio.run(all_of(served, again))) == alone(decoder, again.prompt, 1)
    after = served.stats()
    assert after["steps"] - before["steps"] == 1
    assert after["padded_tokens"] - before["padded_tokens"] == padding


def test_what_is_closed_is_cancelled(served):
    async def one(number: int) -> None:
        deltas = deltas_of(served, Generation([1, 2, number], max_tokens=120, ignore_eos=True))
        try:
            await anext(deltas)
        finally:
            await deltas.aclose()

    async def leave() -> None:
        tasks = [asyncio.create_task(one(number)) for number in range(40)]  # of which four run and the rest wait
        await tasks[0]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _ in range(6000):
            stats = served.stats()
            if not stats["running"] and not stats["waiting"] and stats["finished"]["cancelled"]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"requests are still running, or none was cancelled: {served.stats()}")

    asyncio.run(leave())
    assert served.stats()["blocks"]["used"] == 0


def test_one_choice_ends_and_the_other_goes_on(served):
    generation = Generation([1, 2, 3], max_tokens=100, n=2, ignore_eos=True, sampling=GREEDY)

    async def end_one() -> list[Delta]:
        deltas = deltas_of(served, generation)
        got = [await anext(deltas)]
        generation.end(0)
        return got + [delta async for delta in deltas]

    deltas = asyncio.run(end_one())
    finishes = {delta.choice: delta.finish for delta in deltas if delta.finish is not None}
    assert finishes[1] == "length" and len(tokens_of(deltas, 1)) == 100
    assert finishes[0] in ("cancelled", "length")  # the engine may have been done before it heard of it
    assert not generation.watchers and served.stats()["blocks"]["used"] == 0


def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(served):
    with pytest.raises(Refused) as refusal:
        asyncio.run(all_of(served, Generation([1] * 200, max_tokens=4)))
    assert refusal.value.status == 400 and refusal.value.code == "context_length_exceeded"
    assert refusal.value.details == {"n_prompt_tokens": 200, "n_ctx": 128}


@pytest.mark.parametrize("generation", [
    Generation([1, -5]), Generation([1, 4000]), Generation([]), Generation([1], sampling=Sampling(logit_bias={9999: 1.0})),
])
def test_requests_that_make_no_sense_are_refused(served, generation):
    with pytest.raises(Refused) as refusal:
        asyncio.run(all_of(served, generation))
    assert refusal.value.status == 400


def test_log_probabilities_are_those_of_the_logits(served, decoder):
    prompt = prompts(1, seed=3)[0]
    deltas = asyncio.run(all_of(served, Generation(prompt, max_tokens=1, sampling=GREEDY, logprobs=3)))
    logits = decoder.logits(prompt, [0] * len(prompt), range(len(prompt)), [len(prompt) - 1])[0].astype(np.float64)
    every = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    (one,) = deltas[0].logprobs
    best = np.argsort(-every, kind="stable")[:3]
    assert one.token == best[0] and [token for token, _ in one.top] == best.tolist()
    np.testing.assert_allclose([one.logprob, *(value for _, value in one.top)], every[[best[0], *best]], atol=1e-5)


def test_vectors_do_not_depend_on_what_else_is_embedded(served):
    asked = [*prompts(7, seed=4), list(range(100)), [5]]
    for pooling in ("mean", "last"):
        together = asyncio.run(served.embed(asked, pooling))
        apart = np.concatenate([asyncio.run(served.embed([prompt], pooling)) for prompt in asked])
        assert together.shape == (9, 32) and np.isfinite(together).all()
        np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-5)
    assert np.allclose(asyncio.run(served.embed([[5]], "mean")), asyncio.run(served.embed([[5]], "last")))


@pytest.mark.parametrize("prompt", [[], [1] * 129])
def test_what_cannot_be_embedded_is_refused(served, prompt):
    with pytest.raises(Refused) as refusal:
        asyncio.run(served.embed([prompt]))
    assert refusal.value.status == 400


def test_a_conversation_is_rendered_and_answered(served):
    prompt = served.render([{"role": "user", "content": "hi <|im_end|>"}])
    assert list(prompt.tokens).count(IM_END) == 1  # what a user writes is text
    deltas = asyncio.run(all_of(served, Generation(prompt.tokens, max_tokens=5)))
    assert deltas[-1].finish in ("stop", "length")


def test_when_the_engine_dies_everybody_is_told(tiny):
    model = ServedModel.open(tiny, "tiny", OPTIONS)

    async def outlive() -> list[Delta]:
        deltas = deltas_of(model, Generation([1, 2, 3], max_tokens=120, ignore_eos=True))
        first = await anext(deltas)
        model._pump._poll = _broken
        return [first] + [delta async for delta in deltas]

    try:
        last = asyncio.run(asyncio.wait_for(outlive(), 60))[-1]
        assert last.finish == "error" or last.finish == "length"  # what was polled before may have been all of it
        for _ in range(100):
            if model.dead:
                break
            asyncio.run(asyncio.sleep(0.01))
        assert model.dead == "RuntimeError: no more"
        with pytest.raises(Refused) as refusal:
            asyncio.run(all_of(model, Generation([1])))
        assert refusal.value.status == 503
    finally:
        model.close()


def _broken(timeout: float):
    raise RuntimeError("no more")


def test_less_memory_means_fewer_sequences_and_a_shorter_context(tiny):
    """A block takes 16 x 2 x 2 x 2 x 8 x 4 bytes."""
    options = EngineOptions(recipe="fp32", threads=1, kv_memory=9 * 4096)
    model = ServedModel.open(tiny, options=options)
    try:
        assert (model.runtime.places, model.runtime.blocks, model.context) == (4, 9, 144)
        told = list(model.generate_many([Generation([1] * 100, max_tokens=40, sampling=GREEDY)] * 7))
        assert sum(delta.finish is not None for _, delta in told) == 7
        assert not [delta.error for _, delta in told if delta.error]
    finally:
        model.close()
    with pytest.raises(ConfigError):
        ServedModel.open(tiny, options=EngineOptions(max_sequences=16, kv_memory=9 * 4096))


def test_bits_do_not_depend_on_batch_and_cache(tiny):
    """In bf16 and with sampling, where every rounding shows sooner or later."""
    options = replace(OPTIONS, recipe="bf16", batch_invariant=True)
    model = ServedModel.open(tiny, "tiny", options)
    sampling = Sampling(temperature=1.5, seed=11)
    generations = [Generation(p, max_tokens=30, sampling=sampling, ignore_eos=True, logprobs=1) for p in prompts(9, seed=2)]

    async def together() -> list[list[Delta]]:
        return await asyncio.gather(*(all_of(model, each) for each in generations))

    def told(deltas: list[Delta]) -> list[tuple[int, float]]:
        return [(one.token, one.logprob) for delta in deltas for one in delta.logprobs or ()]

    try:
        alone = [told(asyncio.run(all_of(model, replace(each, cache_salt=str(i))))) for i, each in enumerate(generations)]
        batch, warm = asyncio.run(together()), asyncio.run(together())
        assert max(delta.cached_tokens for deltas in warm for delta in deltas) > 0
        assert [told(each) for each in batch] == alone and [told(each) for each in warm] == alone
    finally:
        model.close()


def test_few_tokens_are_as_many_as_the_kernels_take():
    kernels = (Path(__file__).parents[3] / "native/backends/cuda/linear_few.cuh").read_text()
    assert re.findall(r"constexpr int kFewTokens = (\d+);", kernels) == [str(runtime.FEW_TOKENS)]
