"""OpenAI's Responses by the official client and frame by frame."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from conftest import wait_for
from fake import FakeModel
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from surogate_serve.http.responses_store import ResponseStore, Stored, StoreLimits
from surogate_serve.types import Refused

WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": None}
CALL = ["<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>"]
THOUGHT = ["<think>", "Let", " me", " see", "</think>", "Four", "."]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


def client(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


def says(*pieces):
    return FakeModel(script=lambda generation, choice: pieces)


def post(server, path="/v1/responses", headers=None, **body):
    return httpx.post(server.url + path, json={"model": "fake", "input": "Hi"} | body, headers=headers)


def whole(server, **body):
    """A response, which must be one by the client's strict reading."""
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    RESPONSE.validate_json(reply.text, strict=True)
    return reply.json()


def frames(server, begun=lambda: None, **body):
    """The data of every frame of a stream, each of them valid by the client's types, in sequence. begun: called after
    the first of them came."""
    given = {"model": "fake", "input": "Hi", "stream": True} | body
    with httpx.stream("POST", server.url + "/v1/responses", json=given) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        parts = reply.iter_text()
        text = next(parts)
        begun()
        text += "".join(parts)
    result = []
    for frame in filter(None, text.split("\n\n")):
        event, data = frame.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert body["type"] == event.removeprefix("event: ")
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        result.append(body)
    assert [each["sequence_number"] for each in result] == list(range(len(result)))
    return result


def shape(got):
    """Types in order without their prefix, runs of deltas as one."""
    kinds = [each["type"].removeprefix("response.") for each in got]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]


ITEM = ["output_item.added", "content_part.added"]
DONE = ["content_part.done", "output_item.done"]
MESSAGE = [*ITEM, "output_text.delta", "output_text.done", *DONE]
REASONING = [*ITEM, "reasoning_text.delta", "reasoning_text.done", *DONE]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def without_ids(output):
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


