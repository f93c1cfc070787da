"""Adapters that come and go: each answers as the model merged with it would, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from surogate_core.errors import ConfigError
from surogate_core.export import export
from surogate_core.generate import Decoder, installed_families
from surogate_core.model import AppliedAdapter, FrozenWeights, LoadedModel
from surogate_core.passes import RECIPES
from surogate_serve import LLM
from surogate_serve.cli.serve import places_of
from surogate_serve.engine import EngineOptions
from surogate_serve.models import ServedModel
from surogate_serve.pulled import pulled
from surogate_serve.types import Delta, Generation, Refused, Sampling

GREEDY = Sampling(temperature=0.0)
OPTIONS = EngineOptions(
    recipe="fp32", threads=2, context=128, max_sequences=4, kv_memory=1 << 20, adapter_slots=2, adapter_rank=8
)
PROMPT = list(range(40, 90))


@pytest.fixture
def served(tiny: Path) -> Iterator[ServedModel]:
    model = ServedModel.open(tiny, "tiny", OPTIONS)
    yield model
    model.close()


def expected(tiny: Path, adapter: Path | None, prompt: Sequence[int] = PROMPT, count: int = 12) -> list[int]:
    model = LoadedModel.open(tiny, installed_families())
    applied = None if adapter is None else AppliedAdapter.open(adapter, model)
    decoder = Decoder(model, FrozenWeights(model, "f32"), RECIPES["fp32"], 128, adapter=applied, threads=2)
    tokens: list[int] = []
    step, first = list(prompt), 0
    while len(tokens) < count:
        logits = decoder.logits(step, [0] * len(step), range(first, first + len(step)), [len(step) - 1])[0]
        first += len(step)
        step = [int(logits.argmax())]
        tokens += step
    return tokens


async def answer(model: ServedModel, adapter: str | None, prompt: Sequence[int] = PROMPT, count: int = 12) -> list[int]:
    generation = Generation(prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True, adapter=adapter)
    return [token async for delta in deltas_of(model, generation) for token in delta.tokens]


def deltas_of(model: ServedModel, generation: Generation) -> AsyncGenerator[Delta, None]:
    return pulled(partial(model.read, generation))


def test_adapters_and_the_base_in_one_batch(served, tiny, adapter):
    folders = {"one": adapter(1), "two": adapter(2, 8), None: None}
    want = {name: expected(tiny, folder) for name, folder in folders.items()}
    assert want["one"] != want["two"] != want[None]

    async def all_at_once() -> list[list[int]]:
        await served.load_adapter("one", folders["one"])
        await served.load_adapter("two", folders["two"])
        return await asyncio.gather(*(answer(served, name) for name in [*folders, *folders]))

    for name, tokens in zip([*folders, *folders], asyncio.run(all_at_once()), strict=True):
        assert tokens == want[name], name
    assert served.adapters == ["one", "two"]


def test_more_adapters_than_slots_take_turns(served, tiny, adapter):
    folders = {f"a{seed}": adapter(seed) for seed in range(5)}

    async def all_at_once() -> list[list[int]]:
        for name, folder in folders.items():
            await served.load_adapter(name, folder)
        return await asyncio.gather(*(answer(served, name) for name in [*folders] * 3))

    answers = asyncio.run(asyncio.wait_for(all_at_once(), 60))
    for name, tokens in zip([*folders] * 3, answers, strict=True):
        assert tokens == expected(tiny, folders[name]), name


class SlowMemory:
    """A bank whose writes wait until they may."""

    def __init__(self, memory, may: threading.Event, begun: threading.Event) -> None:
        self._memory, self._may, self._begun = memory, may, begun

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        self._begun.set()
        assert self._may.wait(60)
        self._memory.write(array, offset)


def test_nobody_waits_for_an_upload_but_those_who_need_it(served, tiny, adapter):
    may, begun = threading.Event(), threading.Event()
    memories = served.runtime.memories

    async def meanwhile() -> list[list[int]]:
        await served.load_adapter("one", adapter(1))
        slow = {name: SlowMemory(memory, may, begun) for name, memory in memories.items()}
        served._adapters.bind(slow, served._loop.uses)
        loading = asyncio.create_task(served.load_adapter("two", adapter(2)))
        await asyncio.to_thread(begun.wait, 60)
        needs_it = [asyncio.create_task(answer(served, "two")) for _ in range(2)]
        told = await answer(served, "one")
        assert [each["slot"] is None for each in served.adapter_details()] == [False, True]
        assert not loading.done() and not any(each.done() for each in needs_it)
        may.set()
        await loading
        return [told, *[await each for each in needs_it]]

    answers = asyncio.run(asyncio.wait_for(meanwhile(), 60))
    assert answers == [expected(tiny, adapter(1))] + [expected(tiny, adapter(2))] * 2


def test_an_adapter_that_leaves_while_it_is_uploaded_keeps_no_slot(served, adapter):
    may, begun = threading.Event(), threading.Event()

    async def leave() -> None:
        slow = {name: SlowMemory(memory, may, begun) for name, memory in served.runtime.memories.items()}
        served._adapters.bind(slow, served._loop.uses)
        loading = asyncio.create_task(served.load_adapter("it", adapter(1)))
        await asyncio.to_thread(begun.wait, 60)
        await served.unload_adapter("it")
        may.set()
        await loading

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert served._adapters._slots == [None, None] and served.adapters == []


def test_another_under_the_same_name_is_another(served, tiny, adapter):
    """Requests that run keep the one they began with, and cached blocks of the first are not the second's."""
    async def replace() -> tuple[list[int], list[int], list[int]]:
        await served.load_adapter("it", adapter(1))
        before = await answer(served, "it")
        deltas = deltas_of(served, Generation(PROMPT, max_tokens=60, sampling=GREEDY, ignore_eos=True, adapter="it"))
        running = [*(await anext(deltas)).tokens]
        await served.load_adapter("it", adapter(2))
        after = await answer(served, "it")
        async for delta in deltas:
            running += delta.tokens
        return before, after, running

    before, after, running = asyncio.run(replace())
    assert before == expected(tiny, adapter(1)) and after == expected(tiny, adapter(2))
    assert running == expected(tiny, adapter(1), count=60)
    assert [each["users"] for each in served.adapter_details()] == [0]


