"""The soak, as short as still shows a request that is stuck or a token that is not accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "soak.py"


@pytest.mark.slow
def test_twenty_seconds_of_mixed_traffic():
    done = subprocess.run([sys.executable, SCRIPT, "--seconds", "20"], capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout or "{}")
    assert done.returncode == 0, (report.get("problems"), done.stderr[-2000:])
    assert report["requests"] > 20 and report["left"] > 0
    assert report["tokens"]["calm"]["made"] == report["tokens"]["calm"]["told"] > 0
