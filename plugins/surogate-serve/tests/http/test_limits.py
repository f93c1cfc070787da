"""Bodies and token ids within limits, beside Python's own reader of JSON."""

from __future__ import annotations

import json
import random

import pytest

from surogate_serve.http.limits import Limits, parse_json
from surogate_serve.http.prompts import prompts_of
from surogate_serve.types import Refused

TEXTS = ["", "plain", "\u2028 \U0001f600 \x7f", 'quote " and \\ back', "1e999", "9" * 400, "e+0005"]
NUMBERS = [0, -0.0, 1.5, 1e22, 5e-324, 1.7976931348623157e308, 2**63, -(2**70), 10**400]


def drawn(draw, depth=0):
    kind = draw.randrange(6 if depth < 4 else 4)
    if kind == 0:
        return draw.choice(TEXTS)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice([None, True, False])
    if kind == 3:
        return [draw.randrange(1 << 17) for _ in range(draw.randrange(40))]
    if kind == 4:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(TEXTS) + str(i): drawn(draw, depth + 1) for i in range(draw.randrange(4))}


def test_bodies_are_read_as_python_reads_them():
    draw = random.Random(0)
    for _ in range(300):
        body = json.dumps({"a": drawn(draw), "b": drawn(draw)}, ensure_ascii=draw.random() < 0.5).encode()
        # repr also tells 1 from 1.0 and True, and 0.0 from -0.0
        assert repr(parse_json(body, Limits())) == repr(json.loads(body)), body


LARGE = ["1e309", "1E+400", "-1e0999", "1.5e1000", "9" * 310 + ".0", "9" * 400 + "e1", "9" * 5000]
NO_OBJECTS = ['{"a": NaN}', '{"a": -Infinity}', '{"a": 01}', '{"a": 1.}', '{"a": 1} x', "{'a': 1}", "[1]"]


@pytest.mark.parametrize("number", LARGE)
def test_numbers_that_are_none(number):
    for text in (f'{{"a": {number}}}', f'{{"b": [[1, {number}]]}}'):
        with pytest.raises(Refused) as caught:
            parse_json(text.encode(), Limits())
        assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_what_is_no_json_object(body):
    with pytest.raises(Refused) as caught:
        parse_json(body.encode(), Limits())
    assert caught.value.code == "invalid_json"


def test_halves_of_pairs_name_their_place():
    with pytest.raises(Refused) as caught:
        parse_json(b'{"a": ["x", "\\ud800"]}', Limits())
    assert (caught.value.code, caught.value.param) == ("invalid_text", "a[1]")


class Words:
    vocab_size = 1000


def test_token_ids_are_whole_numbers_of_the_vocabulary():
    given = [0, 999, 5]
    assert prompts_of(given, Words(), "prompt", 9) == prompts_of([given], Words(), "prompt", 9) == [given]
    for wrong in (1000, -1, True, 1.0, "1", None, 2**32, 2**70, [1]):
        with pytest.raises(Refused) as caught:
            prompts_of([3, 4, wrong, 5], Words(), "prompt", 9)
        assert caught.value.param == "prompt[2]", wrong