def test_the_same_again_has_a_key_of_its_own(served, adapter):
    async def again() -> int:
        await served.load_adapter("it", adapter(1))
        await answer(served, "it")
        await served.load_adapter("it", adapter(1))
        generation = Generation(PROMPT, max_tokens=1, sampling=GREEDY, adapter="it")
        return max([delta.cached_tokens async for delta in deltas_of(served, generation)])

    assert asyncio.run(again()) == 0


def test_a_salt_spelled_as_an_adapter_finds_nothing_of_it(served, adapter):
    async def both() -> int:
        await served.load_adapter("it", adapter(1))
        await answer(served, "it")
        deltas = deltas_of(served, Generation(PROMPT, max_tokens=1, sampling=GREEDY, cache_salt="it"))
        return max([delta.cached_tokens async for delta in deltas])

    assert asyncio.run(both()) == 0


def test_an_adapter_that_leaves_is_not_found(served, adapter):
    async def leave() -> None:
        await served.load_adapter("it", adapter(1))
        await served.unload_adapter("it")
        for asked in (answer(served, "it"), served.unload_adapter("it")):
            with pytest.raises(Refused) as refusal:
                await asked
            assert refusal.value.status == 404

    asyncio.run(leave())
    assert served.adapters == []


def test_what_does_not_fit_is_refused_and_the_old_one_stays(served, tiny, adapter, tmp_path):
    async def load(path: Path) -> None:
        await served.load_adapter("it", path)

    asyncio.run(load(adapter(1)))
    (tmp_path / "empty").mkdir()
    for path in (adapter(3, 16), tmp_path / "empty", tmp_path / "nowhere", tiny):
        with pytest.raises(Refused) as refusal:
            asyncio.run(load(path))
        assert refusal.value.status == 400
    assert asyncio.run(answer(served, "it")) == expected(tiny, adapter(1))


