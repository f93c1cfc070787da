"""The `surogate` command, one file a verb. Importing a verb imports nothing that it works with."""

from __future__ import annotations


def main() -> None:
    """Runs the command line of this process. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 Ctrl-C."""
    from .app import app

    app()
