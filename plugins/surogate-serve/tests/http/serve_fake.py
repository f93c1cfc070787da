"""A server process of a fake model, for tests of its life: python serve_fake.py PORT JSON, with seconds of limits."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake import FakeModel

from surogate_serve.http.app import create_app
from surogate_serve.http.limits import Limits, Settings
from surogate_serve.http.server import listen, run


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[2])
    tokens = options.pop("tokens", 100)
    model = FakeModel(script=lambda generation, choice: ["x"] * tokens)
    model.delay = options.pop("delay", 0.0)
    dies_after = options.pop("dies_after", None)
    app = create_app({"fake": model}, Settings(limits=Limits(**options)))

    def die() -> None:
        time.sleep(dies_after)
        model.dead = "killed by a test"

    def ready(url: str) -> None:
        print(url, flush=True)
        if dies_after is not None:
            threading.Thread(target=die, daemon=True).start()

    return run(app, listen("127.0.0.1", int(sys.argv[1])), ready)


if __name__ == "__main__":
    sys.exit(main())