def test_there_are_limits_and_models_without(tiny, adapter):
    small = ServedModel.open(tiny, "tiny", replace(OPTIONS, adapter_memory=5000))
    without = ServedModel.open(tiny, "tiny", replace(OPTIONS, adapter_slots=0))
    try:
        for model in (small, without):
            with pytest.raises(Refused) as refusal:
                asyncio.run(model.load_adapter("it", adapter(1)))
            assert refusal.value.status == 400
    finally:
        small.close()
        without.close()


@pytest.fixture
def run_of(tiny, tmp_path):
    """run_of(adapter, name): the folder of a run that made it."""

    def make(folder: Path, name: str) -> Path:
        run = tmp_path / name
        shutil.copytree(folder, run / "adapter")
        config = json.loads((run / "adapter" / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(tiny)
        (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        return run

    return make


def test_names_of_runs_and_of_their_bases(tiny, adapter, run_of):
    """What is named answers as it was trained; the base, opened once, has a name of its own."""
    one, two, model = run_of(adapter(1), "one"), run_of(adapter(2), "two"), run_of(adapter(3), "model")

    def names(paths: dict, adapters: dict | None = None) -> list[tuple]:
        return [(place.name, sorted(place.adapters), place.main) for place in places_of(paths, adapters or {})]

    assert names({None: one}) == [("model", ["one"], ["one"])]
    assert names({"chosen": one}) == [("model", ["chosen"], ["chosen"])]
    assert names({None: model}) == [("model:base", ["model"], ["model"])]
    assert names({"one": one, "two": two}) == [("model", ["one", "two"], ["one", "two"])]
    assert names({"one": one, "x": tiny}) == [("x", ["one"], ["one", "x"])]
    assert names({"x": tiny, "one": one}, {"one": {"more": "/m"}}) == [("x", ["more", "one"], ["x", "one"])]
    assert names({"x": tiny, "y": tiny}) == [("x", [], ["x"]), ("y", [], ["y"])]
    assert names({"model": adapter(1).parent, "one": one}) == [("model", [], ["model"]), ("one:base", ["one"], ["one"])]
    with pytest.raises(ConfigError):
        names({None: one}, {None: {"one": "/m"}})
    with pytest.raises(ConfigError):
        names({"a": one, "b": two}, {"a": {"t": "/m"}, "b": {"t": "/n"}})


def test_a_run_with_an_adapter_is_its_base_and_the_adapter(tiny, adapter, run_of):
    model = ServedModel.open(run_of(adapter(1), "run"), options=OPTIONS)
    try:
        assert (model.name, model.adapters, model.main, model.names) == ("model", ["run"], ("run",), ["run", "model"])
        assert asyncio.run(answer(model, "run")) == expected(tiny, adapter(1))
        assert np.isfinite(asyncio.run(model.embed([[1]]))).all()
    finally:
        model.close()


def test_offline_a_run_answers_as_it_was_trained(tiny, adapter, run_of):
    with LLM(run_of(adapter(1), "run"), options=OPTIONS) as llm:
        named = (None, "run", "model")
        tokens = [llm.generate(PROMPT, max_tokens=12, ignore_eos=True, adapter=name)[0].tokens for name in named]
    assert tokens == [expected(tiny, adapter(1))] * 2 + [expected(tiny, None)]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_1"])
def test_adapters_over_quantised_weights(tiny, adapter, tmp_path, dtype):
    export(tiny, tmp_path / "tiny.gguf", dtype)
    model = ServedModel.open(tmp_path / "tiny.gguf", options=OPTIONS, adapters={"it": adapter(1)})
    try:
        assert asyncio.run(answer(model, "it")) == expected(tmp_path / "tiny.gguf", adapter(1))
        assert asyncio.run(answer(model, None)) == expected(tmp_path / "tiny.gguf", None)
    finally:
        model.close()
