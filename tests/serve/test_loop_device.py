"""The loop one step ahead of what it knows, on the device that runs nothing before somebody waits for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from surogate_core.engine import EngineError
from surogate_core.engine.serving import Loop, Refusal

from ..engine.fakes import FakeDevice, fake_device
from .conftest import Client, Gate, Model, prompts
from .test_loop import check
from .test_loop_requests import Grammars, first_of

PROMPT = prompts(1, seed=1, low=30, high=30)[0]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = fake_device()
    gc.collect()  # it knows one thread at a time: nothing may be given back while a loop runs
    yield device
    device.refuse(0)
    gc.collect()
    assert (device.damaged, device.failed) == (0, 0)


@pytest.fixture
def ahead(device, tiny_folder, tiny) -> Model:
    model = Model(tiny_folder, "fake")
    model.greedy = tiny.greedy
    return model


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_batch(ahead, opened, run_ahead):
    loop = ahead.open(places=8, blocks=64, budget=32, run_ahead=run_ahead)
    opened.append(loop)
    client = Client(loop)
    wanted = {}
    for i, prompt in enumerate(prompts(12, seed=2)):
        wanted[client.submit(prompt, max_tokens=5 + 3 * i)] = (prompt, 5 + 3 * i)
    client.wait()
    check(ahead, client, wanted)
    assert loop.stats()["discarded_tokens"] == 0  # limits are known ahead


def test_a_small_pool(ahead, opened):
    loop = ahead.open(places=8, blocks=20, budget=32, run_ahead=True)
    opened.append(loop)
    client = Client(loop)
    wanted = {client.submit(prompt, max_tokens=40): (prompt, 40) for prompt in prompts(20, seed=3)}
    client.wait()
    check(ahead, client, wanted)
    assert loop.stats()["preemptions"] > 0


def test_what_is_past_a_stop_is_discarded(ahead, opened):
    wanted = ahead.greedy(PROMPT, 40)
    at = first_of(wanted, 5)
    loop = ahead.open(run_ahead=True)
    opened.append(loop)
    client = Client(loop)
    other = prompts(1, seed=4)[0]
    beside = client.submit(other, max_tokens=30)
    answer = client.ask(PROMPT, stop_token_ids=[wanted[at]])
    assert answer.tokens == wanted[: at + 1] and answer.finish == "stop"
    check(ahead, client, {beside: (other, 30)})
    client.wait(lambda: loop.stats()["discarded_tokens"] == 1)  # it is read a step later
    again = client.ask(PROMPT + wanted[:at], max_tokens=8)  # what the discarded step wrote is in nobody's way
    assert again.tokens == ahead.greedy(PROMPT + wanted[:at], 8)


def test_forced_tokens(ahead, opened):
    wanted = ahead.greedy(PROMPT, 5)
    loop = ahead.open(run_ahead=True)
    opened.append(loop)
    client = Client(loop)
    beside = client.submit([5, 6], max_tokens=40)
    answer = client.ask(PROMPT, thinking_budget=5, thinking_end=[250, 251, 252], max_tokens=20)
    assert answer.tokens == wanted + [250, 251, 252] + ahead.greedy(PROMPT + wanted + [250, 251, 252], 12)
    check(ahead, client, {beside: ([5, 6], 40)})


def test_grammars_wait_for_their_tokens(ahead, opened):
    loop = ahead.open(start=False, run_ahead=True)
    opened.append(loop)
    loop.set_mask_source(Grammars({1: "a grammar"}))
    loop.start()
    client = Client(loop)
    beside = client.submit(PROMPT, max_tokens=40)
    assert client.ask([9], grammars=[1]).text == "a grammar"
    check(ahead, client, {beside: (PROMPT, 40)})


def test_sampling_and_penalties(ahead, opened, tiny):
    fields = dict(max_tokens=25, temperature=0.9, seed=7, repetition_penalty=1.2, frequency_penalty=0.2, logprobs=2)
    host, loop = tiny.open(), ahead.open(run_ahead=True)
    opened += [host, loop]
    first, second = Client(host).ask(PROMPT, **fields), Client(loop).ask(PROMPT, **fields)
    assert second.tokens == first.tokens and len(second.logprobs) == 25


def test_cancels(ahead, opened):
    loop = ahead.open(places=4, blocks=20, budget=16, run_ahead=True)
    opened.append(loop)
    client, wanted = Client(loop), {}
    for i, prompt in enumerate(prompts(24, seed=6, high=40)):
        id = client.submit(prompt, max_tokens=20)
        if i % 2:
            client.poll(0.002)
            loop.cancel(id - (i % 3 == 0))
        wanted[id] = (prompt, 20)
    client.wait()
    left = {id: want for id, want in wanted.items() if client.answers[id, 0].finish != "cancelled"}
    check(ahead, client, left)
    assert left and len(left) < len(wanted)


class Refusing(Gate):
    """Steps with its requests are refused by the device, as long as ``steps`` are left: one of their kernels is, so they must
    not be recorded."""

    def __init__(self, device: FakeDevice, steps: int) -> None:
        super().__init__()
        self.device, self.steps = device, steps

    def fill(self, handles, rows):
        super().fill(handles, rows)
        self.device.refuse(3 if self.steps > 0 else 0)
        self.steps -= 1


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_fails(ahead, device, opened, run_ahead):
    """Whoever is in it ends in an error; who comes later is served, and finds nothing of that step."""
    loop = ahead.open(run_ahead=run_ahead, masks=Refusing(device, 1), graphs=False)
    opened.append(loop)
    client = Client(loop)
    answer = client.ask(PROMPT, max_tokens=20, grammars=[0])
    assert (answer.finish, answer.tokens) == ("error", []) and "the device is out of order" in answer.error
    answer = client.ask(PROMPT, max_tokens=20)
    assert answer.tokens == ahead.greedy(PROMPT, 20) and answer.cached == 0
    assert loop.stats()["failures"] == 1 and loop.stats()["alive"]


def test_two_steps_in_a_row(ahead, device, opened):
    """The loop is dead: all that wait are told, and so is whoever asks."""
    loop = ahead.open(places=1, run_ahead=True, masks=Refusing(device, 9), graphs=False)
    opened.append(loop)
    client = Client(loop)
    ids = [client.submit(PROMPT, max_tokens=50, grammars=[0]) for _ in range(2)]
    try:
        ids += [client.submit(PROMPT, max_tokens=50) for _ in range(3)]
    except Refusal as refusal:
        assert refusal.reason == "dead"
    client.wait()
    assert {client.answers[id, 0].finish for id in ids} == {"error"}
    stats = loop.stats()
    assert not stats["alive"] and "two steps in a row" in stats["dead"] and stats["failures"] == 2
    with pytest.raises(Refusal) as caught:
        loop.submit([1])
    assert caught.value.reason == "dead"
    with pytest.raises(EngineError, match="two steps in a row"):
        loop.poll(0.1)


def test_a_loop_that_is_dropped(ahead):
    loop = ahead.open(run_ahead=True)
    loop.submit(PROMPT, max_tokens=90)
    assert isinstance(loop, Loop)
    del loop
    gc.collect()
