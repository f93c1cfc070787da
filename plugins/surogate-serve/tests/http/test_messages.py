"""Anthropic's Messages by the official client and frame by frame."""

from __future__ import annotations

import asyncio
import json
import socket

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from conftest import wait_for
from fake import FakeModel
from pydantic import TypeAdapter

from surogate_serve.types import Refused

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CALL = ["<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>"]
EVENT = TypeAdapter(RawMessageStreamEvent)
MESSAGE = TypeAdapter(Message)


def client(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, **options)


def says(*pieces):
    return FakeModel(script=lambda generation, choice: pieces)


def post(server, path="/v1/messages", **body):
    return httpx.post(server.url + path, json={"model": "fake", "messages": HI, "max_tokens": 64} | body)


def whole(server, **body):
    """A message, which must be one by the client's strict reading."""
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    MESSAGE.validate_python(reply.json(), strict=True)
    return reply.json()


def frames(server, begun=lambda: None, **body):
    """(type, data) of every frame of a stream, each of them valid by the client's types. begun: called after the first
    of them came."""
    with httpx.stream(
        "POST",
        server.url + "/v1/messages",
        json={"model": "fake", "messages": HI, "max_tokens": 64, "stream": True} | body,
    ) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        parts = reply.iter_text()
        text = next(parts)
        begun()
        text += "".join(parts)
    result = []
    for frame in filter(None, text.split("\n\n")):
        event, data = frame.split("\n")
        kind, body = event.removeprefix("event: "), json.loads(data.removeprefix("data: "))
        assert body["type"] == kind
        if kind not in ("ping", "error"):
            EVENT.validate_python(body, strict=True)
        result.append((kind, body))
    return result


def shape(got):
    """Types in order, runs of deltas as one."""
    kinds = [f"{body['delta']['type']}" if kind == "content_block_delta" else kind for kind, body in got]
    return [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]


def joined(got, field):
    return "".join(body["delta"].get(field, "") for kind, body in got if kind == "content_block_delta")


