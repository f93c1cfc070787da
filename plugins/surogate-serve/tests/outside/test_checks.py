"""What the tests of vLLM's entry points ask of a server, asked of ours in our own words, over HTTP."""

from __future__ import annotations

import httpx
import pytest

HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
JSON_ROUTES = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/v1/embeddings", "/tokenize", "/detokenize",
               "/v1/messages/count_tokens", "/v1/responses/input_tokens")  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ask(process):
    with httpx.Client(base_url=process.url, headers={"Authorization": "Bearer secret"}, timeout=60) as client:
        yield lambda path, **body: client.post(path, json={"model": "tiny"} | body)


def chat(ask, **body):
    return ask(CHAT, **({"messages": HI, "max_tokens": 8, "temperature": 0} | body))


def complete(ask, **body):
    return ask(COMPLETIONS, **({"prompt": "a river", "max_tokens": 8, "temperature": 0} | body))


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize("body", [b"[]", b'"text"', b"1", b"null", b"true", b""])
def test_bodies_that_are_no_objects(process, path, body):
    headers = {"Authorization": "Bearer secret", "content-type": "application/json"}
    answer = httpx.post(process.url + path, content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_log_probabilities_from_none_to_twenty(ask):
    assert chat(ask, logprobs=False).json()["choices"][0]["logprobs"] is None
    for top in (0, 5, 20):
        content = chat(ask, logprobs=True, top_logprobs=top).json()["choices"][0]["logprobs"]["content"]
        assert content and all(len(each["top_logprobs"]) == top for each in content)
    for stream in (False, True):
        assert chat(ask, logprobs=True, top_logprobs=21, stream=stream).status_code == 400
    assert chat(ask, top_logprobs=3).status_code == 400  # means nothing without logprobs
    assert chat(ask).status_code == 200


def test_the_greedy_token_is_the_likeliest(ask):
    for each in chat(ask, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]:
        assert each["logprob"] == max(other["logprob"] for other in each["top_logprobs"])


def test_stream_options_mean_nothing_without_a_stream(ask):
    assert chat(ask, stream_options={"include_usage": True}).status_code == 400
    assert complete(ask, stream_options={"include_usage": True}).status_code == 400


@pytest.mark.parametrize("bias", [{"-1": 1}, {"100000": 1}, {"a": 1}, {"5": 101}, {"5": "much"}])
def test_biases_of_tokens_that_there_are_not(ask, bias):
    answer = chat(ask, logit_bias=bias)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("logit_bias")


def test_a_bias_decides(ask):
    assert chat(ask, logit_bias={"65": 100}).json()["choices"][0]["message"]["content"]
    tokens = complete(ask, logit_bias={"65": 100}, return_token_ids=True, max_tokens=3).json()["choices"][0]["token_ids"]
    assert tokens == [65] * 3


@pytest.mark.parametrize("ids", [[-1], [100000], ["a"], 5])
def test_stop_tokens_that_there_are_not(ask, ids):
    assert chat(ask, stop_token_ids=ids).status_code == 400


@pytest.mark.parametrize("prompt", [[], [[]], [100000], [[5], [100000]], [1, "a"], {}, [-1]])
def test_prompts_that_are_none(ask, prompt):
    assert complete(ask, prompt=prompt).status_code == 400


def test_several_prompts_are_each_alone(ask):
    prompts = ["a river", "over stones", "and under"]
    together = complete(ask, prompt=prompts).json()
    assert [each["index"] for each in together["choices"]] == [0, 1, 2]
    alone = [complete(ask, prompt=each).json()["choices"][0]["text"] for each in prompts]
    assert [each["text"] for each in together["choices"]] == alone


def test_offsets_lie_in_the_text(ask):
    choice = complete(ask, echo=True, logprobs=1).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:7] == list(range(7)) and offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])


def test_tokens_in_tokens_out(ask):
    ids = ask("/tokenize", prompt="a river").json()["tokens"]
    by_text, by_ids = complete(ask, return_token_ids=True).json(), complete(ask, prompt=ids, return_token_ids=True).json()
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]
    assert by_text["usage"]["prompt_tokens"] == by_ids["usage"]["prompt_tokens"]
    assert ask("/detokenize", tokens=ids).json()["prompt"] == "a river"


def test_minimum_and_end(ask):
    for ignore in ({"ignore_eos": True}, {"min_tokens": 30}):
        answer = complete(ask, temperature=1, seed=5, max_tokens=30, **ignore).json()
        assert answer["usage"]["completion_tokens"] == 30


def test_stop_strings_in_and_out(ask):
    whole = complete(ask, max_tokens=30, ignore_eos=True, logit_bias={str(id): -100 for id in range(128, 256)}).json()
    text = whole["choices"][0]["text"]
    fields = {"max_tokens": 30, "ignore_eos": True, "logit_bias": {str(id): -100 for id in range(128, 256)}}
    stop = text[4:7]
    out = complete(ask, stop=stop, **fields).json()["choices"][0]
    assert out["text"] == text[: text.index(stop)] and out["finish_reason"] == "stop"
    kept = complete(ask, stop=stop, include_stop_str_in_output=True, **fields).json()["choices"][0]
    assert kept["text"] == out["text"] + stop


def test_tool_fields_that_are_null(ask):
    assert chat(ask, tools=None, tool_choice=None).status_code == 200
    assert chat(ask, tool_choice="required").status_code == 400  # of which tools?


def test_forms_that_are_none(ask):
    for form in ({"regex": "("}, {"choice": []}, {"json": {"type": "nonsense"}}, {"regex": "a", "choice": ["b"]}):
        assert chat(ask, structured_outputs=form).status_code == 400
    assert chat(ask).status_code == 200


def test_choices_differ_and_seeds_do_not(ask):
    fields = {"temperature": 1, "n": 4, "max_tokens": 12, "ignore_eos": True}
    first, again = (chat(ask, seed=3, **fields).json() for _ in range(2))
    texts = [[choice["message"]["content"] for choice in each["choices"]] for each in (first, again)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    assert first["usage"]["completion_tokens"] == 48


def test_a_prompt_that_is_found_again_is_told(ask):
    long = [{"role": "user", "content": "the river ran over stones and under a bridge"}]
    first, second = (chat(ask, messages=long).json() for _ in range(2))
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 48 and cached % 16 == 0 and first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    message = ask(MESSAGES, messages=long, max_tokens=4).json()["usage"]
    assert message["input_tokens"] + message["cache_read_input_tokens"] == second["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("key", "value"), [("max_tokens", -1), ("temperature", -0.1), ("top_p", 1.1),
    ("top_k", -2), ("min_p", 2), ("n", 0), ("presence_penalty", 3), ("repetition_penalty", 0), ("seed", "x"),
    ("stop", ["a"] * 99), ("max_tokens", 1.5), ("messages", "Hi"), ("stream", "perhaps")])  # fmt: skip
def test_values_out_of_range_are_named(ask, key, value):
    answer = chat(ask, **{key: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].split(".")[0].split("[")[0] == key


def test_routes_that_only_others_have(process):
    headers = {"Authorization": "Bearer secret"}
    for path in ("/v1/score", "/pooling", "/invocations", "/v1/audio/transcriptions"):
        assert httpx.post(process.url + path, json={}, headers=headers).status_code == 404
    assert httpx.get(process.url + CHAT, headers=headers).status_code == 405
