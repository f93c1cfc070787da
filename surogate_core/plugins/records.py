"""Small types that hooks take where no other part of the core defines one."""

from __future__ import annotations

import secrets
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
    """A kind of device. `library`: the file with its kernels. `unavailable()`: why this machine cannot use it, or
    None."""

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


OutputState = Literal["start", "content", "reasoning", "call", "called"]
"""start: an answer's text before anything of it is visible; content: the answer; call: the body of a tool call;
called: behind one. Text of start and called that is no marker is content, and the state then too."""


@dataclass(frozen=True)
class Marker:
    """A terminal of a format: in one of ``states``, ``text`` changes the state to ``to`` and is no output itself.

    Where the tokenizer has ``text`` as one added token, only that token counts, never text that looks like it;
    otherwise the text, however it is cut into tokens. begins_body: the text is also the first of the call's body, for
    calls that nothing announces (an answer that begins with "{").
    """

    states: tuple[OutputState, ...]
    text: str
    to: OutputState
    begins_body: bool = False


@dataclass
class CallProgress:
    """What a piece of a call's body told. name: from the piece on that made it certain; the call begins with it.
    arguments: what was gained of one JSON object. complete: the object is whole. failed: this is no call, or not any
    more. rest: with either of the two, the text from there on, which the reader did not take."""

    name: str | None = None
    arguments: str = ""
    complete: bool = False
    failed: bool = False
    rest: str = ""


class CallReader(Protocol):
    """Reads the bodies of one call. What it tells, joined, must not depend on how the text is cut."""

    def feed(self, text: str) -> CallProgress:
        """Takes the next piece. Not called again once the call is complete or failed."""

    def finish(self, closed: bool) -> CallProgress:
        """The body ended: by its closing marker (then a call whose arguments are whole is complete), or the answer is
        over."""


class CallSyntax(Protocol):
    """How a format writes a call."""

    quotes: tuple[str, ...]
    """Terminals inside a body (delimiters of strings). Where one is an added token, readers see
    ``quote_marks[text]``."""

    rules: str
    """Rules of Lark that the grammars of all calls may refer to."""

    def reader(self, tools: Mapping[str, Mapping[str, Any]], quote_marks: Mapping[str, str]) -> CallReader:
        """Begins one call. tools: name -> JSON schema of its parameters."""

    def grammar(self, name: str, parameters: Mapping[str, Any], terminal: Callable[[str], str]) -> str:
        """The body of a call of this tool as the right side of a Lark rule of llguidance; terminal(text) gives what
        matches a marker or a quote."""


def random_call_id(name: str, index: int) -> str:
    """An id for a call that nothing else is named by."""
    return "call_" + secrets.token_hex(12)


def no_variables(enabled: bool, effort: str | None) -> Mapping[str, Any]:
    """The template variables of a model whose thinking cannot be switched: none."""
    return {}


def never_detected(template: str) -> int:
    """The `detect` of a format that is only taken by its name."""
    return 0


@dataclass(frozen=True)
class OutputFormat:
    """How a family of models writes its answers: reasoning and tool calls, told by markers.

    reasoning: what opens and closes reasoning, None where the model has none. reasoning_header: text behind the
    opening marker that belongs to it. call: None where the format has no calls; markers: everything else that changes
    the state. call_begin and call_end: what a call's body stands between when it is written by a grammar.
    call_separator: between two calls there. turn_ends: tokens that end an answer even where the tokenizer does not say
    so. new_call_id(name, index): ids of calls. thinking_variables(enabled, effort): what the template is given to
    switch reasoning. detect(template): how surely a chat template's text is this format's, 0 for not; the largest
    wins. Whitespace beside a marker belongs to the marker.
    """

    name: str
    reasoning: tuple[str, str] | None = None
    reasoning_header: str = ""
    call: CallSyntax | None = None
    markers: tuple[Marker, ...] = ()
    call_begin: str = ""
    call_end: str = ""
    call_separator: str = ""
    turn_ends: tuple[str, ...] = ()
    new_call_id: Callable[[str, int], str] = field(default=random_call_id)
    thinking_variables: Callable[[bool, str | None], Mapping[str, Any]] = field(default=no_variables)
    detect: Callable[[str], int] = field(default=never_detected)


class Tracker(Protocol):
    """One run's metrics, on their way to somewhere else. It must not fail a run: what it raises is logged once."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one optimizer step, as the run's JSONL has them."""

    def finish(self, status: Literal["completed", "interrupted", "failed"]) -> None:
        """Called once at the end."""


class TrackerFactory(Protocol):
    """Opens a tracker. `config` is the resolved configuration, `output_dir` the run's folder."""

    def __call__(self, config: Any, output_dir: Path) -> Tracker: ...
