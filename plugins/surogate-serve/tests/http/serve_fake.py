"""A server process of a fake model, for tests of its life: python serve_fake.py PORT JSON, with seconds of limits.

With "held", no request gets its first token before a line comes on the standard input; that also ends the engine where
"dies" is set, whose process then ends at the next line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake import FakeModel

from surogate_serve.http import server
from surogate_serve.http.app import create_app
from surogate_serve.http.limits import Limits, Settings
from surogate_serve.http.server import listen, run


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[2])
    tokens = options.pop("tokens", 100)
    model = FakeModel(script=lambda generation, choice: ["x"] * tokens)
    model.delay = options.pop("delay", 0.0)
    dies = options.pop("dies", False)
    if options.pop("held", False):
        model.hold.clear()
    app = create_app({"fake": model}, Settings(limits=Limits(**options)))

    read = asyncio.Event()
    server.last_words = read.wait

    def listen_for_a_line(loop: asyncio.AbstractEventLoop) -> None:
        if sys.stdin.readline():
            model.dead = "killed by a test" if dies else None
            loop.call_soon_threadsafe(model.hold.set)
            sys.stdin.readline()
            loop.call_soon_threadsafe(read.set)

    def ready(url: str) -> None:
        print(url, flush=True)
        threading.Thread(target=listen_for_a_line, args=[asyncio.get_running_loop()], daemon=True).start()

    return run(app, listen("127.0.0.1", int(sys.argv[1])), ready)


if __name__ == "__main__":
    sys.exit(main())
