"""The loop, on a tiny model: the same tokens as the simple decoder's, however they are batched."""

from __future__ import annotations

import pytest

from .conftest import Client, prompts


def test_one_request(tiny, opened):
    loop = tiny.open()
    opened.append(loop)
    prompt = prompts(1)[0]
    answer = Client(loop).ask(prompt, max_tokens=8)
    assert answer.tokens == tiny.greedy(prompt, 8)
    assert (answer.finish, answer.stop, answer.error) == ("length", None, None)
