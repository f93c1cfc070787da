"""Where the command writes: results to standard output, notes and errors to standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def output_console() -> Console:
    """For progress and tables. Text is printed as it is: brackets are no markup, numbers get no colour, lines are not wrapped."""
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True)


def error_console() -> Console:
    """For notes and errors; lines are not wrapped, so that paths can be copied and messages searched."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def tell(note: str) -> None:
    """Prints one note."""
    error_console().print(note, style="dim")