def test_whole(server):
    got = whole(server, instructions="Be brief", metadata={"a": "b"}, temperature=0.5)
    assert got["id"].startswith("resp_") and got["object"] == "response" and got["status"] == "completed"
    (message,) = got["output"]
    assert message["id"].startswith("msg_") and message["status"] == "completed" and message["role"] == "assistant"
    assert message["content"] == [{"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}]
    prompt = len(server.model.seen[0].prompt)
    assert got["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 4,
    }
    assert got["instructions"] == "Be brief" and got["metadata"] == {"a": "b"} and got["temperature"] == 0.5
    assert got["error"] is None and got["incomplete_details"] is None and got["text"]["format"] == {"type": "text"}
    assert server.model.rendered[0][0] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]


def test_stream_to_the_event(server):
    got = frames(server)
    assert shape(got) == ["created", "in_progress", *MESSAGE, "completed"]
    assert got[0]["response"]["status"] == "in_progress" and got[0]["response"]["output"] == []
    added = got[2]["item"]
    assert added["status"] == "in_progress" and added["content"] == [] and added["role"] == "assistant"
    deltas = [each for each in got if each["type"] == "response.output_text.delta"]
    assert "".join(each["delta"] for each in deltas) == "Hello there!"
    assert all((each["item_id"], each["output_index"], each["content_index"]) == (added["id"], 0, 0) for each in deltas)
    assert all(each["logprobs"] == [] for each in deltas)
    response = got[-1]["response"]
    assert response["status"] == "completed" and response["output"] == [got[-2]["item"]]
    assert response["usage"]["output_tokens"] == 4 and response["id"] == got[0]["response"]["id"]
    assert without_ids(whole(server)["output"]) == without_ids(response["output"])


def test_reasoning_message_and_call_in_order(serve):
    server = serve(says("<think>", "hm", "</think>", "Looking.", *CALL))
    got = frames(server, tools=[WEATHER])
    assert shape(got) == ["created", "in_progress", *REASONING, *MESSAGE, *CALLED, "completed"]
    assert [each["output_index"] for each in got if each["type"] == "response.output_item.added"] == [0, 1, 2]
    output = got[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and output[0]["summary"] == []
    assert json.loads(output[2]["arguments"]) == {"city": "Paris"} and output[2]["name"] == "weather"
    arguments = [each["delta"] for each in got if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == output[2]["arguments"] and output[2]["call_id"].startswith("call_")
    assert without_ids(whole(server, tools=[WEATHER])["output"]) == without_ids(output)


def test_parallel_calls_and_not(serve):
    server = serve(says(*CALL, *CALL))
    assert [item["type"] for item in whole(server, tools=[WEATHER])["output"]] == ["function_call"] * 2
    assert len(whole(server, tools=[WEATHER], parallel_tool_calls=False)["output"]) == 1


def test_incomplete(serve):
    server = serve(says("a", "b", "c"))
    got = whole(server, max_output_tokens=2)
    assert got["status"] == "incomplete" and got["incomplete_details"] == {"reason": "max_output_tokens"}
    assert got["output"][0]["status"] == "incomplete" and got["output"][0]["content"][0]["text"] == "ab"
    streamed = frames(server, max_output_tokens=2)
    assert shape(streamed)[-1] == "incomplete" and streamed[-1]["response"]["status"] == "incomplete"
    calling = serve(says(*CALL))
    (call,) = whole(calling, tools=[WEATHER], max_output_tokens=3)["output"]
    assert call["type"] == "function_call" and call["status"] == "incomplete"


def test_empty_answer(serve):
    (message,) = whole(serve(says()))["output"]
    assert message["content"][0]["text"] == ""


def test_clients_stream_helper(serve):
    server = serve(says("Looking.", *CALL))
    with client(server).responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text == "Looking."
    assert final.output[1].arguments == '{"city": "Paris"}'


def test_async_client(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as asynchronous:
            reply = await asynchronous.responses.create(model="fake", input="Hi")
            made = await asynchronous.responses.create(model="fake", input="Hi", stream=True)
            events = [event async for event in made]
            async with asynchronous.responses.stream(model="fake", input="Hi") as stream:
                return reply, events, await stream.get_final_response()

    reply, events, final = asyncio.run(go())
    assert reply.output_text == final.output_text == events[-1].response.output_text == "Hello there!"


def test_parsed_output(serve):
    class Answer(BaseModel):
        value: int

    server = serve(says('{"value": ', "4", "}"))
    parsed = client(server).responses.parse(model="fake", input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(value=4)
    assert parsed.text.format.type == "json_schema" and parsed.text.format.name == "Answer"


def test_logprobs(server):
    got = whole(server, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = got["output"][0]["content"][0]["logprobs"]
    assert logprobs[0]["token"] == "Hello" and [len(each["top_logprobs"]) for each in logprobs] == [2, 2, 2]
    streamed = frames(server, include=["message.output_text.logprobs"])
    assert [len(each["logprobs"]) for each in streamed if each["type"] == "response.output_text.delta"] == [1, 1, 1]


def test_effort(serve):
    server = serve(says(*THOUGHT))
    whole(server)
    assert "enable_thinking" not in server.model.rendered[-1][2]
    whole(server, reasoning={"effort": "none"})
    assert server.model.rendered[-1][2]["enable_thinking"] is False
    got = whole(server, reasoning={"effort": "high"}, include=["reasoning.encrypted_content"])
    assert server.model.rendered[-1][2]["reasoning_effort"] == "high" and got["reasoning"]["effort"] == "high"
    assert got["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    thought = got["output"][0]
    # A client that keeps nothing but the sealed text sends that back.
    back = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    whole(server, input=[{"role": "user", "content": "Hi"}, back, {"role": "assistant", "content": "Four."}])
    assert server.model.rendered[-1][0][-1] == {
        "role": "assistant", "content": "Four.", "reasoning_content": "Let me see",
    }  # fmt: skip


CONVERSATION = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "dev"}]},
    {"role": "user", "content": "Weather?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Paris"}'},
    {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": ""},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
]


def test_items_become_template_messages(server):
    whole(server, input=CONVERSATION, instructions="first")

    def call(number, arguments):
        return {"id": number, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    assert server.model.rendered[-1][0] == [
        {"role": "system", "content": "first\n\ndev"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "hm",
            "tool_calls": [call("call_1", {"city": "Paris"}), call("call_2", {})],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "name": "weather"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain", "name": "weather"},
    ]


def test_what_coding_agents_send(serve):
    """They keep nothing on the server, carry sealed reasoning, and read items by their events."""
    server = serve(says("<think>", "hm", "</think>", "Looking.", *CALL))
    body = {
        "instructions": "You code.", "store": False, "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "text": {"verbosity": "low"}, "tools": [WEATHER | {"strict": False}],
        "client_metadata": {"x": "y"},
    }  # fmt: skip
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    done = [e["item"] for e in frames(server, input=[user], **body) if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    thought = {key: done[0][key] for key in ("type", "summary", "encrypted_content")} | {"content": None}
    message = {key: done[1][key] for key in ("type", "role", "content")}
    call = {key: done[2][key] for key in ("type", "name", "arguments", "call_id")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    frames(server, input=[user, thought, message, call, result], **body)
    system, asked, answered, told = server.model.rendered[-1][0]
    assert system["content"] == "You code." and asked["content"] == "Weather?" and told["content"] == "sunny"
    assert answered["content"] == "Looking." and answered["reasoning_content"] == "hm"
    assert answered["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


def test_going_on_with_a_response(server):
    first = whole(server, instructions="not carried over")
    second = whole(server, input="More", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert server.model.rendered[-1][0] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there!"},
        {"role": "user", "content": "More"},
    ]
    streamed = frames(server, input="Again", previous_response_id=second["id"])
    assert len(server.model.rendered[-1][0]) == 5
    assert client(server).responses.retrieve(streamed[-1]["response"]["id"]).output_text == "Hello there!"


def test_what_is_kept(server):
    api = client(server)
    made = api.responses.create(model="fake", input=CONVERSATION)
    assert api.responses.retrieve(made.id) == made
    items = list(api.responses.input_items.list(made.id, order="asc", limit=3))
    assert [item.type for item in items] == [item.get("type", "message") for item in CONVERSATION]
    raw = httpx.get(f"{server.url}/v1/responses/{made.id}/input_items?limit=3")
    TypeAdapter(ResponseItemList).validate_json(raw.text, strict=True)
    assert raw.json()["has_more"] and raw.json()["last_id"] == raw.json()["data"][-1]["id"]
    assert httpx.get(f"{server.url}/v1/responses/{made.id}/input_items?after=zzz").status_code == 400
    assert httpx.get(f"{server.url}/v1/responses/{made.id}/input_items?limit=0").status_code == 400
    with pytest.raises(openai.BadRequestError):
        api.responses.cancel(made.id)
    api.responses.delete(made.id)
    for call in (api.responses.retrieve, api.responses.delete, api.responses.input_items.list, api.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_not_stored_is_not_found(server):
    made = whole(server, store=False)
    assert made["store"] is False
    reply = post(server, previous_response_id=made["id"])
    assert reply.status_code == 404 and reply.json()["error"]["param"] == "previous_response_id"


def test_keys_see_only_their_own(serve):
    server = serve(api_keys=("one", "two"))
    made = post(server, headers={"Authorization": "Bearer one"}).json()
    url = f"{server.url}/v1/responses/{made['id']}"
    assert httpx.get(url, headers={"Authorization": "Bearer one"}).status_code == 200
    assert httpx.get(url, headers={"Authorization": "Bearer two"}).status_code == 404
    assert httpx.get(url).status_code == 401


def test_background(serve):
    server = serve()
    api = client(server)
    server.call(_set(server.model, False))
    made = api.responses.create(model="fake", input="Hi", background=True)
    assert made.status == "queued" and made.background
    assert post(server, previous_response_id=made.id).status_code == 400
    server.call(_set(server.model, True))
    wait_for(lambda: api.responses.retrieve(made.id).status == "completed")
    assert api.responses.retrieve(made.id).output_text == "Hello there!"
    server.call(_set(server.model, False))
    other = api.responses.create(model="fake", input="Hi", background=True)
    wait_for(lambda: server.model.waiting == 1)
    assert api.responses.cancel(other.id).status == "cancelled" and server.model.waiting == 0
    assert api.responses.retrieve(other.id).status == "cancelled"
    server.call(_set(server.model, True))
    server.model.refuse = Refused("full", 429)
    third = api.responses.create(model="fake", input="Hi", background=True)
    wait_for(lambda: api.responses.retrieve(third.id).status == "failed")
    assert api.responses.retrieve(third.id).error.code == "rate_limit_exceeded"


def drain(server, seconds):
    """Has the server drain; the future tells how many requests it had to end."""
    future = asyncio.run_coroutine_threadsafe(server.app.guard.drain(seconds), server.loop)
    wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
    return future


def test_a_drain_waits_for_the_background_and_for_those_who_fetch_it(serve):
    server = serve()
    api = client(server)
    server.call(_set(server.model, False))
    made = api.responses.create(model="fake", input="Hi", background=True)
    ending = drain(server, 120)
    assert api.responses.retrieve(made.id).status in ("queued", "in_progress")
    assert post(server).status_code == 503
    server.call(_set(server.model, True))
    wait_for(lambda: server.model.seen and not server.model.running and not server.model.waiting)
    assert not ending.done()
    wait_for(lambda: api.responses.retrieve(made.id).status == "completed")
    assert ending.result(60) == 0


def test_a_drain_ends_the_background_that_takes_too_long(serve):
    server = serve()
    server.call(_set(server.model, False))
    made = client(server).responses.create(model="fake", input="Hi", background=True)
    wait_for(lambda: server.model.waiting == 1)
    assert drain(server, 0.1).result(60) == 1 and server.model.cancelled == 1
    told = client(server).responses.retrieve(made.id)
    assert told.status == "failed" and "shutting down" in told.error.message


async def _set(model, goes):
    model.hold.set() if goes else model.hold.clear()


def test_input_tokens(server):
    counted = client(server).responses.input_tokens.count(model="fake", input="Hi", instructions="S", tools=[WEATHER])
    whole(server, instructions="S", tools=[WEATHER])
    assert counted.input_tokens == len(server.model.seen[-1].prompt)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
        ({"input": "many words " * 3000}, "input"),
    ],
)
def test_bad_requests(server, body, param):
    reply = post(server, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param and reply.json()["error"]["type"] == "invalid_request_error"


def test_failing(serve):
    server = serve()
    server.model.fail_after = 1
    got = frames(server)
    assert shape(got)[-1] == "failed" and got[-1]["response"]["error"]["code"] == "server_error"
    assert post(server).status_code == 500
    server.model.fail_after = 0
    assert post(server, stream=True).status_code == 500
    server.model.refuse = Refused("full", 429, retry_after=1)
    with pytest.raises(openai.RateLimitError):
        client(server).responses.create(model="fake", input="Hi", stream=True)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.create(model="other", input="Hi")


def stored(number, size=10):
    return Stored({"id": number, "output": []}, [], size)


def test_store_is_bounded():
    now = [0.0]
    store = ResponseStore(StoreLimits(seconds=10, of_key=2, bytes_of_key=100, bytes_of_all=150), lambda: now[0])
    for number in ("a", "b", "c"):
        store.put("k", stored(number))
    with pytest.raises(Refused):
        store.get("k", "a")
    assert store.get("k", "c").size == 10
    store.put("other", stored("x", 90))
    now[0] = 1.0
    store.put("k", stored("d", 95))  # over all limits together: what is oldest goes
    with pytest.raises(Refused):
        store.get("other", "x")
    with pytest.raises(Refused):
        store.get("k", "c")
    assert store.get("k", "d").size == 95
    store.put("k", stored("huge", 1000))
    with pytest.raises(Refused):
        store.get("k", "huge")
    store.put("k", stored("late"))
    now[0] = 11.5
    with pytest.raises(Refused):
        store.get("k", "late")


def test_a_client_that_leaves_cancels_and_keeps_nothing(serve):
    model = says(*["word "] * 2000)
    model.delay = 0.01
    server = serve(model)
    with client(server).responses.stream(model="fake", input="Hi") as stream:
        number = next(iter(stream)).response.id
    wait_for(lambda: model.cancelled == 1 and model.running == 0)
    assert httpx.get(f"{server.url}/v1/responses/{number}").status_code == 404


def test_a_server_that_shuts_down_ends_streams_as_failed(serve):
    model = says(*["word "] * 2000)
    model.delay = 0.01
    server = serve(model)
    last = frames(server, begun=lambda: server.call(server.app.guard.drain(0.1)))[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
