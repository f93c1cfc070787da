"""The official clients, an old and a new release of each, against a server process: contract_openai.py and
contract_anthropic.py in the environment of each release."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def ask(python: str | Path, client: str, url: str) -> dict[str, object]:
    script = HERE / f"contract_{client}.py"
    done = subprocess.run([python, script, url, "tiny"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_installed_release(process, client):
    assert len(ask(sys.executable, client, process.url)["passed"]) >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "version"), [("openai", "2.14.0"), ("openai", "3.57.0"), ("anthropic", "0.125.0"), ("anthropic", "2.14.0")]
)
def test_old_and_new_releases(process, tmp_path, client, version):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{client}=={version}"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"{client} {version} could not be installed: {done.stderr[-300:]}")
    told = ask(python, client, process.url)
    assert told["version"] == version and len(told["passed"]) >= 10
