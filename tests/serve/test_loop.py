"""The loop, on a tiny model: the same tokens as the simple decoder's, however they are batched, cut, cached or put off."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from surogate_core.engine import EngineError
from surogate_core.engine.serving import Refusal

from .conftest import CONTEXT, Client, Gate, prompts


def check(tiny, client, wanted: dict[int, tuple[list[int], int]]) -> None:
    """That request id -> (prompt, count) was answered as by the decoder alone."""
    for id, (prompt, count) in wanted.items():
        answer = client.answers[id, 0]
        assert (answer.finish, answer.error) == ("length", None)
        assert answer.tokens == tiny.greedy(prompt, count)


def run_all(tiny, loop, count: int, tokens: int = 12, seed: int = 0, **fields) -> Client:
    client = Client(loop)
    wanted = {client.submit(prompt, max_tokens=tokens, **fields): (prompt, tokens) for prompt in prompts(count, seed)}
    client.wait()
    check(tiny, client, wanted)
    return client


def test_one_request(tiny, opened):
    loop = tiny.open()
    opened.append(loop)
    prompt = prompts(1)[0]
    answer = Client(loop).ask(prompt, max_tokens=8)
    assert answer.tokens == tiny.greedy(prompt, 8)
    assert (answer.finish, answer.stop, answer.error, answer.cached) == ("length", None, None, 0)
    stats = loop.stats()
    assert (stats["generated_tokens"], stats["prompt_tokens"], stats["failures"]) == (8, len(prompt), 0)
    assert stats["alive"] and stats["dead"] is None and stats["finished"]["length"] == 1


def test_a_batch_of_sixteen(tiny, opened):
    loop = tiny.open(places=16, blocks=128, budget=64)
    opened.append(loop)
    run_all(tiny, loop, 16)


@pytest.mark.parametrize("budget", [2, 3, 7, 16, 33, 128])
def test_prompts_cut_in_every_way(tiny, opened, budget):
    loop = tiny.open(places=2, blocks=64, budget=budget, buckets=[budget])
    opened.append(loop)
    run_all(tiny, loop, 5)


def test_a_small_pool_and_many_clients(tiny, opened):
    """20 blocks are 320 tokens: 8 sequences of up to 72 do not fit, and take blocks from each other."""
    loop = tiny.open(places=8, blocks=20, budget=32)
    opened.append(loop)
    run_all(tiny, loop, 32, tokens=40, seed=3)
    stats = loop.stats()
    assert stats["preemptions"] > 0 and stats["finished"]["length"] == 32


def test_one_that_fills_the_whole_pool_goes_on(tiny, opened):
    """A sequence that needs every block makes the others wait, and is never stuck."""
    loop = tiny.open(places=4, blocks=8, budget=32)
    opened.append(loop)
    client = Client(loop)
    long = prompts(1, seed=5, low=60, high=60)[0]
    wanted = {client.submit(long, max_tokens=68): (long, 68)}
    for prompt in prompts(6, seed=6, high=30):
        wanted[client.submit(prompt, max_tokens=30)] = (prompt, 30)
    client.wait()
    check(tiny, client, wanted)
    assert loop.stats()["blocks"]["total"] == 8


def test_the_second_turn_finds_the_first(tiny, opened):
    loop = tiny.open()
    opened.append(loop)
    client = Client(loop)
    prompt = prompts(1, seed=1, low=40, high=40)[0]
    first = client.ask(prompt, max_tokens=10)
    turn = prompt + first.tokens + [5, 6, 7]
    again = client.ask(turn, max_tokens=10)
    assert again.cached == 48 and again.tokens == tiny.greedy(turn, 10)  # 49 tokens were computed: three whole blocks
    assert client.ask(turn, max_tokens=10).cached == 48
    assert client.ask(turn[:48], max_tokens=2).cached == 32  # one token at least is computed
    assert client.ask(turn, max_tokens=2, cache_salt=b"somebody else").cached == 0
    assert client.ask(turn, max_tokens=2, adapter_key=b"somebody else").cached == 0  # the same word, of another kind
    stats = loop.stats()
    assert stats["cache_hits"] == 48 + 48 + 32 and stats["cached_tokens"] == 128


def test_choices_share_the_prompt(tiny, opened):
    loop = tiny.open(places=4, blocks=12)
    opened.append(loop)
    client = Client(loop)
    prompt = prompts(1, seed=2, low=50, high=50)[0]
    id = client.submit(prompt, n=4, max_tokens=14)
    client.wait()
    for choice in range(4):  # 4 blocks each would be 16; three are shared
        assert client.answers[id, choice].tokens == tiny.greedy(prompt, 14)
    stats = loop.stats()
    assert stats["preemptions"] == 0 and stats["prompt_tokens"] == 50 and stats["cache_hits"] == 3 * 48


def test_more_choices_than_places(tiny, opened):
    loop = tiny.open(places=2, blocks=12)
    opened.append(loop)
    client = Client(loop)
    prompt = prompts(1, seed=2, low=20, high=20)[0]
    id = client.submit(prompt, n=7, max_tokens=5, temperature=1.0, seed=4)
    client.wait()
    assert len({tuple(client.answers[id, choice].tokens) for choice in range(7)}) > 4


def test_a_seed_says_all(tiny, opened):
    """Alone, in a batch, cut otherwise, and after giving way: the same draws."""
    prompt = prompts(1, seed=8, low=30, high=30)[0]
    fields = dict(max_tokens=20, temperature=0.8, top_p=0.9, seed=(1 << 64) - 5)
    alone = tiny.open()
    crowded = tiny.open(places=4, blocks=14, budget=16, buckets=[16])
    opened += [alone, crowded]
    first = Client(alone).ask(prompt, **fields)
    client = Client(crowded)
    for other in prompts(6, seed=9, low=20, high=40):
        client.submit(other, max_tokens=40)
    id = client.submit(prompt, **fields)
    client.wait()
    assert client.answers[id, 0].tokens == first.tokens
    assert Client(alone).ask(prompt, **{**fields, "seed": 1}).tokens != first.tokens


def test_the_better_priority_goes_first(tiny, opened):
    gate = Gate()
    loop = tiny.open(places=1, blocks=16, masks=gate)
    opened.append(loop)
    client = Client(loop)
    slow, late, urgent = prompts(3, seed=11, low=20, high=20)
    gate.hold(5)
    first = client.submit(slow, max_tokens=80, grammars=[0])
    gate.wait()
    second = client.submit(late, max_tokens=5)
    third = client.submit(urgent, max_tokens=5, priority=-1)
    gate.release()
    ends = []
    while len(ends) < 3:
        for row in loop.poll(10.0):
            client.answers[row[0], row[1]].add(row)
            ends += [row[0]] if row[8] is not None else []
    assert ends == [third, first, second]
    check(tiny, client, {first: (slow, 80), second: (late, 5), third: (urgent, 5)})
    assert loop.stats()["preemptions"] == 1


def test_how_long_a_request_waited_is_told(tiny, opened):
    gate = Gate()
    loop = tiny.open(places=1, masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(1)
    begun = time.monotonic()
    first = client.submit([1, 2, 3], max_tokens=2, grammars=[0])
    gate.wait()
    asking = time.monotonic()
    second = client.submit([4, 5, 6], max_tokens=2, n=2)
    asked = time.monotonic()
    client.poll()
    goes_on = time.monotonic()
    gate.release()
    client.wait()
    assert 0 <= client.answers[first, 0].queued <= asking - begun
    waited = client.answers[second, 0].queued
    assert goes_on - asked <= waited <= time.monotonic() - asking and client.answers[second, 1].queued == waited


def test_a_prompt_leaves_room_for_those_that_answer(tiny, opened):
    loop = tiny.open(places=4, blocks=32, budget=4, buckets=[4])
    opened.append(loop)
    client = Client(loop)
    running = client.submit([1, 2, 3], max_tokens=100)
    long = client.submit(prompts(1, low=100, high=100)[0], max_tokens=2)
    answered, begun = 0, False
    while not begun:
        for row in loop.poll(10.0):  # in order, whenever they are looked at
            client.answers[row[0], row[1]].add(row)
            begun |= row[0] == long
            answered += len(row[2]) if row[0] == running and not begun else 0
    assert answered >= 33  # a token of each step: the prompt takes three at a time
    loop.cancel(running)
    loop.cancel(long)


def test_short_prompts_begin_beside_a_long_one(tiny, opened):
    """The long one takes 14 steps by itself; the others do not wait for that."""
    gate = Gate()
    loop = tiny.open(places=4, blocks=32, budget=8, buckets=[8], masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(1)
    first = client.submit([9], max_tokens=1, grammars=[0])
    gate.wait()
    long = client.submit(prompts(1, low=110, high=110)[0], max_tokens=1)
    short = [client.submit([i, i], max_tokens=1) for i in range(2)]
    gate.release()
    ends = []
    while len(ends) < 4:
        ends += [row[0] for row in loop.poll(10.0) if row[8] is not None]
    assert ends == [first, *short, long]


def test_steps_fill_their_programs(tiny, opened):
    """66 tokens are 64 and 2 in a program for 32, not 128 of which 62 are padding."""
    loop = tiny.open(places=2, blocks=32, budget=128, buckets=[128, 64, 32], step_overhead=8)
    opened.append(loop)
    Client(loop).ask(prompts(1, low=66, high=66)[0], max_tokens=1)
    stats = loop.stats()
    assert stats["steps"] == 2 and stats["padded_tokens"] == 30
    Client(loop).ask(prompts(1, seed=4, low=120, high=120)[0], max_tokens=1)
    assert loop.stats()["steps"] == 3


@pytest.mark.parametrize(("fields", "reason"), [
    ({"prompt": []}, "invalid"), ({"prompt": [260]}, "invalid"), ({"prompt": [-1]}, "invalid"),
    ({"max_tokens": -2}, "invalid"), ({"max_tokens": 1 << 40}, "invalid"), ({"n": 0}, "invalid"),
    ({"logprobs": 21}, "invalid"), ({"temperature": float("nan")}, "invalid"), ({"temperature": -1.0}, "invalid"),
    ({"repetition_penalty": 0.0}, "invalid"), ({"logit_bias": [(260, 1.0)]}, "invalid"), ({"stop": [""]}, "invalid"),
    ({"stop": [3]}, "invalid"), ({"grammars": [1]}, "invalid"), ({"adapter_slot": 0}, "invalid"),
    ({"prompt": [1] * CONTEXT}, "context"), ({"prompt": [1] * 100000}, "context"),
])
def test_refused_at_once(tiny, opened, fields, reason):
    loop = tiny.open()
    opened.append(loop)
    with pytest.raises(Refusal) as caught:
        loop.submit(**{"prompt": [1, 2], **fields})
    assert caught.value.reason == reason and str(caught.value)
    with pytest.raises(TypeError, match="unknown fields"):
        loop.submit([1], maximum=3)
    assert Client(loop).ask([1, 2], max_tokens=2).finish == "length"


def test_what_can_never_fit_the_pool(tiny, opened):
    """The model could take 128 tokens, the cache 48: refused at once, and what comes behind goes on."""
    loop = tiny.open(blocks=3)
    opened.append(loop)
    assert loop.context == 48
    client = Client(loop)
    with pytest.raises(Refusal) as caught:
        client.submit([1] * 48)
    assert caught.value.reason == "context"
    assert client.ask([1] * 47, max_tokens=1).finish == "length"
    prompt = prompts(1, low=20, high=20)[0]
    answer = client.ask(prompt, max_tokens=100)  # as much as there is room for
    assert answer.finish == "context" and answer.tokens == tiny.greedy(prompt, 28)
    assert client.ask(prompt).tokens == answer.tokens
    assert client.ask(prompt, max_tokens=28).finish == "length"
    assert client.ask([1] * 48, max_tokens=0).finish == "length"


def test_too_many_requests(tiny, opened):
    gate = Gate()
    loop = tiny.open(max_requests=3, masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(1)
    for _ in range(3):
        client.submit([1, 2], max_tokens=60, grammars=[0])
    with pytest.raises(Refusal) as caught:
        client.submit([1, 2])
    assert caught.value.reason == "full"
    gate.wait()
    gate.release()
    client.wait()
    client.ask([1], max_tokens=1)


def test_cancelled_wherever_it_is(tiny, opened):
    gate = Gate()
    loop = tiny.open(places=2, blocks=24, budget=2, buckets=[2], masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(3)
    decoding = client.submit([1, 2, 3], max_tokens=100, grammars=[0])
    gate.wait()
    prefilling = client.submit(prompts(1, low=110, high=110)[0], max_tokens=10)  # a token of each step
    gate.release(8)
    gate.wait()
    waiting = client.submit([4], max_tokens=10)
    for id in (waiting, prefilling, decoding):
        loop.cancel(id)
    gate.release()
    client.wait()
    assert [client.answers[id, 0].finish for id in (waiting, prefilling, decoding)] == ["cancelled"] * 3
    assert not client.answers[waiting, 0].tokens and not client.answers[prefilling, 0].tokens
    assert len(client.answers[decoding, 0].tokens) == 8  # within the step
    loop.cancel(decoding)  # it is complete
    loop.cancel(12345)
    assert client.ask([7], max_tokens=3).tokens == tiny.greedy([7], 3)


@pytest.mark.parametrize("choice", [0, 1])
def test_one_choice_is_cancelled(tiny, opened, choice):
    gate = Gate()
    loop = tiny.open(masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(4)
    id = client.submit([1, 2, 3], max_tokens=60, n=2, grammars=[0, 1])
    gate.wait()
    loop.cancel(id, choice)
    loop.cancel(id, 7)
    gate.release()
    client.wait()
    assert client.answers[id, 1 - choice].tokens == tiny.greedy([1, 2, 3], 60)
    ended = client.answers[id, choice]
    assert ended.finish == "cancelled" and len(ended.tokens) < 10
    assert ended.tokens == tiny.greedy([1, 2, 3], len(ended.tokens))


def test_what_a_cancelled_request_computed_can_be_found(tiny, opened):
    gate = Gate()
    loop = tiny.open(places=2, blocks=24, masks=gate)
    opened.append(loop)
    client = Client(loop)
    prompt = prompts(1, low=50, high=50)[0]
    gate.hold(4)
    id = client.submit(prompt, max_tokens=70, grammars=[0])
    gate.wait()
    loop.cancel(id)
    gate.release()
    client.wait()
    assert client.answers[id, 0].finish == "cancelled" and client.ask(prompt, max_tokens=1).cached == 48


def test_random_cancels(tiny, opened):
    """Nobody else's answer changes; the fixture looks at the blocks."""
    loop = tiny.open(places=4, blocks=16, budget=16)
    opened.append(loop)
    client, generator = Client(loop), np.random.default_rng(3)
    kept = {}
    for i, prompt in enumerate(prompts(60, seed=20, high=40)):
        count = int(generator.integers(1, 30))
        id = client.submit(prompt, max_tokens=count, n=1 + i % 2)
        if i % 3 == 0:
            loop.cancel(id)
        elif i % 3 == 1:
            kept[id] = (prompt, count)
        else:
            threading.Timer(float(generator.uniform(0, 0.2)), loop.cancel, [id]).start()
        client.poll(0)
    client.wait()
    check(tiny, client, kept)


