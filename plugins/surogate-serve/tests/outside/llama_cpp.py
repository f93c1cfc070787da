"""Runs the tests of llama.cpp's server against `surogate serve`.

    python plugins/surogate-serve/tests/outside/llama_cpp.py                    # all files that concern us
    python plugins/surogate-serve/tests/outside/llama_cpp.py unit/test_security.py -k api_key
    python plugins/surogate-serve/tests/outside/llama_cpp.py --source /path/to/llama_cpp_python-0.3.36.tar.gz

They come with the sources of llama-cpp-python, which pip fetches; nothing of them is kept here. Tests start servers
as they would start llama.cpp's (see llama_server.py); where they leave out /v1, it is put in. Prints one JSON object:
outcomes by test. docs/serving-conformance.md says what the failures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
PLACE = "vendor/llama.cpp/"
HERE = Path(__file__).resolve().parent
FILES = [
    f"unit/test_{name}.py"
    for name in (
        "basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "embedding", "ignore_eos",
        "metrics", "security", "tokenize",
    )
]  # fmt: skip
_ANY_MODEL = re.compile(rb"""(model(?:": |=))"(test|gpt-[^"]*|davinci[^"]*|text-embedding[^"]*)["]""")
_WGET = "def download(*arguments, **named):\n    raise OSError('nothing is downloaded here')\n"
_PLUGIN = """
import json

outcomes, running = {}, []
PREFIXED = ("/chat/completions", "/models", "/embeddings", "/completions", "/responses")


def pytest_collection_modifyitems(items):
    import utils

    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would fetch models
    server = utils.ServerProcess
    start, stop, make_url = server.start, server.stop, server.make_url

    def start_or_keep(self, *arguments, **named):
        # A server that was started with the same words goes on for the next test.
        words = {key: value for key, value in vars(self).items() if key not in ("process", "ready")}
        if running and running[0] == words and running[1].process.poll() is None:
            self.process = running[1].process
            return
        if running:
            stop(running[1])
            running.clear()
        start(self, *arguments, **named)
        running[:] = [words, self]

    server.start, server.stop = start_or_keep, lambda self: utils.server_instances.discard(self)
    server.make_url = lambda self, path, host=None: make_url(
        self, "/v1" + path if path.startswith(PREFIXED) else path, host
    )


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = "" if report.outcome == "passed" else str(report.longrepr.reprcrash.message if hasattr(
            report.longrepr, "reprcrash") and report.longrepr.reprcrash else report.longrepr)[-300:]
        outcomes.setdefault(report.nodeid, [report.outcome, reason])
        save()


def save():
    with open("outcomes.json", "w") as file:
        json.dump(outcomes, file)


def pytest_sessionfinish(session):
    save()
    if running:
        running[1].process.terminate()
"""


def fetch(folder: Path) -> Path:
    """The source distribution, by pip."""
    options = ["--quiet", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=True, capture_output=True)
    return next(folder.glob("*.tar.gz"))


def unpack(source: Path, folder: Path) -> Path:
    """The folder of the tests, beside the templates that they read."""
    with tarfile.open(source) as archive:
        for member in archive:
            _, _, inner = member.name.partition(PLACE)
            if inner.startswith(("tools/server/tests/", "models/templates/")) and member.isfile():
                target = folder / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(_with_our_models(target.name, archive.extractfile(member).read()))
    return folder / "tools/server/tests"


def _with_our_models(name: str, text: bytes) -> bytes:
    """A test that names any model names the one that is served: llama.cpp's server reads no names, ours refuses."""
    if not name.startswith("test_"):
        return text
    served = {"test_compat_anthropic.py": b"tinyllama-2-anthropic", "test_embedding.py": b"bert-bge-small"}
    return _ANY_MODEL.sub(rb'\1"' + served.get(name, b"tinyllama-2") + b'"', text)


def run(tests: Path, words: list[str], port: int, seconds: float) -> dict[str, list[str]]:
    """(outcome, why) of each test."""
    sys.path.insert(0, str(HERE))
    from llama_server import write_model

    model = write_model(tests / "model")
    server = tests / "llama-server"
    server.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nsys.path.insert(0, {str(HERE)!r})\n"
        f"from llama_server import main\nmain(Path({str(model)!r}))\n"
    )
    server.chmod(0o755)
    (tests / "wget.py").write_text(_WGET)
    (tests / "outcomes_plugin.py").write_text(_PLUGIN)
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(server), "PYTHONPATH": str(tests), "PORT": str(port)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes_plugin", *words]
    with open(tests / "output.txt", "w") as output:
        subprocess.run(command, cwd=tests, env=environment, timeout=seconds, stdout=output, stderr=output)
    return json.loads((tests / "outcomes.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="the source distribution, where it is there already")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it")
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = unpack(arguments.source or fetch(folder), folder / "llama.cpp")
        outcomes = run(tests, words or FILES, arguments.port, arguments.seconds)
    counts = {outcome: sum(one == outcome for one, _ in outcomes.values()) for outcome in ("passed", "failed", "skipped")}
    print(json.dumps({"package": PACKAGE, **counts, "tests": outcomes}, indent=1))
    return 0 if outcomes and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
