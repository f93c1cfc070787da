"""`surogate bench serve`: how fast a server answers, as JSON."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from surogate_core.errors import ConfigError

from .serve import backend_of

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The URL of a server that speaks OpenAI's API (http://127.0.0.1:8000), a model that is served for this, or a preset "
        "of `surogate bench train`, which gets random weights.",
    ),
]


def bench_serve(
    target: Target,
    concurrency: Annotated[str, typer.Option(help="Clients at once; several as 1,8,32.")] = "1,8",
    burst: Annotated[
        bool, typer.Option("--burst", help="All clients ask at once, for one token and for all: prefill and decode apart.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: requests a second, at random moments, whatever the answers do.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a loop. Default: 8 for each client.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each burst; medians are told.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every request; random ids.")] = 512,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of every request.")] = 128,
    model: Annotated[str | None, typer.Option(help="A server's model. Default: its first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    path: Annotated[str, typer.Option(help="The server's route.")] = "/v1/completions",
    ids_below: Annotated[
        int | None, typer.Option(min=8, help="Ids of prompts. Default: 20000, and no more than a preset or a GGUF file has.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and moments.")] = 0,
    backend: Annotated[
        str, typer.Option(help="TARGET is no URL: what computes: cpu, cuda. auto: the GPU where there is one.")
    ] = "auto",
    recipe: Annotated[str, typer.Option(help="TARGET is no URL: the precision recipe.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="TARGET is no URL: threads of the CPU.")] = None,
    context: Annotated[int | None, typer.Option(min=16, help="TARGET is no URL: tokens of prompt and answer.")] = None,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="TARGET is no URL: answers computed at once.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="TARGET is no URL: tokens of a step.")] = None,
) -> None:
    """Load a server, and print one JSON object a line: rates, times to the first token and between tokens."""
    if shared_tokens > prompt_tokens:
        raise ConfigError(f"{shared_tokens} shared tokens do not fit a prompt of {prompt_tokens}")
    if burst and rate is not None:
        raise ConfigError("--burst and --rate are two kinds of load", "Give one of them.")
    clients = _counts(concurrency)
    is_url = target.startswith(("http://", "https://"))
    options: dict[str, Any] = {
        "backend": backend if is_url else backend_of(backend, 0), "recipe": recipe, "threads": threads, "context": context,
        "max_sequences": max_sequences, "token_budget": token_budget,
    }
    if context is None:
        options["context"] = prompt_tokens + output_tokens + 16
    from ..bench.load import Load, last_id
    from ..bench.server import server_of

    with nullcontext((target, 0.0)) if is_url else server_of(target, options) as (url, started):
        load = Load(
            model or _first_model(url, api_key), prompt_tokens, output_tokens, shared_tokens, requests or 0, rate, seed,
            ids_below or last_id(target),
        )
        facts: dict[str, Any] = {"bench": "serve", "model": load.model}
        if not is_url:
            facts |= {"start_seconds": round(started, 2), **_given(options)}
        facts |= {"prompt": prompt_tokens, "shared": shared_tokens, "output": output_tokens, "seed": seed}
        for count in clients:
            typer.echo(json.dumps({**facts, **_measure(url, path, api_key, load, count, burst, repetitions)}))


def _measure(url: str, path: str, api_key: str | None, load: Any, count: int, burst: bool, repetitions: int) -> dict[str, Any]:
    import uvloop

    from dataclasses import replace

    from ..bench.client import Endpoint
    from ..bench.load import run_burst, run_load

    endpoint = Endpoint(url, path, api_key)
    before = _processor_seconds(url, api_key)
    if burst:
        found = uvloop.run(run_burst(endpoint, load, count, repetitions))
    else:
        found = uvloop.run(run_load(endpoint, replace(load, requests=load.requests or 8 * count), count))
    after = _processor_seconds(url, api_key)
    if before is not None and after is not None:
        found["server_processor_seconds"] = round(after - before, 3)
    return found


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--concurrency {text}: not numbers of clients", "Write it as 1,8,32.")
    return counts


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _get(url: str, api_key: str | None) -> Any:
    import httpx

    return httpx.get(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, timeout=30)


def _first_model(url: str, api_key: str | None) -> str:
    """The name of a server's first model. ConfigError where it tells none."""
    import httpx

    try:
        answer = _get(f"{url.rstrip('/')}/v1/models", api_key)
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not tell its models: {error}", "Is a server there? Or name one: --model.") from None


def _processor_seconds(url: str, api_key: str | None) -> float | None:
    """What the server's process has used of processors, where it tells."""
    for line in _get(f"{url.rstrip('/')}/metrics", api_key).text.splitlines():
        if line.startswith("process_cpu_seconds_total "):
            return float(line.split()[1])
    return None
