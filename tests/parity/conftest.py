"""Peers to compare with: torch, on one thread since the models are tiny and tests share their machine, and llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .variants import Case, Exported, exported


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)


NPM_PACKAGE = "@node-llama-cpp/linux-x64"
NPM_VERSION = "3.22.1"


@dataclass
class LlamaCpp:
    """llama.cpp, one thread, float32 cache, no flash attention: see llama_cpp/driver.mjs."""

    node: str
    binaries: Path

    def ask(self, questions: Sequence[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
        """One reply a question, with "logits" as float32 [positions, vocab] where some were asked for. AssertionError when
        llama.cpp does not load a model or the driver fails."""
        replies = self.try_asking(questions, scratch)
        for reply in replies:
            assert "error" not in reply, reply["error"]
        return replies

    def try_asking(self, questions: Sequence[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
        """The same, where the reply for a model that does not load has its "error" alone."""
        requests = [
            {"threads": 1, "context": 256, "tokenize": [], "logits": [], "greedy": [], "embed": [],
             "logits_file": str(scratch / f"{i}.f32"), **question, "model": str(question["model"])}
            for i, question in enumerate(questions)
        ]
        driver = Path(__file__).parent / "llama_cpp" / "driver.mjs"
        run = subprocess.run(
            [self.node, str(driver), str(self.binaries)], input=json.dumps(requests), capture_output=True, text=True, timeout=300,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        replies = json.loads(run.stdout)
        for request, reply in zip(requests, replies, strict=True):
            if "error" in reply:
                reply["error"] += f": {run.stderr[-2000:]}"
            elif request["logits"]:
                count = sum(map(len, request["logits"]))
                reply["logits"] = np.fromfile(request["logits_file"], np.float32).reshape(count, -1)
        return replies


@pytest.fixture(scope="session")
def llama_cpp() -> LlamaCpp:
    node = shutil.which("node")
    binaries = Path(sys.prefix) / "node_modules" / NPM_PACKAGE / "bins" / "linux-x64"
    if node is None or not (binaries / "llama-addon.node").is_file():
        what = "node is not on the PATH" if node is None else f"{NPM_PACKAGE} is not installed in this environment"
        pytest.skip(f"llama.cpp: {what}: npm install --prefix {sys.prefix} --ignore-scripts {NPM_PACKAGE}@{NPM_VERSION}")
    return LlamaCpp(node, binaries)


@pytest.fixture(scope="session")
def gguf_of(tmp_path_factory) -> Callable[[Case], Exported]:
    """A variant's checkpoint and its export in f32, made when first asked for."""
    folder = tmp_path_factory.mktemp("gguf_of")
    return cache(lambda case: exported(case, folder))
