"""Everything at once: requests of all kinds come, go and are cancelled, in a cache that is too small for them."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Client, Gate, Model, prompts
from .test_loop_device import ahead, device  # noqa: F401  (fixtures)


def request(generator: np.random.Generator, shared: list[int]) -> tuple[list[int], dict]:
    """A prompt, often one that begins as others do, and what else is asked for."""
    prompt = generator.integers(0, 256, generator.integers(1, 40)).tolist()
    if generator.random() < 0.5:
        prompt = shared[: generator.integers(1, len(shared))] + prompt
    fields = {"max_tokens": int(generator.integers(0, 30))}
    for share, name, value in (
        (0.3, "temperature", float(generator.choice([0.5, 1.5]))), (0.3, "seed", int(generator.integers(1 << 60))),
        (0.2, "repetition_penalty", 1.2), (0.2, "logit_bias", [(int(generator.integers(256)), 3.0)]),
        (0.2, "logprobs", int(generator.integers(0, 4))), (0.1, "prompt_logprobs", True), (0.1, "min_tokens", 5),
        (0.2, "stop", ["e", "ab"]), (0.2, "stop_token_ids", [int(token) for token in generator.integers(0, 256, 20)]),
        (0.2, "priority", int(generator.integers(-2, 3))), (0.1, "cache_salt", b"salt"),
    ):
        if generator.random() < share:
            fields[name] = value
    if generator.random() < 0.15:
        fields |= {"thinking_budget": int(generator.integers(0, 6)), "thinking_end": [250, 251]}
    fields["n"] = int(generator.choice([1, 1, 1, 2, 5]))
    if generator.random() < 0.15:
        fields["grammars"] = [0] * fields["n"]
    return prompt, fields


def mix(loop, seed: int, count: int) -> None:
    generator, client = np.random.default_rng(seed), Client(loop)
    shared = prompts(1, seed, 50, 50)[0]
    asked = {}
    for _ in range(count):
        prompt, fields = request(generator, shared)
        asked[id := client.submit(prompt, **fields)] = prompt, fields
        if generator.random() < 0.2:
            loop.cancel(int(generator.integers(0, id + 1)))
        if generator.random() < 0.3:
            client.poll(0.001)
    client.wait()
    for (id, _), answer in client.answers.items():
        prompt, fields = asked[id]
        assert answer.finish in ("stop", "length", "context", "cancelled"), answer.error
        assert len(answer.tokens) <= fields["max_tokens"]
        if "logprobs" in fields:
            assert [row[0] for row in answer.logprobs] == answer.tokens
        if answer.finish == "length":
            assert len(answer.tokens) == min(fields["max_tokens"], 128 - len(prompt))
    assert loop.stats()["failures"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_on_the_host(tiny, opened, seed):
    loop = tiny.open(places=6, blocks=16, budget=24, buckets=[24, 12], masks=Gate())
    opened.append(loop)
    mix(loop, seed, 80)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_on_a_device(ahead: Model, opened, run_ahead):  # noqa: F811
    loop = ahead.open(places=6, blocks=16, budget=24, buckets=[24, 12], masks=Gate(), run_ahead=run_ahead)
    opened.append(loop)
    mix(loop, 7, 60)
