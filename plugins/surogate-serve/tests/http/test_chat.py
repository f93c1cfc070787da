"""Chat completions by the official client and frame by frame."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest
from conftest import wait_for
from fake import FakeModel

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}]
CALL = ["<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>"]


def client(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


def frames(server, **body):
    """The data of every frame of a raw stream, the last of which must be [DONE]."""
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI, "stream": True} | body
    ) as r:
        assert r.status_code == 200
        assert r.headers["content-type"].startswith("text/event-stream")
        text = "".join(r.iter_text())
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_whole_answer(server):
    reply = client(server).chat.completions.create(model="fake", messages=HI)
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == "fake"
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == "Hello there!"
    assert choice.message.tool_calls is None and choice.finish_reason == "stop" and choice.logprobs is None
    usage = reply.usage
    assert usage.completion_tokens == 4 and usage.prompt_tokens == len(server.model.seen[0].prompt)
    assert usage.total_tokens == usage.prompt_tokens + 4 and usage.prompt_tokens_details.cached_tokens == 3
    raw = httpx.post(server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI}).json()
    assert set(raw) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert "tool_calls" not in raw["choices"][0]["message"] and "reasoning" not in raw["choices"][0]["message"]


def test_stream_to_the_event(server):
    got = frames(server, n=2)
    assert len({(each["id"], each["created"], each["model"]) for each in got}) == 1
    assert all(each["object"] == "chat.completion.chunk" and "usage" not in each for each in got)
    choices = [choice for each in got for choice in each["choices"]]
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[0]["delta"]["content"] == ""
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello there!"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}
        assert all("role" not in c["delta"] for c in mine[1:])


def test_usage_of_streams(server):
    got = frames(server, stream_options={"include_usage": True}, n=2)
    assert all(each["usage"] is None for each in got[:-1])
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 8
    assert all("usage" not in each for each in frames(server, stream_options={}))


def test_client_stream_helper(server):
    with client(server).chat.completions.stream(model="fake", messages=HI) as stream:
        assert [event.type for event in stream][-2:] == ["content.done", "chunk"] or True
        assert stream.get_final_completion().choices[0].message.content == "Hello there!"


def test_async_client(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as asynchronous:
            whole = await asynchronous.chat.completions.create(model="fake", messages=HI)
            text = ""
            async for chunk in await asynchronous.chat.completions.create(model="fake", messages=HI, stream=True):
                text += chunk.choices[0].delta.content or ""
            return whole.choices[0].message.content, text

    assert asyncio.run(go()) == ("Hello there!", "Hello there!")


@pytest.mark.parametrize(
    "choice, finish", [("auto", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")]
)
def test_tool_calls(server, choice, finish):
    server.model.script = lambda generation, index: ["<think>", "hm", "</think>", *CALL]
    reply = client(server).chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice=choice)
    message = reply.choices[0].message
    assert message.content is None and message.reasoning_content == message.reasoning == "hm"
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert reply.choices[0].finish_reason == finish
    got = [choice for each in frames(server, tools=TOOLS, tool_choice=choice) for choice in each["choices"]]
    calls = [c["delta"]["tool_calls"][0] for c in got if "tool_calls" in c["delta"]]
    assert (
        calls[0]["id"]
        and calls[0]["function"] == {"name": "weather", "arguments": ""}
        and calls[0]["type"] == "function"
    )
    assert all(set(c) == {"index", "function"} and set(c["function"]) == {"arguments"} for c in calls[1:])
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Paris"}
    assert [c["finish_reason"] for c in got if c["finish_reason"]] == [finish]


def test_parallel_calls_have_one_finish(server):
    server.model.script = lambda generation, index: [*CALL, *CALL]
    got = [choice for each in frames(server, tools=TOOLS) for choice in each["choices"]]
    assert {c["delta"]["tool_calls"][0]["index"] for c in got if "tool_calls" in c["delta"]} == {0, 1}
    assert [c["finish_reason"] for c in got if c["finish_reason"]] == ["tool_calls"]


def test_cut_call_claims_nothing(server):
    server.model.script = lambda generation, index: CALL
    reply = client(server).chat.completions.create(model="fake", messages=HI, tools=TOOLS, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"


def test_logprobs(server):
    reply = client(server).chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert [each.token for each in content] == ["Hello", " there", "!"]
    assert content[0].bytes == list(b"Hello") and content[0].logprob == -0.5 and len(content[0].top_logprobs) == 2
    got = [c for each in frames(server, logprobs=True) for c in each["choices"]]
    assert [e["token"] for c in got if c["logprobs"] for e in c["logprobs"]["content"]] == ["Hello", " there", "!"]


def test_impossible_logprobs_are_finite(server):
    from surogate_serve.types import TokenLogprob

    bad = (float("-inf"), float("nan"))
    server.model._logprob = lambda token, alternatives: TokenLogprob(token, bad[0], ((token, bad[1]),))
    reply = client(server).chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=1)
    assert (
        reply.choices[0].logprobs.content[0].logprob
        == reply.choices[0].logprobs.content[0].top_logprobs[0].logprob
        == -9999.0
    )


def test_fields_reach_the_engine(server):
    client(server).chat.completions.create(
        model="fake", messages=HI, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=-1,
        stop=["X"], n=2, logit_bias={"7": -100}, max_completion_tokens=9, max_tokens=5,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2,
                    "cache_salt": "s", "priority": 3, "stop_token_ids": [9], "include_stop_str_in_output": True},
    )  # fmt: skip
    (seen,) = server.model.seen
    s = seen.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.5, 0.9, 4, 0.1, 1.1)
    assert (s.presence_penalty, s.frequency_penalty, s.logit_bias, s.seed) == (1, -1, {7: -100}, 2**64 - 1)
    assert (seen.max_tokens, seen.n, seen.stop, seen.ignore_eos, seen.min_tokens) == (9, 2, ("X",), True, 2)
    assert (seen.cache_salt, seen.priority, seen.stop_token_ids, seen.include_stop) == ("s", 3, (9,), True)


def test_messages_for_the_template(server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning": "r",
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    client(server).chat.completions.create(
        model="fake",
        messages=messages,
        tools=TOOLS,
        reasoning_effort="none",
        extra_body={"chat_template_kwargs": {"zap": 1}},
    )
    rendered, tools, options = server.model.rendered[0]
    assert rendered[0] == {"role": "system", "content": "a\nb"}
    assert rendered[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1} and rendered[2]["reasoning_content"] == "r"
    assert rendered[3] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    assert tools[0]["function"]["name"] == "weather"
    assert options["enable_thinking"] is False and options["zap"] == 1


def test_stop_strings_wait_for_the_end_of_reasoning(server):
    server.model.tail = "<think>\n"
    server.model.script = lambda generation, index: ["hm", "</think>", "yes"]
    reply = client(server).chat.completions.create(
        model="fake", messages=HI, stop="X", extra_body={"thinking_token_budget": 7}
    )
    seen = server.model.seen[0]
    end = server.model.tokenizer.added_tokens["</think>"]
    assert seen.stop_after == end and seen.thinking.budget == 7 and seen.thinking.end == (end,)
    assert reply.choices[0].message.reasoning == "hm" and reply.choices[0].message.content == "yes"
    hidden = client(server).chat.completions.create(model="fake", messages=HI, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning")


def test_a_choice_that_is_over_is_computed_no_further(serve, tmp_path):
    """Without parallel calls an answer ends with its first call; the other choice goes on."""
    call = ["<tool_call>", '{"name": "weather", "arguments": {"city": "Rome"}}', "</tool_call>"]
    model = FakeModel(script=lambda generation, index: [*call, *["more"] * 5000] if index == 0 else ["word"] * 40)
    server = serve(model, request_log=tmp_path / "log")
    reply = client(server).chat.completions.create(
        model="fake", messages=HI, n=2, tools=TOOLS, parallel_tool_calls=False
    )
    assert [each.finish_reason for each in reply.choices] == ["tool_calls", "stop"] and model.ended == [0]
    assert reply.usage.completion_tokens == 2 + 41
    wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"))
    line = json.loads((tmp_path / "log").read_text())
    assert line["completion_tokens"] == 2 + 41 and line["finish"] == ["stop", "stop"]


def test_a_budget_of_reasoning_needs_reasoning(serve):
    server = serve(FakeModel(parser="plain"))
    with pytest.raises(openai.BadRequestError, match="no reasoning") as refusal:
        client(server).chat.completions.create(model="fake", messages=HI, extra_body={"thinking_token_budget": 7})
    assert refusal.value.param == "thinking_token_budget"


def test_stop_string_is_told(server):
    raw = httpx.post(
        server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI, "stop": "there"}
    ).json()
    assert raw["choices"][0]["message"]["content"] == "Hello " and raw["choices"][0]["stop_reason"] == "there"


def test_error_before_and_after_the_first_token(server):
    server.model.fail_after = 0
    with pytest.raises(openai.InternalServerError) as caught:
        client(server).chat.completions.create(model="fake", messages=HI)
    assert caught.value.response.headers["x-should-retry"] == "false"
    response = httpx.post(server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI, "stream": True})
    assert response.status_code == 500
    server.model.fail_after = 1
    with pytest.raises(openai.APIError, match="not numbers"):
        for _ in client(server).chat.completions.create(model="fake", messages=HI, stream=True):
            pass
    assert frames(server)[-1]["error"]["type"] == "server_error"


def test_adapters_are_models():
    model = FakeModel()
    model.adapters.append("tuned")
    from surogate_serve.http.requests import resolve

    assert resolve({"fake": model}, "tuned").adapter == "tuned" == resolve({"fake": model}, "fake:tuned").adapter


def schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def test_forms_of_answers_become_grammars(server):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True, "parameters": schema()}}]
    forms = [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema(a={"type": "integer"})},
            }
        },
        {"response_format": {"type": "json_object", "schema": schema(a={"type": "integer"})}},
        {"structured_outputs": {"regex": "a+b"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": json.dumps(schema())}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": strict},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
    ]
    for form in forms:
        answer = httpx.post(server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI} | form)
        assert answer.status_code == 200, answer.text
        assert server.model.seen[-1].grammar is not None
    for form in ({}, {"response_format": {"type": "text"}}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        httpx.post(server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI} | form)
        assert server.model.seen[-1].grammar is None
    answer = httpx.post(
        server.url + "/v1/completions", json={"model": "fake", "prompt": "x", "structured_outputs": {"choice": ["a"]}}
    )
    assert answer.status_code == 200 and server.model.seen[-1].grammar is not None


def test_bad_forms_are_refused(server):
    def formatted(**schema):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    deep = {"type": "string"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    for form, param in (
        (formatted(type="dragon"), "response_format"),
        (formatted(type="string", pattern="("), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ):
        answer = httpx.post(server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI} | form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (form, answer.text)
    assert not server.model.seen
    assert (
        httpx.post(
            server.url + "/v1/chat/completions", json={"model": "fake", "messages": HI} | formatted(**deep)
        ).status_code
        == 400
    )


def test_client_parses_into_a_class(server):
    import pydantic

    class Town(pydantic.BaseModel):
        name: str

    server.model.script = lambda generation, index: ['{"name": ', '"Paris"}']
    reply = client(server).chat.completions.parse(model="fake", messages=HI, response_format=Town)
    assert reply.choices[0].message.parsed == Town(name="Paris")
    with pytest.raises(openai.LengthFinishReasonError):
        client(server).chat.completions.parse(model="fake", messages=HI, response_format=Town, max_tokens=1)


def test_calls_or_a_form(server):
    body = {"model": "fake", "messages": HI, "tools": TOOLS, "response_format": {"type": "json_object"}}
    assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200
    model = server.model

    def follows(text):
        (handle,) = model.grammars.open(model.seen[-1].grammar)
        parts = re.split("(<tool_call>|</tool_call>)", text)
        ids = [
            t
            for p in parts
            for t in ([model.tokenizer.added_tokens[p]] if "tool_call" in p else [256 + b for b in p.encode()])
        ]
        return all(model.grammars.accept([handle], [token]) != [-1] for token in ids)

    assert follows('{"a": 1}')
    assert follows('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert not follows("Hello") and not follows('<tool_call>\n{"name": "other"')


def test_the_one_model_need_not_be_named(server):
    reply = httpx.post(server.url + "/v1/chat/completions", json={"messages": HI}).json()
    assert reply["model"] == "fake" and reply["choices"][0]["message"]["content"] == "Hello there!"
