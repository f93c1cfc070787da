"""`surogate bench serve` over a real server of a tiny random model, in a process of its own."""

from __future__ import annotations

import json

import pytest
from surogate_core.cli.app import app
from surogate_serve.bench.load import Load, Prompts, burst_figures
from typer.testing import CliRunner


def lines(*args: str) -> list[dict]:
    result = CliRunner().invoke(app, ["bench", "serve", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


SMALL = ("--prompt-tokens", "40", "--output-tokens", "6", "--threads", "1")


def test_closed_loop_shared_prefixes_and_burst():
    first, second = lines("tiny", "--concurrency", "1,3", "--requests", "5", "--shared-tokens", "32", *SMALL)
    assert (first["loop"], first["concurrency"], second["concurrency"]) == ("closed", 1, 3)
    for found in (first, second):
        assert (found["requests"], found["failed"], found["output_tokens"], found["prompt_tokens"]) == (5, 0, 30, 200)
        assert found["first_token_ms"]["p50"] <= found["request_ms"]["p50"]
    assert first["cached_tokens"] >= 4 * 32  # all but the first
    (burst,) = lines("tiny", "--concurrency", "2", "--burst", "--repetitions", "20", *SMALL)
    assert burst["server_processor_seconds"] > 0  # which comes in ticks of 10 ms: five requests may need none
    assert burst["prefill_tokens_per_second"] > 0 and burst["one_token_ms"] > 0
    assert ("decode_not_told" in burst) == (burst["decode_tokens_per_second"] is None)  # a busy machine tells none


def test_loads_of_one_server_have_prompts_of_their_own_behind_what_they_share():
    load = Load("m", prompt_tokens=40, shared=8)
    one, three = (json.loads(Prompts(load, clients).body(1))["prompt"] for clients in (1, 3))
    assert one[:8] == three[:8] and one[8:24] != three[8:24] and len(one) == len(three) == 40


@pytest.mark.parametrize(
    "ones, wholes, decode",
    [
        ([0.5], [1.0], 20.0),
        ([0.5, 0.4, 0.6], [1.1, 5.0, 1.0], 10 / 0.6),
        ([0.5], [0.4], None),  # noise made the long burst the shorter one
        ([0.5], [0.5], None),
        ([0.5, 0.5, 1.2], [1.0, 1.1, 1.2], None),  # medians apart, and yet a burst of one token took longer
    ],
)
def test_a_bursts_decode_rate_is_told_only_where_it_stands_out(ones, wholes, decode):
    figures = burst_figures(Load("m", prompt_tokens=40, output_tokens=6), 2, ones, wholes)
    assert figures["decode_tokens_per_second"] == (None if decode is None else pytest.approx(decode, abs=0.05))
    assert ("decode_not_told" in figures) == (decode is None)
    assert figures["prefill_tokens_per_second"] == pytest.approx(2 * 40 / sorted(ones)[len(ones) // 2], abs=0.05)


def test_open_loop():
    (found,) = lines("tiny", "--rate", "50", "--requests", "6", "--concurrency", "1", *SMALL)
    assert (found["loop"], found["rate"], found["requests"]) == ("open", 50, 6)


@pytest.mark.parametrize(
    "args, reason",
    [
        (["http://127.0.0.1:9", "--concurrency", "1"], "does not tell its models"),
        (["tiny", "--concurrency", "0"], "not numbers of clients"),
        (["tiny", "--shared-tokens", "900"], "do not fit a prompt"),
        (["tiny", "--burst", "--rate", "1"], "two kinds of load"),
    ],
)
def test_bad_words(args, reason):
    result = CliRunner().invoke(app, ["bench", "serve", *args])
    assert result.exit_code == 2 and reason in result.output.replace("\n", " ")
