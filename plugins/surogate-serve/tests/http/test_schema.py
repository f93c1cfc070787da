"""The OpenAPI document, and requests that are made up from it."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

CONFIG = """
[auth.openapi.bearer]
bearer = "boss"
[auth.openapi.x-api-key]
api_key = "boss"
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 501, 503]
[checks.positive_data_acceptance]
enabled = false
[checks.unsupported_method]
enabled = false
[checks.allow_header_conformance]
enabled = false
"""
"""A schema says less than what is checked: what it allows may be refused. 501: what the server does not have. Methods
have tests of their own: some need a key where others of the path do not, and some paths are also another's
parameter."""


def test_the_document(serve):
    server = serve(api_keys=("k",))
    document = httpx.get(server.url + "/openapi.json", headers={"x-api-key": "k"}).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize", "/metrics"} <= set(
        document["paths"]
    )
    assert document["security"] and document["paths"]["/health"]["get"]["security"] == []
    text = json.dumps(document)
    assert '"$defs"' not in text and "422" not in text
    missing = [
        reference
        for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
        if reference not in document["components"]["schemas"]
    ]
    assert not missing
    assert httpx.options(server.url + "/admin/adapters").status_code == 403


def test_all_methods_of_a_path_are_told(server):
    assert httpx.put(server.url + "/v1/models").headers["allow"] == "GET"
    assert httpx.put(server.url + "/health").headers["allow"] == "GET, HEAD"


@pytest.mark.slow
def test_made_up_requests(serve, tmp_path):
    pytest.importorskip("schemathesis")
    server = serve(api_keys=("boss",), admin_keys=("boss",))
    config, document = tmp_path / "schemathesis.toml", tmp_path / "openapi.json"
    config.write_text(CONFIG)
    document.write_bytes(httpx.get(server.url + "/openapi.json", headers={"x-api-key": "boss"}).content)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", str(document)]
    command += [
        "--url",
        server.url,
        "--max-examples",
        "15",
        "--phases",
        "coverage,fuzzing",
        "--seed",
        "1",
        "--no-color",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert server.model.running == server.model.waiting == 0
