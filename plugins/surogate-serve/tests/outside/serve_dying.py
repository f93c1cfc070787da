"""Serves a model whose engine dies while it answers: python serve_dying.py FOLDER. The process of the dead one ends at the
end of its standard input, not after some seconds."""

from __future__ import annotations

import asyncio
import sys

from surogate_core.errors import EngineError

from surogate_serve.engine import EngineOptions
from surogate_serve.http import server
from surogate_serve.http.app import create_app
from surogate_serve.http.limits import Settings
from surogate_serve.http.server import listen, run
from surogate_serve.models import ServedModel


def main() -> int:
    model = ServedModel.open(sys.argv[1], "tiny", EngineOptions(threads=1, max_sequences=4))
    poll, count = model._pump._poll, 0

    def dying(timeout: float) -> list[object]:
        nonlocal count
        told = list(poll(timeout))
        count += bool(told)
        if count > 1:
            raise EngineError("a test ended the engine's thread")
        return told[:2]  # of however many steps: no answer is whole

    model._pump._poll = dying
    server.last_words = lambda: asyncio.to_thread(sys.stdin.read)
    code = run(create_app({"tiny": model}, Settings()), listen("127.0.0.1", 0), lambda url: print(url, flush=True))
    model.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