def test_whole(server):
    got = whole(server)
    assert set(got) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert got["id"].startswith("msg_") and got["model"] == "fake"
    assert got["content"] == [{"type": "text", "text": "Hello there!"}]
    assert got["stop_reason"] == "end_turn" and got["stop_sequence"] is None
    prompt = len(server.model.seen[0].prompt)
    assert got["usage"] == {
        "input_tokens": prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_stream_to_the_event(server):
    got = frames(server)
    assert shape(got) == [
        "message_start", "ping", "content_block_start", "text_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    start = got[0][1]["message"]
    assert start["type"] == "message" and start["role"] == "assistant" and start["content"] == []
    assert start["stop_reason"] is None and start["stop_sequence"] is None
    prompt = len(server.model.seen[0].prompt)
    assert start["usage"]["input_tokens"] == prompt - 3 and start["usage"]["cache_read_input_tokens"] == 3
    assert joined(got, "text") == "Hello there!"
    last = got[-2][1]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 4


def test_client_reads_both(server):
    for reply in (
        client(server).messages.create(model="fake", max_tokens=64, messages=HI),
        _streamed(server),
    ):
        assert reply.content[0].text == "Hello there!" and reply.stop_reason == "end_turn"
        assert reply.usage.output_tokens == 4 and reply.usage.cache_read_input_tokens == 3


def _streamed(server):
    with client(server).messages.stream(model="fake", max_tokens=64, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello there!"
        return stream.get_final_message()


def test_async_client(server):
    async def go():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x") as asynchronous:
            reply = await asynchronous.messages.create(model="fake", max_tokens=64, messages=HI)
            async with asynchronous.messages.stream(model="fake", max_tokens=64, messages=HI) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                return reply, text, await stream.get_final_message()

    reply, text, final = asyncio.run(go())
    assert reply.content[0].text == text == final.content[0].text == "Hello there!"


def test_empty_answer_is_one_empty_block(serve):
    server = serve(says())
    assert whole(server)["content"] == [{"type": "text", "text": ""}]
    assert shape(frames(server)) == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


THOUGHT = ["<think>", "Let", " me", " see", "</think>", "Four", "."]


def test_no_thinking_is_thinking_off(serve):
    server = serve(says(*THOUGHT))
    got = whole(server)
    assert got["content"] == [{"type": "text", "text": "Four."}]
    assert got["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert server.model.rendered[-1][2]["enable_thinking"] is False
    assert "thinking_delta" not in shape(frames(server))
    assert whole(server, thinking={"type": "disabled"})["content"][0]["type"] == "text"


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_thinking(serve, thinking):
    server = serve(says(*THOUGHT))
    got = whole(server, thinking=thinking, max_tokens=2048)
    thought, text = got["content"]
    assert thought["thinking"] == "Let me see" and thought["signature"] and text["text"] == "Four."
    assert server.model.rendered[-1][2]["enable_thinking"] is True
    budget = server.model.seen[-1].thinking
    end = server.model.tokenizer.id_of("</think>")
    assert (budget is None) if thinking["type"] == "adaptive" else (budget.budget, budget.end) == (1024, (end,))
    streamed = frames(server, thinking=thinking, max_tokens=2048)
    assert shape(streamed) == [
        "message_start", "ping", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [body["index"] for kind, body in streamed if kind == "content_block_start"] == [0, 1]
    assert joined(streamed, "thinking") == "Let me see" and joined(streamed, "signature") == thought["signature"]


def test_thinking_may_be_omitted(serve):
    server = serve(says(*THOUGHT))
    thinking = {"type": "adaptive", "display": "omitted"}
    thought = whole(server, thinking=thinking)["content"][0]
    assert thought["thinking"] == "" and thought["signature"]
    streamed = frames(server, thinking=thinking)
    assert "thinking_delta" not in shape(streamed) and "signature_delta" in shape(streamed)


def test_thinking_between_tools(serve):
    server = serve(says("ok"))
    whole(server, thinking={"type": "between_tools"})
    assert server.model.rendered[-1][2]["enable_thinking"] is False
    whole(server, thinking={"type": "between_tools"}, messages=AFTER_CALL)
    assert server.model.rendered[-1][2]["enable_thinking"] is True


def test_effort_reaches_the_template(server):
    whole(server, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert server.model.rendered[-1][2]["reasoning_effort"] == "high"


def test_tool_use(serve):
    server = serve(says("Let me look.", *CALL))
    got = whole(server, tools=[WEATHER])
    text, call = got["content"]
    assert text == {"type": "text", "text": "Let me look."} and got["stop_reason"] == "tool_use"
    assert call["type"] == "tool_use" and call["name"] == "weather" and call["input"] == {"city": "Paris"}
    streamed = frames(server, tools=[WEATHER])
    starts = [body["content_block"] for kind, body in streamed if kind == "content_block_start"]
    assert starts[1]["type"] == "tool_use" and starts[1]["input"] == {} and starts[1]["name"] == "weather"
    assert json.loads(joined(streamed, "partial_json")) == {"city": "Paris"}
    assert streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
    with client(server).messages.stream(model="fake", max_tokens=64, messages=HI, tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == {"city": "Paris"} and final.stop_reason == "tool_use"


def test_parallel_tools_and_not(serve):
    server = serve(says(*CALL, *CALL))
    got = whole(server, tools=[WEATHER])
    assert [block["type"] for block in got["content"]] == ["tool_use", "tool_use"]
    assert len({block["id"] for block in got["content"]}) == 2
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(whole(server, tools=[WEATHER], tool_choice=one)["content"]) == 1
    streamed = frames(server, tools=[WEATHER])
    assert [body["index"] for kind, body in streamed if kind == "content_block_stop"] == [0, 1]


def test_cut_call_does_not_claim_tool_use(serve):
    server = serve(says(*CALL))
    got = whole(server, tools=[WEATHER], max_tokens=3)
    assert got["stop_reason"] == "max_tokens"
    assert got["content"][0]["type"] == "tool_use" and isinstance(got["content"][0]["input"], dict)
    streamed = frames(server, tools=[WEATHER], max_tokens=3)
    assert streamed[-2][1]["delta"]["stop_reason"] == "max_tokens"
    assert [kind for kind, _ in streamed].count("content_block_stop") == 1


def test_tool_choice_none_offers_nothing(serve):
    server = serve(says("plain"))
    whole(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert server.model.rendered[-1][1] is None
    whole(server, tools=[WEATHER], tool_choice={"type": "any"})
    assert server.model.rendered[-1][1][0]["function"] == {
        "name": "weather", "description": "d", "parameters": WEATHER["input_schema"],
    }  # fmt: skip


AFTER_CALL = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
]


def test_blocks_become_template_messages(server):
    whole(server, messages=AFTER_CALL, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}])
    assert server.model.rendered[-1][0] == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Paris"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny", "name": "weather"},
        {"role": "user", "content": "And now?"},
    ]


def test_error_results_say_so_and_neighbours_merge(server):
    result = {"type": "tool_result", "tool_use_id": "t", "content": "broke", "is_error": True}
    whole(
        server,
        system="S",
        messages=[
            {"role": "user", "content": [result, {"type": "tool_result", "tool_use_id": "u"}]},
            {"role": "system", "content": "inside"},
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
        ],
    )
    assert server.model.rendered[-1][0] == [
        {"role": "system", "content": "S"},
        {"role": "tool", "tool_call_id": "t", "content": "Error: broke"},
        {"role": "tool", "tool_call_id": "u", "content": ""},
        {"role": "system", "content": "inside"},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_documents(server):
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "title": "T", "source": source}
    found = {"type": "search_result", "source": {}, "title": "F", "content": [{"type": "text", "text": "hit"}]}
    whole(server, messages=[{"role": "user", "content": [document, found]}])
    assert server.model.rendered[-1][0] == [{"role": "user", "content": "T\nbody\nF\nhit"}]


def test_prefill(server):
    whole(server, messages=[*HI, {"role": "assistant", "content": "He"}])
    assert server.model.rendered[-1][2]["continue_final_message"] is True
    assert server.model.rendered[-1][2]["add_generation_prompt"] is False
    refused = post(server, messages=[*HI, {"role": "assistant", "content": "He"}], thinking={"type": "adaptive"})
    assert refused.status_code == 400


def test_stop_sequence(serve):
    server = serve(says("one", " two", " three"))
    got = whole(server, stop_sequences=["two"])
    assert got["stop_reason"] == "stop_sequence" and got["stop_sequence"] == "two"
    assert got["content"][0]["text"].strip() == "one"
    assert frames(server, stop_sequences=["two"])[-2][1]["delta"]["stop_sequence"] == "two"


def test_lengths(serve):
    server = serve(FakeModel(script=lambda generation, choice: ["a"] * 100, context=40))
    assert whole(server, max_tokens=2)["stop_reason"] == "max_tokens"
    assert whole(server, max_tokens=32000)["stop_reason"] == "model_context_window_exceeded"
    assert whole(server, max_tokens=0)["usage"]["output_tokens"] == 0
    refused = post(server, messages=[{"role": "user", "content": "many words " * 40}])
    assert refused.status_code == 400 and "context" in refused.json()["error"]["message"]


def test_sampling_and_schema(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    got = post(
        server, temperature=0.5, top_p=0.9, top_k=7, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    sampling = server.model.seen[-1].sampling if got.status_code == 200 else None
    assert sampling is None or (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


def test_count_tokens(server):
    reply = post(server, "/v1/messages/count_tokens", tools=[WEATHER], system="S")
    MessageTokensCount.model_validate(reply.json(), strict=True)
    whole(server, tools=[WEATHER], system="S")
    assert reply.json() == {"input_tokens": len(server.model.seen[-1].prompt)}
    counted = client(server).messages.count_tokens(model="fake", messages=HI)
    assert counted.input_tokens > 0


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "same name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "max_tokens"),
        ({"stop_sequences": ["x"] * 100}, "stop"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"system": 3}, "system"),
    ],
)
def test_bad_requests_in_anthropics_shape(server, body, word):
    reply = post(server, **body)
    assert reply.status_code == 400, reply.text
    got = reply.json()
    assert got["type"] == "error" and got["error"]["type"] == "invalid_request_error"
    assert word in got["error"]["message"]
    assert got["request_id"] == reply.headers["request-id"]


def test_errors_by_the_client(serve):
    server = serve()
    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.create(model="other", max_tokens=5, messages=HI)
    server.model.refuse = Refused("full", 429, retry_after=1)
    with pytest.raises(anthropic.RateLimitError):
        client(server).messages.create(model="fake", max_tokens=5, messages=HI, stream=True)
    server.model.refuse = Refused("going", 503)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client(server).messages.create(model="fake", max_tokens=5, messages=HI)
    assert caught.value.status_code == 529


def test_failing_in_the_stream(serve):
    server = serve()
    server.model.fail_after = 1
    got = frames(server)
    assert got[-1][0] == "error" and got[-1][1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError), client(server).messages.stream(
        model="fake", max_tokens=5, messages=HI
    ) as stream:
        stream.get_final_message()
    server.model.fail_after = 0
    assert post(server, stream=True).status_code == 500


def test_both_keys(serve):
    server = serve(api_keys=("secret",))
    assert client(server).api_key == "none"
    for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
        good = anthropic.Anthropic(base_url=server.url, max_retries=0, **options)
        assert good.messages.create(model="fake", max_tokens=5, messages=HI).content
    reply = post(server)
    assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"


def test_a_client_that_leaves_cancels(serve):
    model = says(*["word "] * 2000)
    model.delay = 0.01
    server = serve(model)
    with client(server).messages.stream(model="fake", max_tokens=4000, messages=HI) as stream:
        next(iter(stream.text_stream))
    wait_for(lambda: model.cancelled == 1 and model.running == 0)
    content = json.dumps({"model": "fake", "messages": HI, "max_tokens": 4000}).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + content)
        wait_for(lambda: model.running == 1)
    wait_for(lambda: model.cancelled == 2 and model.running == 0)


def test_a_server_that_shuts_down_ends_streams_with_an_error(serve):
    model = says(*["word "] * 2000)
    model.delay = 0.01
    server = serve(model)
    kind, body = frames(server, begun=lambda: server.call(server.app.guard.drain(0.1)), max_tokens=4000)[-1]
    assert kind == "error" and body["error"]["type"] == "overloaded_error"
    assert post(server).status_code == 529
