"""The life of a server process: signals, the drain, an engine's death, connections that bring nothing."""

from __future__ import annotations

import json
import signal
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from conftest import wait_for

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


class Process:
    """A server in a process of its own."""

    def __init__(self, **options):
        script = Path(__file__).parent / "serve_fake.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), "0", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.process.stderr.read()
        self.port = int(self.url.rpartition(":")[2])

    def chat(self, **body):
        return httpx.post(self.url + "/v1/chat/completions", json=CHAT | body, timeout=120)

    def wait_for(self, state, count=1):
        """Until so many requests are "running" or "waiting"."""
        wait_for(lambda: httpx.get(self.url + "/stats").json()["models"]["fake"][state] == count)

    def wait_until_it_drains(self):
        wait_for(lambda: httpx.get(self.url + "/ready").status_code == 503)

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, seconds=60):
        code = self.process.wait(seconds)
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors = self.process.stderr.read()
        self.process.stderr.close()
        return code


@pytest.fixture
def start():
    started = []

    def make(**options):
        started.append(Process(**options))
        return started[-1]

    yield make
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.end()


def in_thread(function):
    """Runs it beside; the list gets its result."""
    result = []
    threading.Thread(target=lambda: result.append(function()), daemon=True).start()
    return result


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_lets_requests_end(start, stream):
    server = start(held=True, tokens=50, drain_seconds=120)
    result = in_thread(lambda: server.chat(stream=stream))
    server.wait_for("waiting")
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_it_drains()
    refused = server.chat()
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert httpx.get(server.url + "/health").status_code == 200
    server.go_on()
    assert server.end() == 0
    wait_for(lambda: result)
    assert result[0].status_code == 200
    assert result[0].text.count("x") >= 50 and (not stream or result[0].text.endswith("data: [DONE]\n\n"))


def test_a_drain_ends_what_takes_too_long(start):
    server = start(delay=0.05, tokens=100000, drain_seconds=0.5)
    stream, whole = in_thread(lambda: server.chat(stream=True)), in_thread(server.chat)
    server.wait_for("running", 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    wait_for(lambda: stream and whole)
    assert "shutting_down" in stream[0].text and stream[0].text.endswith("data: [DONE]\n\n")
    assert whole[0].status_code == 503


def test_a_second_signal_hurries(start):
    server = start(delay=0.05, tokens=100000, drain_seconds=600)
    in_thread(lambda: server.chat(stream=True))
    server.wait_for("running")
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_it_drains()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0


def test_an_idle_server_ends_at_once(start):
    server = start(drain_seconds=600)
    with httpx.Client() as client:
        assert client.get(server.url + "/health").status_code == 200  # a connection that stays open
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_the_process_of_a_dead_engine_ends(start):
    server = start(dies=True)
    assert httpx.get(server.url + "/health").status_code == 200
    server.go_on()
    wait_for(lambda: httpx.get(server.url + "/health").status_code == 503)
    assert "killed by a test" in httpx.get(server.url + "/health").json()["reason"]
    assert server.chat().status_code == 503
    server.go_on()
    assert server.end() == 1 and "killed by a test" in server.errors


def test_headers_that_never_come(start):
    server = start(header_seconds=0.5)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.sendall(b"GET /health HTTP/1.1\r\nx: ")
    sent = 0
    while not select.select([slow], [], [], 0.02)[0]:  # its bytes come until it is told to stop
        slow.sendall(b"y")
        sent += 1
        assert sent < 3000, "bytes that trickle in put the end off"
    assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert all(each.recv(1000).startswith(b"HTTP/1.1 408 ") for each in idle)
    for each in (*idle, slow):
        each.close()
    with httpx.Client() as client:  # a connection that was used may rest for longer than headers may take
        assert client.get(server.url + "/health").status_code == 200
        select.select([], [], [], 0.8)
        assert client.get(server.url + "/health").status_code == 200


def test_headers_that_are_too_large(start):
    server = start(header_bytes=8192)
    whole = httpx.get(server.url + "/health", headers={"x": "y" * 9000})
    assert whole.status_code == 431
    with socket.create_connection(("127.0.0.1", server.port)) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\nx: ")
        got = b""
        try:
            for _ in range(200):
                endless.sendall(b"y" * 1000)
                if select.select([endless], [], [], 0.001)[0]:
                    break
            got = endless.recv(1000)
        except OSError:
            got = got or b"HTTP/1.1 431 "
        assert got.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(server.url + "/health").status_code == 200


def test_connections_beyond_the_limit(start):
    server = start(connections=50)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    assert any(each.recv(1000).startswith(b"HTTP/1.1 503 ") for each in held[50:51])
    for each in held:
        each.close()
    wait_for(lambda: httpx.get(server.url + "/health").status_code == 200)


@pytest.mark.slow
def test_ten_thousand_connections(start):
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 500)
    server = start(delay=0.005, tokens=200, header_seconds=60)
    held = []
    try:
        for index in range(count):
            held.append(socket.create_connection(("127.0.0.1", server.port)))
            if index % 2:
                held[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert server.chat(stream=True).text.endswith("data: [DONE]\n\n")
    finally:
        for each in held:
            each.close()
    assert httpx.get(server.url + "/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
