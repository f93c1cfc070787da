"""Small types that hooks take where no other part of the core defines one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, Union

# A path of a shared library, or a PyCapsule (which has no type of its own in `typing`).
KernelLibrary: TypeAlias = Union[str, Path, object]
# A function with typed parameters, or a typer.Typer.
CliCommand: TypeAlias = object

# What a capsule may point to: a filled sg_kernel_library, or a function that fills one.
KERNEL_CAPSULES = ("surogate.kernel_library_v1", "surogate.kernel_library_fn_v1")


def always_available() -> str | None:
    """The `unavailable` of a backend that needs nothing of the machine."""
    return None


@dataclass(frozen=True)
class Backend:
    """A kind of device. `library`: the file with its kernels. `unavailable()`: why this machine cannot use it, or None."""

    name: str
    library: Path
    unavailable: Callable[[], str | None] = always_available


def no_passes(config: Any) -> Sequence[Callable[[Any], Any]]:
    """The passes of a strategy on one device: none."""
    return ()


@dataclass(frozen=True)
class Strategy:
    """Where tensors live. `passes(config)` gives graph passes (graph -> graph) that shard and communicate."""

    name: str
    description: str
    passes: Callable[[Any], Sequence[Callable[[Any], Any]]] = field(default=no_passes)


@dataclass(frozen=True)
class OutputEvent:
    """A piece of a parsed answer. `text` holds content or reasoning, or a tool call's arguments as JSON text.

    `index` and `name` number and name the tool call that the piece belongs to; None for content and reasoning.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    index: int | None = None
    name: str | None = None


class OutputStream(Protocol):
    """The parsing of one answer."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Takes the next piece of the answer; gives what can be decided so far."""

    def finish(self) -> list[OutputEvent]:
        """Gives what was held back. A marker that never closed comes out as the text it is."""


class OutputParser(Protocol):
    """Splits generated text into content and reasoning, or content and tool calls."""

    kind: Literal["reasoning", "tool_calls"]

    def start(self, tools: Sequence[Mapping[str, Any]]) -> OutputStream:
        """Begins one answer. `tools`: the request's tool definitions as JSON schema, empty where there are none."""


class Tracker(Protocol):
    """One run's metrics, on their way to somewhere else. It must not fail a run: what it raises is logged once."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one optimizer step, as the run's JSONL has them."""

    def finish(self, status: Literal["completed", "interrupted", "failed"]) -> None:
        """Called once at the end."""


class TrackerFactory(Protocol):
    """Opens a tracker. `config` is the resolved configuration, `output_dir` the run's folder."""

    def __call__(self, config: Any, output_dir: Path) -> Tracker: ...
