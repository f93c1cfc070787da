"""`surogate generate`: answers and completions on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .options import model_path

if TYPE_CHECKING:
    from ..generate import Generator


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or: default.")],
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="What to answer. Default: standard input, or a chat at a terminal."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    adapter: Annotated[Path | None, typer.Option(help="A LoRA adapter's folder, as PEFT has it.")] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The chat template. Default: the adapter's, or the model's own."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which to stop.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    recipe: Annotated[str, typer.Option(help="The precision recipe.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
) -> None:
    """Answer a prompt, continue a text, or chat at the terminal."""
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out")
    if raw and chat_template is not None:
        raise ConfigError("--raw leaves --chat-template out", "Give one of them.")
    from ..generate import Generator

    generator = Generator(
        model_path(model), adapter=adapter, recipe=recipe, threads=threads, chat_template=chat_template
    )
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    messages = [] if system is None else [{"role": "system", "content": system}]
    if prompt is None and sys.stdin.isatty():
        if raw:
            raise ConfigError("--raw needs a text", "Give it with --prompt, or on standard input.")
        _chat(generator, messages, sampling)
        return
    text = sys.stdin.read() if prompt is None else prompt
    if raw:
        generator.complete(text, stream=_write, **sampling)
    else:
        generator.chat([*messages, {"role": "user", "content": text}], stream=_write, **sampling)
    _write("\n")


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _chat(generator: Generator, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> None:
    """Turns until the input ends."""
    typer.echo("An empty line or Ctrl-D ends the chat.", err=True)
    while True:
        try:
            text = input("> ")
        except EOFError:
            break
        if not text.strip():
            break
        messages.append({"role": "user", "content": text})
        pieces: list[str] = []

        def stream(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            _write(piece)

        generator.chat(messages, stream=stream, **sampling)
        _write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})
