"""`surogate chat`: a conversation at the terminal, with a model of this machine or with a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from surogate_core.cli.console import error_console, output_console, tell
from surogate_core.cli.options import model_path
from surogate_core.errors import ConfigError

from .serve import adapters_of, backend_of

if TYPE_CHECKING:
    from rich.console import Console

EFFORTS = ("auto", "none", "low", "medium", "high")
HELP = """/new              begin again
/retry            another answer to the last message
/system TEXT      the system message, from the next conversation turn on
/model [NAME]     which model or adapter answers
/think LEVEL      auto, none, low, medium or high
/set NAME VALUE   temperature, top_p or max_tokens; max_tokens 0: what fits
/help, /exit      Ctrl-C stops an answer; a line that ends in \\ goes on"""


@dataclass
class Wishes:
    """How answers are wanted. max_tokens 0: what fits."""

    model: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 0
    think: str = "auto"

    def set(self, name: str, value: str) -> str | None:
        """Returns what is wrong, or None."""
        kinds = {"temperature": (float, 0, 2), "top_p": (float, 0, 1), "max_tokens": (int, 0, 1 << 31)}
        if name not in kinds:
            return f"there are {', '.join(kinds)}"
        kind, low, high = kinds[name]
        try:
            number = kind(value)
        except ValueError:
            return f"{value!r} is no number"
        if not low <= number <= high:
            return f"{name} is from {low} to {high}"
        setattr(self, name, number)
        return None


@dataclass
class Piece:
    """A part of an answer as it comes. The last one has ``usage``: prompt, cached and answered tokens."""

    text: str = ""
    reasoning: bool = False
    usage: tuple[int, int, int] | None = None


class Partner(Protocol):
    """Who answers."""

    names: list[str]

    def answer(self, messages: list[dict[str, Any]], wishes: Wishes) -> AsyncGenerator[Piece, None]:
        """Raises `Refused`. Closing it cancels."""

    def close(self) -> None: ...


class LocalModel:
    """A model in this process."""

    def __init__(self, path: str, adapters: list[str], options: dict[str, Any], chat_template: str | None) -> None:
        """Raises SurogateError."""
        from ..engine import EngineOptions
        from ..models import ServedModel

        of_model = adapters_of(adapters, [path]).get(None)
        settings = EngineOptions(max_sequences=1, **options)
        self._model = ServedModel.open(model_path(path), None, settings, of_model, chat_template)
        self.names = self._model.names

    async def answer(self, messages: list[dict[str, Any]], wishes: Wishes) -> AsyncGenerator[Piece, None]:
        from ..answers import Answer
        from ..pulled import pulled
        from ..types import Content, Finished, Generation, Reasoning, Refused, Sampling, Usage

        model, variables = self._model, {}
        if wishes.think != "auto":
            enabled = wishes.think != "none"
            variables = model.parser.format.thinking_variables(enabled, wishes.think if enabled else None)
        prompt = model.render(messages, **variables)
        generation = Generation(
            prompt.tokens,
            max_tokens=wishes.max_tokens or None,
            sampling=Sampling(temperature=wishes.temperature, top_p=max(wishes.top_p, 1e-6)),
            adapter=None if wishes.model == model.name else wishes.model,
        )
        async with aclosing(pulled(Answer(model, prompt, generation).read)) as events:
            async for event in events:
                if isinstance(event, (Content, Reasoning)):
                    yield Piece(event.text, isinstance(event, Reasoning))
                elif isinstance(event, Finished) and event.reason in ("error", "cancelled"):
                    raise Refused(event.error or "the engine could not finish this answer", 500)
                elif isinstance(event, Usage):
                    yield Piece(usage=(event.prompt_tokens, event.cached_tokens, event.completion_tokens))

    def close(self) -> None:
        self._model.close()


class Server:
    """A server with OpenAI's chat completions."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises `ConfigError` where it does not answer."""
        import httpx

        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            reply = httpx.get(self._url + "/models", headers=self._headers, timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"no server answers at {url}: {error}", "Start one with `surogate serve`.") from None
        if reply.status_code != 200:
            raise ConfigError(f"{url}: {_complaint(reply.status_code, reply.content)}")
        self.names = [each["id"] for each in reply.json()["data"]]

    async def answer(self, messages: list[dict[str, Any]], wishes: Wishes) -> AsyncGenerator[Piece, None]:
        import httpx

        from ..types import Refused

        body: dict[str, Any] = {
            "model": wishes.model, "messages": messages, "temperature": wishes.temperature, "top_p": wishes.top_p,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if wishes.max_tokens:
            body["max_tokens"] = wishes.max_tokens
        if wishes.think != "auto":
            body["reasoning_effort"] = wishes.think
        timeout = httpx.Timeout(10, read=None)
        try:
            async with (
                httpx.AsyncClient(timeout=timeout, headers=self._headers) as client,
                client.stream("POST", self._url + "/chat/completions", json=body) as reply,
            ):
                if reply.status_code != 200:
                    raise Refused(_complaint(reply.status_code, await reply.aread()), reply.status_code)
                async for line in reply.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for piece in _pieces(json.loads(line[6:])):
                            yield piece
        except httpx.HTTPError as error:
            raise Refused(f"the connection broke: {error}", 503) from None

    def close(self) -> None:
        pass


def _pieces(chunk: dict[str, Any]) -> Iterator[Piece]:
    from ..types import Refused

    if "error" in chunk:
        raise Refused(chunk["error"].get("message", "the server failed"), 500)
    for choice in chunk["choices"]:
        delta = choice["delta"]
        if reasoning := delta.get("reasoning_content"):
            yield Piece(reasoning, True)
        if content := delta.get("content"):
            yield Piece(content)
    if usage := chunk.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        yield Piece(usage=(usage["prompt_tokens"], cached, usage["completion_tokens"]))


def _complaint(status: int, body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"it answered {status}"


# -- the conversation --------------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation. ``run`` reads lines until there are no more."""

    partner: Partner
    wishes: Wishes
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        console = output_console()
        with asyncio.Runner() as runner:
            for line in lines:
                text = line.strip()
                if text in ("/exit", "/quit"):
                    return
                if text.startswith("/"):
                    if self._command(*text[1:].partition(" ")[::2]):
                        self._answer(runner, console)
                elif text:
                    self.messages.append({"role": "user", "content": line})
                    self._answer(runner, console)

    def _command(self, name: str, rest: str) -> bool:
        """Whether an answer is wanted now."""
        wrong, rest = None, rest.strip()
        if name == "new":
            self.messages.clear()
        elif name == "retry":
            while self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if self.messages:
                return True
            wrong = "there is no message yet"
        elif name == "system":
            self.system = rest or None
        elif name == "model":
            if rest and rest not in self.partner.names:
                wrong = f"there are {', '.join(self.partner.names)}"
            elif rest:
                self.wishes.model = rest
            else:
                tell("  ".join(f"[{each}]" if each == self.wishes.model else each for each in self.partner.names))
        elif name == "think":
            wrong = None if rest in EFFORTS else f"thinking is {', '.join(EFFORTS)}"
            self.wishes.think = rest if wrong is None else self.wishes.think
        elif name == "set":
            wrong = self.wishes.set(*rest.partition(" ")[::2])
        elif name == "help":
            tell(HELP)
        else:
            wrong = "unknown: /help tells what there is"
        if wrong is not None:
            _warn(f"/{name}: {wrong}")
        return False

    def _answer(self, runner: asyncio.Runner, console: Console) -> None:
        """What was said before Ctrl-C is kept, as the person has read it."""
        from ..types import Refused

        said: list[str] = []
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            runner.run(self._print(console, [*system, *self.messages], said))
        except KeyboardInterrupt:
            console.print()
            tell("stopped")
        except Refused as refused:
            _warn(refused.message)
        if said:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self.messages.pop()

    async def _print(self, console: Console, messages: list[dict[str, Any]], said: list[str]) -> None:
        began, first, thinking = time.perf_counter(), None, False
        async with aclosing(self.partner.answer(messages, self.wishes)) as pieces:
            async for piece in pieces:
                if piece.usage is not None:
                    console.print()
                    tell(_figures(piece.usage, began, first))
                    continue
                if first is None:
                    first = time.perf_counter()
                if thinking and not piece.reasoning:
                    console.print("\n")
                thinking = piece.reasoning
                console.print(piece.text, end="", style="dim italic" if piece.reasoning else None)
                console.file.flush()
                if not piece.reasoning:
                    said.append(piece.text)


def _figures(usage: tuple[int, int, int], began: float, first: float | None) -> str:
    prompt, cached, tokens = usage
    parts = [f"{tokens} tokens"]
    if first is not None:
        seconds = time.perf_counter() - first
        if tokens > 1 and seconds > 0:
            parts.append(f"{(tokens - 1) / seconds:.1f} tokens/s")
        parts.append(f"first after {1000 * (first - began):.0f} ms")
    if cached:
        parts.append(f"{cached} of {prompt} prompt tokens cached")
    return " · ".join(parts)


def _warn(text: str) -> None:
    error_console().print(text, style="red")


def _typed() -> Iterator[str]:
    """Lines of a terminal; at its end, or Ctrl-C at the prompt, there are no more."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history for input()
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("  ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        yield line


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|URL", help="A Hugging Face folder, a .gguf file, a run's folder, default, or a server's URL."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Which of the server's models, or which adapter. Default: the first.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest of this mass.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Tokens of an answer. 0: what fits.")] = 0,
    think: Annotated[str, typer.Option(help="Thinking: auto, none, low, medium or high.")] = "auto",
    api_key: Annotated[str | None, typer.Option(help="The server's key.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A LoRA adapter of the model; see --name.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The chat template of a model of this machine. Default: its own."),
    ] = None,
    backend: Annotated[str, typer.Option(help="What computes: cpu, cuda. auto: the GPU where there is one.")] = "auto",
    device: Annotated[int, typer.Option(min=0, help="Which device of the backend.")] = 0,
    recipe: Annotated[str, typer.Option(help="The precision recipe.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    context: Annotated[int | None, typer.Option(min=16, help="Tokens of the conversation.")] = None,
) -> None:
    """Chat at the terminal with a model, or with a running server; lines of standard input where it is no terminal."""
    if think not in EFFORTS:
        raise ConfigError(f"--think {think}: there are {', '.join(EFFORTS)}")
    partner: Partner
    if model.startswith(("http://", "https://")):
        if chat_template is not None:
            raise ConfigError("--chat-template is the server's to say", "Give it to `surogate serve`.")
        partner = Server(model, api_key)
    else:
        chosen = backend_of(backend, device)
        options = {"backend": chosen, "device": device, "recipe": recipe, "threads": threads, "context": context}
        partner = LocalModel(model, adapter or [], options, chat_template)
    try:
        if name is not None and name not in partner.names:
            raise ConfigError(f"--name {name}: there are {', '.join(partner.names)}")
        wishes = Wishes(name or partner.names[0], temperature, top_p, max_tokens, think)
        terminal = sys.stdin.isatty()
        if terminal:
            tell(f"{wishes.model}: /help tells what can be done, Ctrl-D ends")
        Talk(partner, wishes, system).run(_typed() if terminal else (line.rstrip("\n") for line in sys.stdin))
    finally:
        partner.close()
