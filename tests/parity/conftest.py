"""torch runs on one thread here: the models are tiny, and the tests share their machine."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