def test_drain(tiny, opened):
    gate = Gate()
    loop = tiny.open(masks=gate)
    opened.append(loop)
    client = Client(loop)
    gate.hold(2)
    client.submit([1, 2, 3], max_tokens=60, grammars=[0])
    client.submit([1, 2], max_tokens=60)
    assert not loop.drain(0.0)
    with pytest.raises(Refusal) as caught:
        client.submit([1])
    assert caught.value.reason == "draining"
    gate.wait()
    gate.release()
    assert loop.drain(60.0)
    client.wait()
    assert {answer.finish for answer in client.answers.values()} == {"length"}


def test_stop(tiny):
    gate = Gate()
    loop = tiny.open(masks=gate)
    client = Client(loop)
    gate.hold(3)
    for _ in range(6):
        client.submit([1, 2, 3], max_tokens=100, grammars=[0])
    gate.wait()
    threading.Timer(0.05, gate.release).start()
    loop.stop()  # waits for the step
    client.wait()
    assert {answer.finish for answer in client.answers.values()} == {"cancelled"}
    with pytest.raises(Refusal) as caught:
        client.submit([1])
    assert caught.value.reason == "dead"
    stats = loop.stats()
    assert not stats["alive"] and stats["dead"] is None and stats["blocks"]["used"] == 0
    assert loop.poll(0.0) == []
    loop.stop()


def test_a_loop_is_dropped_while_it_runs(tiny):
    loop = tiny.open()
    loop.submit([1, 2, 3], max_tokens=100)
    del loop


def test_programs_that_do_not_fit(tiny):
    loop = tiny.open(start=False)
    with pytest.raises(EngineError, match="context must hold"):
        type(loop)(places=1, num_blocks=1, context=1, token_budget=1, vocab=10)
    with pytest.raises(EngineError, match="token_budget 2 is less than the 4 places"):
        tiny.open(budget=2)
    with pytest.raises(EngineError, match="no program takes prompt chunks beside a token of each of 4"):
        tiny.open(rows=2)
    with pytest.raises(EngineError, match="no programs"):
        type(loop)(places=1, num_blocks=1, context=9, token_budget=1, vocab=10).start()
