"""An engine that dies under requests: all of them end, /health says why, and the process ends with an error."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
SCRIPT = Path(__file__).parent / "serve_dying.py"


def test_the_process_of_a_dead_engine_ends(tiny):
    process = subprocess.Popen([sys.executable, SCRIPT, tiny], text=True, **PIPES)
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()

        def ask(stream: bool) -> str:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True, "stream": stream}
            return httpx.post(url + "/v1/chat/completions", json=body, timeout=60).text

        assert httpx.get(url + "/health").status_code == 200
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(ask, [True, False] * 3))
        assert all("ended the engine" in answer for answer in answers), answers
        health = httpx.get(url + "/health")
        assert health.status_code == 503 and "a test ended the engine's thread" in health.json()["reason"]
        output, errors = process.communicate(timeout=60)
        assert process.returncode not in (0, None)
        assert "a test ended the engine's thread" in errors and "Traceback" not in errors
    finally:
        process.kill()
