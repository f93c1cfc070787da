"""Completions, embeddings, token routes: by the official client and by hand."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import openai
import pytest
from conftest import wait_for
from fake import FakeModel


def client(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


def post(server, path, **body):
    return httpx.post(server.url + path, json={"model": "fake"} | body)


def test_default_of_sixteen_tokens(server):
    server.model.script = lambda generation, index: ["a"] * 100
    reply = client(server).completions.create(model="fake", prompt="Hi")
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.choices[0].text == "a" * 16 and reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 16 and server.model.seen[0].max_tokens == 16


def test_prompts_of_every_kind(server):
    ids = server.model.tokenizer.encode("one two")
    for prompt, count in (("one two", 1), (["one two", "three"], 2), (ids, 1), ([ids, ids[:1]], 2)):
        reply = client(server).completions.create(model="fake", prompt=prompt, n=2)
        assert [choice.index for choice in reply.choices] == list(range(2 * count))
        assert all(choice.text == "Hello there!" for choice in reply.choices)
    assert list(server.model.seen[0].prompt) == ids == list(server.model.seen[3].prompt)


def test_several_prompts_stream(server):
    server.model.script = lambda generation, index: [str(len(generation.prompt)), str(index)]
    texts, finishes = {}, {}
    for chunk in client(server).completions.create(model="fake", prompt=["a b", "c"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                finishes[choice.index] = finishes.get(choice.index, 0) + 1
    assert texts == {0: "20", 1: "21", 2: "10", 3: "11"} and set(finishes.values()) == {1} and len(finishes) == 4


def test_echo_with_logprobs_as_harnesses_ask(server):
    reply = post(
        server, "/v1/completions", prompt="one two three", max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    ).json()
    choice = reply["choices"][0]
    assert choice["text"] == "one two threeHello"
    lists = choice["logprobs"]
    assert lists["tokens"] == ["one", " two", " three", "Hello"] and lists["text_offset"] == [0, 3, 7, 13]
    assert lists["token_logprobs"] == [None, -0.5, -0.5, -0.5] and lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][1][" two"] == -0.5
    assert server.model.seen[0].prompt_logprobs


def test_no_tokens_with_echo(server):
    reply = post(server, "/v1/completions", prompt="one two", max_tokens=0, echo=True).json()
    assert reply["choices"][0]["text"] == "one two" and reply["usage"]["completion_tokens"] == 0
    assert not server.model.seen
    reply = post(server, "/v1/completions", prompt="one two", max_tokens=0, echo=True, logprobs=0).json()
    assert reply["choices"][0]["text"] == "one two" and reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["logprobs"]["tokens"] == ["one", " two"] and reply["usage"]["completion_tokens"] == 0
    reply = post(server, "/v1/completions", prompt="one two", max_tokens=0, echo=True, logprobs=0, n=2).json()
    assert reply["usage"]["prompt_tokens"] == 2 and [each["text"] for each in reply["choices"]] == ["one two"] * 2
    stream = post(server, "/v1/completions", prompt="one two", max_tokens=0, echo=True, stream=True).text
    assert json.loads(stream.split("\n\n")[0].removeprefix("data: "))["choices"][0]["text"] == "one two"


def test_the_log_counts_what_usage_does_where_nothing_is_generated(serve, tmp_path):
    server = serve(request_log=tmp_path / "log")
    for logprobs in (None, 0):
        body = {"prompt": "one two", "max_tokens": 0, "echo": True, "logprobs": logprobs}
        usage = post(server, "/v1/completions", **body).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    wait_for(lambda: (tmp_path / "log").read_text().count("\n") == 2)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    counted = [(line["prompt_tokens"], line["completion_tokens"], line["finish"]) for line in lines]
    assert counted == [(2, 0, ["length"])] * 2
    assert 'surogate_generation_tokens_total{model_name="fake"} 0.0' in httpx.get(server.url + "/metrics").text


def test_best_of_keeps_the_likeliest(server):
    from surogate_serve.types import TokenLogprob

    server.model.script = lambda generation, index: [f"c{index}"]
    plain = server.model._logprob
    likelihood = {server.model.tokenizer.id_of(f"c{index}"): -1.0 * abs(index - 2) for index in range(4)}
    server.model._logprob = lambda token, n: TokenLogprob(token, likelihood.get(token, plain(token, n).logprob))
    reply = post(server, "/v1/completions", prompt="x", best_of=4, n=1, max_tokens=1).json()
    assert [choice["text"] for choice in reply["choices"]] == ["c2"] and reply["choices"][0]["logprobs"] is None
    assert post(server, "/v1/completions", prompt="x", best_of=4, stream=True).status_code == 400
    assert post(server, "/v1/completions", prompt="x", best_of=1, n=2).json()["error"]["param"] == "best_of"


def test_usage_and_token_ids_of_a_stream(server):
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    parts = [part.removeprefix("data: ") for part in post(server, "/v1/completions", **body).text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    got = [json.loads(part) for part in parts[:-1]]
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 4
    assert all(each["usage"] is None for each in got[:-1])
    assert sum(len(each["choices"][0]["token_ids"]) for each in got[:-1]) == 4


def test_what_completions_refuse(server):
    for body, status, param in (
        ({"prompt": "x", "suffix": "y"}, 501, "suffix"),
        ({"prompt": []}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt[1]"),
        ({"prompt": [10**9]}, 400, "prompt[0]"),
        ({"prompt": [-1]}, 400, "prompt[0]"),
        ({"prompt": [True]}, 400, "prompt[0]"),
        ({"prompt": ["x"] * 1025}, 400, "prompt"),
        ({"prompt": ["x"] * 100, "n": 20}, 400, "prompt"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "x", "n": 129}, 400, "n"),
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": [20] * 4096}, 400, "prompt"),
    ):
        answer = post(server, "/v1/completions", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    assert client(server).models.list().data[0].id == "fake"  # and the server goes on


def test_embeddings(server):
    reply = client(server).embeddings.create(model="fake", input=["a b c", "d"])  # the client asks for base64
    assert [row.index for row in reply.data] == [0, 1] and len(reply.data[0].embedding) == 4
    assert np.isclose(np.linalg.norm(reply.data[0].embedding), 1, atol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 4
    floats = post(server, "/v1/embeddings", input="a b c").json()["data"][0]["embedding"]
    assert np.array_equal(np.float32(floats), np.float32(reply.data[0].embedding))
    text = post(server, "/v1/embeddings", input="a b c", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(text), "<f4"), np.float32(floats))
    short = post(server, "/v1/embeddings", input="a b c", dimensions=2).json()["data"][0]["embedding"]
    assert len(short) == 2 and np.isclose(np.linalg.norm(short), 1, atol=1e-6)


def test_what_embeddings_refuse(server):
    too_long = post(server, "/v1/embeddings", input=[20] * 5000)
    error = too_long.json()["error"]
    assert too_long.status_code == 400 and error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000, 4096)
    assert post(server, "/v1/embeddings", input=[20] * 5000, truncate_prompt_tokens=-1).status_code == 200
    cut = [post(server, "/v1/embeddings", input=given, truncate_prompt_tokens=4).json()["data"][0]["embedding"]
           for given in ([20] * 9 + [5], [20, 20, 20, 5], [20] * 9, [20] * 4)]  # 5 ends texts, and stays behind them
    assert cut[0] == cut[1] != cut[2] == cut[3]
    for body, param in (
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x", "dimensions": 5}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ):
        answer = post(server, "/v1/embeddings", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    with pytest.raises(openai.BadRequestError):
        client(server).embeddings.create(model="fake", input=[])


def test_tokenize_and_back(server):
    tokens = post(server, "/tokenize", prompt="one two<|im_end|>", return_token_strs=True).json()
    assert tokens["count"] == 3 and tokens["token_strs"] == ["one", " two", "<|im_end|>"]
    assert httpx.post(server.url + "/tokenize", json={"content": "one"}).json()["tokens"] == tokens["tokens"][:1]
    text = post(server, "/detokenize", tokens=tokens["tokens"]).json()
    assert text["prompt"] == text["content"] == "one two<|im_end|>"
    chat = post(server, "/tokenize", messages=[{"role": "user", "content": "Hi"}]).json()
    assert chat["count"] == len(chat["tokens"]) > 3
    literal = post(server, "/tokenize", prompt="<|im_end|>", parse_special=False).json()["tokens"]
    assert server.model.tokenizer.added_tokens["<|im_end|>"] not in literal
    assert post(server, "/tokenize").status_code == 400
    assert post(server, "/detokenize", tokens=["a"]).json()["error"]["param"] == "tokens"
    assert post(server, "/detokenize", tokens=[]).json()["prompt"] == ""


def test_models_and_adapters(server):
    server.model.adapters.append("tuned")
    listed = client(server).models.list().data
    assert [each.id for each in listed] == ["fake", "tuned"] and listed[1].parent == "fake"
    assert client(server).models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError) as caught:
        client(server).models.retrieve("nothing")
    assert caught.value.code == "model_not_found"
    client(server).completions.create(model="tuned", prompt="x")
    assert server.model.seen[-1].adapter == "tuned"


def test_what_a_run_made_is_what_answers(serve):
    """It is an adapter, and its base has a name of its own."""
    server = serve(FakeModel("base"), admin_keys=("boss",))
    server.model.adapters, server.model.main = ["run"], ("run",)
    listed = client(server).models.list().data
    assert [(each.id, each.parent) for each in listed] == [("run", "base"), ("base", None)]
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    for named, adapter in (({}, "run"), ({"model": "run"}, "run"), ({"model": "base"}, None)):
        assert httpx.post(server.url + "/v1/chat/completions", json=named | asked).status_code == 200
        assert server.model.seen[-1].adapter == adapter
    refused = httpx.post(server.url + "/v1/embeddings", json={"input": "Hi"})
    assert refused.status_code == 501 and "name 'base'" in refused.json()["error"]["message"]
    body, boss = {"name": "more", "path": "/somewhere"}, {"x-api-key": "boss"}
    assert httpx.post(server.url + "/admin/adapters", json=body, headers=boss).json()["model"] == "base"
    assert [each.id for each in client(server).models.list().data] == ["run", "base", "more"]


def test_adapter_administration(serve):
    server = serve(api_keys=("user",), admin_keys=("boss",))
    user, boss = {"authorization": "Bearer user"}, {"x-api-key": "boss"}
    body = {"name": "tuned", "path": "/somewhere"}
    url = server.url + "/admin/adapters"
    assert httpx.post(url, json=body).status_code == httpx.post(url, json=body, headers=user).status_code == 401
    assert httpx.post(url, json=body, headers=boss).json() == {"name": "tuned", "model": "fake"}
    assert httpx.get(url, headers=boss).json()["adapters"] == [{"name": "tuned", "model": "fake"}]
    assert httpx.post(url, json=body | {"name": "fake"}, headers=boss).status_code == 400
    assert httpx.post(url, json=body | {"name": "a b"}, headers=boss).json()["error"]["param"] == "name"
    assert httpx.delete(url + "/tuned", headers=boss).status_code == 200
    assert httpx.delete(url + "/tuned", headers=boss).status_code == 404
    assert httpx.get(server.url + "/stats", headers=user).json()["models"]["fake"]["kv_usage"] == 0.25
    assert httpx.get(serve().url + "/admin/adapters").json()["error"]["code"] == "admin_disabled"
