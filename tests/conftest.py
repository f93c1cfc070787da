"""Options of the whole suite, and what becomes of the tests of a device where there is none."""

from __future__ import annotations

import pytest

from surogate_core.engine import cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/program/golden anew instead of comparing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a usable device no test of CUDA is selected; `pytest_terminal_summary` says so once."""
    of_cuda = [item for item in items if item.get_closest_marker("cuda")]
    reason = cuda.unavailable() if of_cuda else None
    if reason is not None:
        config.hook.pytest_deselected(items=of_cuda)
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
        config.stash[_LEFT_OUT] = f"{len(of_cuda)} tests of CUDA left out: {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _LEFT_OUT in config.stash:
        terminalreporter.write_line(config.stash[_LEFT_OUT])


_LEFT_OUT = pytest.StashKey[str]()
