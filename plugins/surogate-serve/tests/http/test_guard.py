"""What every request passes: keys, shapes of errors, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from conftest import wait_for
from fake import FakeModel

from surogate_serve.http import server as module
from surogate_serve.http.app import create_app
from surogate_serve.http.limits import Limits
from surogate_serve.http.metrics import Metrics
from surogate_serve.types import Refused

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "fake", "messages": HI}


def post(server, body, path="/v1/chat/completions", **options):
    options.setdefault("headers", {"content-type": "application/json"})
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, **options)


def raw(server, data, wait=5.0):
    """All that comes back on a connection of its own until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        for part in data if isinstance(data, list) else [data]:
            connection.sendall(part)
        got = b""
        while True:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                return got
            if not part:
                return got
            got += part


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(serve):
    return serve(api_keys=("first", "second"))


PATHS = ("/v1/models", "/v1/models/", "/v1/chat/completions", "/v1/chat/completions/", "/nothing", "/openapi.json")
PATHS += ("/metrics", "/tokenize", "/admin/adapters", "//v1/models", "/v1/messages", "/health/", "/stats", "/HEALTH")


def test_no_route_without_a_key(locked):
    with httpx.Client() as client:
        for path in PATHS:
            status = 403 if path.startswith("/admin") else 401
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE"):
                for headers in ({}, {"authorization": "Bearer wrong"}):
                    answer = client.request(method, locked.url + path, headers=headers)
                    assert answer.status_code == status, (method, path)
        assert client.post(locked.url + "/health").status_code == 401


def test_keys_are_taken_in_both_headers(locked):
    for headers in ({"authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"}):
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 200
    for headers in (
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"x-api-key": "firs"},
        {"x-api-key": ""},
    ):
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 401
    error = httpx.get(locked.url + "/v1/models").json()["error"]
    assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
    assert httpx.get(locked.url + "/health").status_code == httpx.get(locked.url + "/ready").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="no", max_retries=0).models.list()
    anthropic = httpx.post(locked.url + "/v1/messages", json={})
    body = anthropic.json()
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
    assert body["request_id"] == anthropic.headers["request-id"]


def test_metrics_may_be_open(serve):
    assert httpx.get(serve(api_keys=("k",), open_metrics=True).url + "/metrics").status_code == 200


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_unknown_routes_and_methods(server):
    for path, method, status in (
        ("/v1/nothing", "GET", 404),
        ("/v1/models/", "PUT", 405),
        ("/v1/completions", "GET", 405),
    ):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(server.url + "/v1/messages/nothing").json()["type"] == "error"
    assert httpx.get(server.url + "/v1/completions").headers["allow"] == "POST"


