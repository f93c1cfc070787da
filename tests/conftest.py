"""Options of the whole suite, and what becomes of the tests of a device where there is none."""

from __future__ import annotations

import pytest

from surogate_core.engine import cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/program/golden anew instead of comparing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a usable device no test of CUDA is selected."""
    of_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if of_cuda and cuda.unavailable() is not None:
        config.hook.pytest_deselected(items=of_cuda)
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
        config.stash[_LEFT_OUT] = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says so, once. Workers of pytest-xdist collect, and have no terminal: then it is said whatever was collected."""
    reason = cuda.unavailable()
    if reason is not None and (_LEFT_OUT in config.stash or config.pluginmanager.has_plugin("dsession")):
        terminalreporter.write_line(f"tests of CUDA were left out: {reason}")


_LEFT_OUT = pytest.StashKey[bool]()