def test_request_ids(server):
    assert post(server, CHAT).headers["x-request-id"].startswith("req_")
    mine = post(server, CHAT, headers={"content-type": "application/json", "x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    bad = post(server, CHAT, headers={"content-type": "application/json", "x-request-id": "a b{}"})
    assert bad.headers["x-request-id"].startswith("req_")


BAD = [
    (b"", None), (b"{", None), (b"[]", None), (b"null", None), (b'"x"', None), (b"1", None), (b"\xff\xfe", None),
    (b"[" * 100000, None), (b'{"a":' * 5000, None), (b'{"model": NaN}', None),
    ({"model": 1, "messages": HI}, "model"),
    ({"model": "", "messages": HI}, "model"),
    ({"model": "fake"}, "messages"),
    ({"model": "fake", "messages": []}, "messages"),
    ({"model": "fake", "messages": "Hi"}, "messages"),
    ({"model": "fake", "messages": ["Hi"]}, "messages[0]"),
    ({"model": "fake", "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"model": "fake", "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"model": "fake", "messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"model": "fake", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "messages[0].content[0].type"), ({"model": "fake", "messages": [{"role": "user", "content": [{"text": "x"}]}]},
    "messages[0].content[0].type"), ({"model": "fake", "messages": [{"role": "tool", "content": "x"}]},
    "messages[0].tool_call_id"), ({"model": "fake", "messages": [{"role": "assistant", "tool_calls": [{"function":
    {"name": "x", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    (CHAT | {"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
    (CHAT | {"messages": [{"role": "user", "content": "a\ud800b"}]}, "messages[0].content"),
    (CHAT | {"temperature": "hot"}, "temperature"), (CHAT | {"temperature": 2.1}, "temperature"),
    (CHAT | {"temperature": True}, "temperature"), (CHAT | {"temperature": -0.1}, "temperature"),
    (CHAT | {"top_p": 1.5}, "top_p"), (CHAT | {"n": 0}, "n"), (CHAT | {"n": 10**9}, "n"), (CHAT | {"n": 1.5}, "n"),
    (CHAT | {"max_tokens": 0}, "max_tokens"), (CHAT | {"max_tokens": -1}, "max_tokens"),
    (CHAT | {"max_tokens": "9"}, "max_tokens"), (CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT | {"seed": 10**30}, "seed"), (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs"), (CHAT | {"logprobs": 5}, "logprobs"),
    (CHAT | {"logit_bias": {"x": 1}}, "logit_bias"), (CHAT | {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT | {"logit_bias": {"999999999": 1}}, "logit_bias"), (CHAT | {"stop": ["x"] * 17}, "stop"),
    (CHAT | {"stop": 5}, "stop"), (CHAT | {"stop": ["x" * 5000]}, "stop"), (CHAT | {"stream": "yes"}, "stream"),
    (CHAT | {"stream_options": {"include_usage": True}}, None),
    (CHAT | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"), (CHAT | {"tool_choice": "maybe"}, "tool_choice"),
    (CHAT | {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    (CHAT | {"reasoning_effort": "huge"}, "reasoning_effort"),
    (CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT | {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    (CHAT | {"stop_token_ids": [10**8]}, "stop_token_ids"), (CHAT | {"thinking_token_budget": -1},
    "thinking_token_budget"),
]  # fmt: skip


def test_bad_requests_say_what_is_wrong(server):
    for body, param in BAD:
        answer = post(server, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), (
            body,
            error,
        )
        assert len(answer.content) < 1000
        assert not server.model.seen


def test_huge_numbers(server):
    for text in ("1e999", "-1e999", "1" * 5000):
        body = json.dumps(CHAT)[:-1].encode() + f', "temperature": {text}}}'.encode()
        assert post(server, body).status_code == 400
    assert post(server, CHAT | {"max_tokens": 10**9}).status_code == 200
    prompt = server.model.seen[0].prompt
    assert server.model.seen[0].max_tokens == server.model.context - len(prompt)


def test_what_does_not_exist(server):
    for body, status, code, param in (
        (CHAT | {"model": "other"}, 404, "model_not_found", "model"),
        (CHAT | {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, 501, "unsupported", "tools[0].type"),
        (
            CHAT | {"messages": [{"role": "user", "content": "word " * 5000}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
    ):
        answer = post(server, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["n_ctx"] == 4096 and error["n_prompt_tokens"] > 4096


def test_errors_repeat_little(server):
    long = "x" * 4000
    bodies = [CHAT | {"model": long}, CHAT | {"tool_choice": long}, CHAT | {long: 1, "reasoning_effort": long}]
    bodies += [CHAT | {"logit_bias": {long: 1}}, CHAT | {"messages": [{"role": long, "content": long}]}]
    for body in bodies:
        answer = post(server, body)
        assert answer.status_code in (400, 404) and len(answer.content) < 700, answer.text


def test_fields_without_meaning_here_are_let_be(server):
    extra = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "k",
             "prediction": None, "verbosity": "low", "user": "me"}  # fmt: skip
    assert post(server, CHAT | extra).status_code == 200


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_bodies_that_are_not_json(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert post(server, CHAT, headers={"content-type": kind}).status_code == 415
    assert post(server, CHAT, headers={"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_large_bodies(serve):
    server = serve(limits=Limits(body_bytes=100_000))
    answer = post(server, b"x" * 200_000)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    chunked = httpx.post(server.url + "/v1/chat/completions", content=iter([b"x" * 50_000] * 4))
    assert chunked.status_code == 413
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n"
    assert b"413" in raw(server, head).split(b"\r\n")[0]
    assert post(server, CHAT).status_code == 200


def test_a_dribbled_body_runs_out_of_time(serve):
    server = serve(limits=Limits(body_seconds=0.3))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    assert b" 408 " in raw(server, head, wait=25).split(b"\r\n")[0]  # not after the 30 s that are usual


def test_cors_is_off_unless_an_origin_is_allowed(serve):
    plain, open_ = serve(), serve(allowed_origins=("https://a.example",), api_keys=("k",))
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.get(plain.url + "/v1/models", headers=headers).headers
    preflight = httpx.options(open_.url + "/v1/chat/completions", headers=headers)
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.options(open_.url + "/v1/models", headers=headers | {"origin": "https://b.example"})
    assert other.status_code == 401 and "access-control-allow-origin" not in other.headers


def test_names_that_the_server_is_not_called_by(serve):
    server = serve(allowed_hosts=("127.0.0.1", "localhost", "[::1]"))
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:99", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("", 403),
    ):
        assert httpx.get(server.url + "/v1/models", headers={"host": host}).status_code == status


# -- clients that leave, queues ----------------------------------------------------------------------------------------


def hold(server):
    """No request gets its first token from now on."""

    async def clear():
        server.model.hold.clear()

    server.call(clear())


def leaving(server, body):
    """Sends a request and closes the connection at once after the model began with it."""
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    before = len(server.model.seen)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + content)
        wait_for(lambda: len(server.model.seen) > before)
    wait_for(lambda: server.model.running == server.model.waiting == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves_cancels(server, stream, queued):
    server.model.delay = 0.02
    server.model.script = lambda generation, index: ["x"] * 10000
    if queued:
        hold(server)
    leaving(server, CHAT | {"stream": stream, "n": 2})
    assert server.model.cancelled == 1
    server.loop.call_soon_threadsafe(server.model.hold.set)
    server.model.delay = 0
    assert post(server, CHAT | {"max_tokens": 2}).status_code == 200
    assert server.app.metrics.figures["fake"].in_flight == 0


def test_a_stream_that_is_closed_in_the_middle(server):
    server.model.delay = 0.01
    server.model.script = lambda generation, index: ["x"] * 10000
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    stream = client.chat.completions.create(model="fake", messages=HI, stream=True)
    next(stream)
    stream.close()
    wait_for(lambda: server.model.cancelled == 1 and server.model.running == 0)


def test_a_client_that_reads_nothing_is_let_go(serve):
    server = serve(limits=Limits(send_seconds=0.4))
    server.model.script = lambda generation, index: ["x" * 20000] * 3000
    server.model.delay = 1e-4
    content = json.dumps(CHAT | {"stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + content)
        wait_for(lambda: server.model.cancelled == 1)
    assert post(server, CHAT | {"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("clients", [1, 10])
def test_clients_that_read_late_get_everything_in_order(server, clients):
    """More than a connection holds: the streams go on where they could not, with what came meanwhile. Of one, the event
    loop's thread sends; of ten, the one that writes for it."""
    pieces = [f"{index} " + "x" * 20000 for index in range(600)]
    server.model.script = lambda generation, index: pieces
    server.model.delay = 1e-4

    def contents():
        request = CHAT | {"stream": True}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=request, timeout=60) as answer:
            wait_for(lambda: len(server.model.seen) == clients and server.model.running == 0)  # all of it waits for us
            told = [json.loads(line[6:])["choices"][0] for line in answer.iter_lines() if line.startswith("data: {")]
        return [choice["delta"].get("content", "") for choice in told]

    with ThreadPoolExecutor(clients) as pool:
        told = [reading.result() for reading in [pool.submit(contents) for _ in range(clients)]]
    assert all(each[1:-1] == pieces for each in told) and server.app.metrics.figures["fake"].in_flight == 0


def test_many_streams_at_once(server):
    """Some of which end early, while others' clients leave."""
    server.model.delay = 2e-3
    server.model.script = lambda generation, index: [f"{number} " for number in range(generation.max_tokens)]

    def contents(tokens):
        request = CHAT | {"stream": True, "max_tokens": abs(tokens)}
        told = ""
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=request, timeout=60) as answer:
            for line in answer.iter_lines():
                if tokens < 0 and len(told) > 20:
                    return None
                if line.startswith("data: {"):
                    told += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        return told.split()

    wanted = [*range(1, 60, 4), *[-10000] * 5]
    with ThreadPoolExecutor(len(wanted)) as pool:
        told = list(pool.map(contents, wanted))
    assert told == [None if tokens < 0 else [str(number) for number in range(tokens)] for tokens in wanted]
    wait_for(lambda: server.model.running == server.model.waiting == 0)
    assert server.app.metrics.figures["fake"].in_flight == 0


def test_any_server_of_asgi_can_stream():
    """One whose connections take no parts, and whose `send` may have to wait."""
    model = FakeModel(script=lambda generation, index: list("abcdefgh"))
    model.delay = 1e-3
    sent = []

    async def stream():
        body = [{"type": "http.request", "body": json.dumps(CHAT | {"stream": True}).encode(), "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "client": ("x", 1)}

        async def receive():
            return body.pop() if body else await asyncio.Event().wait()

        async def send(message):
            await asyncio.sleep(3e-3)
            sent.append(message)

        await create_app({"fake": model})(scope, receive, send)

    asyncio.run(asyncio.wait_for(stream(), 60))
    start, *parts = sent
    frames = b"".join(part["body"] for part in parts).decode().split("\n\n")
    deltas = [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames if frame.startswith("data: {")]
    assert start["status"] == 200 and [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [delta.get("content") for delta in deltas] == ["", *"abcdefgh", None] and frames[-2:] == ["data: [DONE]", ""]


def test_a_quiet_stream_says_that_it_lives(serve):
    server = serve(limits=Limits(keep_alive_seconds=0.1))
    hold(server)
    text = ""
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=CHAT | {"stream": True}, timeout=60) as answer:
        for part in answer.iter_text():
            text += part
            if text.count(": keep-alive\n\n") == 2:
                server.loop.call_soon_threadsafe(server.model.hold.set)
    assert text.count(": keep-alive\n\n") >= 2 and text.endswith("data: [DONE]\n\n")
    server.model.delay = 0.35
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    assert "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(model="fake", messages=HI,
        stream=True)
    ) == "Hello there!"  # fmt: skip


def test_full_queues_and_long_waits(serve):
    server = serve(limits=Limits(queued=2, queue_seconds=0.2))
    answer = post(server, CHAT | {"n": 3})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    hold(server)
    late = post(server, CHAT)
    assert late.status_code == 503 and late.headers["retry-after"] and late.json()["error"]["code"] == "queue_timeout"
    assert server.model.waiting == 0
    server.model.refuse = Refused("full", 429, "queue_full", retry_after=2.5)
    for stream in (False, True):
        answer = post(server, CHAT | {"stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"


def test_streams_go_on_beside_bad_requests(server):
    server.model.delay = 0.01
    server.model.script = lambda generation, index: ["x"] * 60
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    text = ""
    for index, chunk in enumerate(client.chat.completions.create(model="fake", messages=HI, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if index < len(BAD):
            assert post(server, BAD[index][0]).status_code == 400
    assert text == "x" * 60


# -- state -------------------------------------------------------------------------------------------------------------


def test_death_is_told(server):
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/ready").json()["models"] == {"fake": "ready"}
    server.model.dead = "out of memory"
    answer = httpx.get(server.url + "/health")
    assert answer.status_code == 503 and answer.json()["reason"] == "fake: out of memory"
    assert post(server, CHAT).status_code == 503 and httpx.get(server.url + "/ready").status_code == 503
    assert httpx.get(server.url + "/live").status_code == 200


def test_metrics(server):
    post(server, CHAT | {"n": 2})
    post(server, {"model": "fake"})
    httpx.get(server.url + "/made/up")
    wait_for(lambda: 'route="other",status="404"' in httpx.get(server.url + "/metrics").text)
    text = httpx.get(server.url + "/metrics").text
    for line in (
        'surogate_prompt_tokens_total{model_name="fake"}',
        'surogate_generation_tokens_total{model_name="fake"} 8.0',
        'surogate_request_success_total{finished_reason="stop",model_name="fake"} 2.0',
        'surogate_time_to_first_token_seconds_count{model_name="fake"} 1.0',
        'surogate_request_queue_time_seconds_sum{model_name="fake"} 0.25',
        'surogate_request_queue_time_seconds_bucket{le="0.15",model_name="fake"} 0.0',
        'surogate_request_prefill_time_seconds_count{model_name="fake"} 1.0',
        'surogate_inter_token_latency_seconds_count{model_name="fake"} 6.0',
        'surogate_e2e_request_latency_seconds_bucket{le="+Inf",model_name="fake"} 1.0',
        'surogate_num_requests_running{model_name="fake"} 0.0',
        'surogate_kv_cache_usage_perc{model_name="fake"} 0.25',
        'surogate_http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'surogate_http_requests_total{route="other",status="404"} 1.0',
        "process_resident_memory_bytes",
    ):
        assert line in text, line


def test_grammars_are_prepared_once_nobody_is_asking(serve, monkeypatch):
    monkeypatch.setattr(module, "REST_SECONDS", 0.05)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    models = FakeModel("a"), FakeModel("b")
    looks, prepared = [], []
    for model in models:
        monkeypatch.setattr(model.grammars, "prepare", lambda name=model.name: prepared.append(name))

    class Watched(Metrics):
        @property
        def rests(self):
            looks.append(len(prepared))
            return super().rests

    server = serve(*models)
    server.app.metrics.__class__ = Watched
    preparing = asyncio.run_coroutine_threadsafe(module.prepare_grammars(server.app), server.loop)
    wait_for(lambda: len(looks) > 30)
    assert not prepared  # nothing was answered yet
    assert post(server, CHAT | {"model": "b"}).status_code == 200
    wait_for(lambda: prepared == ["a", "b"])
    preparing.result(60)


def test_grammars_wait_for_those_who_ask(serve, monkeypatch):
    monkeypatch.setattr(module, "REST_SECONDS", 0.01)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    server, prepared = serve(), []
    monkeypatch.setattr(server.model.grammars, "prepare", lambda: prepared.append(server.model.running))
    assert post(server, CHAT).status_code == 200
    hold(server)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(post, server, CHAT, timeout=60)
        wait_for(lambda: server.model.waiting == 1)
        preparing = asyncio.run_coroutine_threadsafe(module.prepare_grammars(server.app), server.loop)
        with pytest.raises(TimeoutError):
            preparing.result(0.3)
        server.loop.call_soon_threadsafe(server.model.hold.set)
        assert asking.result(60).status_code == 200
    preparing.result(60)
    assert prepared == [0]


def test_request_log(serve, tmp_path):
    path = tmp_path / "requests.jsonl"
    server = serve(request_log=path, api_keys=("secret-key",))
    headers = {"content-type": "application/json", "authorization": "Bearer secret-key"}
    post(server, CHAT | {"stream": True}, headers=headers)
    post(server, CHAT | {"temperature": 9}, headers=headers)
    post(server, CHAT)
    wait_for(lambda: path.read_text().count("\n") == 3)  # a line is written once its answer was sent
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 401]
    first = lines[0]
    assert (
        first["stream"] and first["completion_tokens"] == 4 and first["finish"] == ["stop"] and first["model"] == "fake"
    )
    assert 0 <= first["first_token_seconds"] <= first["seconds"] and first["cached_tokens"] == 3
    assert (
        lines[1]["error"].startswith("temperature")
        and "Hi" not in path.read_text()
        and "secret" not in path.read_text()
    )


def test_request_log_with_prompts(serve, tmp_path):
    server = serve(request_log=tmp_path / "log", log_prompts=True)
    post(server, CHAT)
    wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"))
    assert json.loads((tmp_path / "log").read_text())["request"] == CHAT


UNNAMED = {
    "/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9}, "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "Hi"}, "/v1/responses/input_tokens": {"input": "Hi"}, "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [20]},
}  # fmt: skip


def test_several_models(serve):
    server = serve(FakeModel("a"), FakeModel("b", lambda generation, index: ["B"]))
    reply = post(server, {"model": "b", "messages": HI}).json()
    assert reply["choices"][0]["message"]["content"] == "B"
    for path, body in UNNAMED.items():
        answer = httpx.post(server.url + path, json=body)
        assert answer.status_code == 400 and "name one" in answer.json()["error"]["message"], path


def test_one_model_need_not_be_named(server):
    for path, body in UNNAMED.items():
        answer = httpx.post(server.url + path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", "fake") == "fake"


def test_probes_answer_heads(server):
    answer = httpx.head(server.url + "/health")
    assert answer.status_code == 200 and answer.content == b""
