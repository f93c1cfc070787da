"""`surogate serve`: models behind the APIs of OpenAI and Anthropic, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from surogate_core.cli.console import tell
from surogate_core.cli.options import model_path
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from ..engine import EngineOptions
    from ..http.limits import Settings
    from ..models import ModelPath

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A Hugging Face folder, a .gguf file, the folder of a run, or: default. Several as NAME=PATH.",
        ),
    ],
    host: Annotated[str, typer.Option(help="The address to listen on. 0.0.0.0: on every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port. 0: any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that requests must carry; may be given several times.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of such keys, one a line: other users of a machine see a command line.")
    ] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="A key for /admin routes; without one they are off.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A LoRA adapter of the first model; of another: MODEL:NAME=PATH."),
    ] = None,
    backend: Annotated[str, typer.Option(help="What computes: cpu, cuda. auto: the GPU where there is one.")] = "auto",
    device: Annotated[int, typer.Option(min=0, help="Which device of the backend.")] = 0,
    recipe: Annotated[str, typer.Option(help="The precision recipe.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    context: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a prompt and its answer. Default: the model's.")
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Answers that are computed at once. Default: what memory allows, up to 128."),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the key-value cache, such as 8G. Default: a share of what is free."
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of one step, prompts and answers together. Default: 8192 on a GPU, 512 on a CPU."),
    ] = None,
    adapter_slots: Annotated[int, typer.Option(min=0, help="Adapters that one step can use. 0: no adapters.")] = 4,
    adapter_rank: Annotated[int, typer.Option(min=1, help="The largest rank that an adapter may have.")] = 16,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Answers have the same bits whatever else is computed; slower. CPU only."
        ),
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The chat template: one by name (see `surogate plugins`), or a Jinja file. Default: what a run was trained "
            "with, or the model's own.",
        ),
    ] = None,
    parser: Annotated[
        str | None, typer.Option(help="How answers are read (see `surogate plugins`). Default: by the chat template.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask, such as https://example.org, or *.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may call the server by. Default without keys on this machine: localhost."
        ),
    ] = None,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Let /metrics be read without a key.")] = False,
    request_log: Annotated[
        Path | None, typer.Option(help="Append a line of JSON for every request to this file.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Also what the requests say.")] = False,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Answers of a model that may wait or run; more get 429.")
    ] = 1024,
    queue_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a request may wait; longer gets 503.")
    ] = 120.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that what runs may take when the server is asked to end.")
    ] = 30.0,
) -> None:
    """Serve models over HTTP until a signal ends it."""
    from ..engine import EngineOptions
    from ..http.limits import Limits, Settings

    keys = (*(api_key or ()), *_keys_of(api_key_file))
    if any(not key.strip() for key in (*keys, *(admin_key or ()))):
        raise ConfigError("a key may not be empty")
    settings = Settings(
        api_keys=keys,
        admin_keys=tuple(admin_key or ()),
        open_metrics=open_metrics,
        allowed_origins=tuple(allowed_origin or ()),
        allowed_hosts=hosts_of(allowed_host or (), host, bool(keys)),
        limits=Limits(queued=max_queue, queue_seconds=queue_timeout, drain_seconds=drain_timeout),
        request_log=request_log,
        log_prompts=log_prompts,
        parser=parser,
    )
    options = EngineOptions(
        recipe=recipe,
        backend=backend_of(backend, device, batch_invariant),
        device=device,
        threads=threads,
        context=context,
        max_sequences=max_sequences,
        kv_memory=None if kv_memory is None else _bytes_of(kv_memory),
        token_budget=token_budget,
        adapter_slots=adapter_slots,
        adapter_rank=adapter_rank,
        batch_invariant=batch_invariant,
    )
    code = _run(named_models(models), adapters_of(adapter or (), models), chat_template, options, settings, host, port)
    raise typer.Exit(code)


def _run(
    paths: dict[str | None, Path],
    adapters: dict[str | None, dict[str, str]],
    chat_template: str | None,
    options: EngineOptions,
    settings: Settings,
    host: str,
    port: int,
) -> int:
    """Opens, serves and closes; the exit code."""
    import logging
    from dataclasses import replace

    from ..http.app import create_app
    from ..http.server import listen, run
    from ..models import ServedModel
    from ..types import Refused

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    if host not in LOOPBACK and not settings.api_keys:
        tell(f"{host} can be reached from other machines, and no --api-key protects it")
    listener = listen(host, port)
    opened: dict[str, Any] = {}
    try:
        places = places_of(paths, adapters)
        for index, place in enumerate(places):
            share = 1.0 / (len(places) - index)  # those that come later need memory too
            model = ServedModel.open(place, options=replace(options, kv_share=share), chat_template=chat_template)
            opened[place.name] = model
            if settings.parser is not None:
                model.parser_named(settings.parser)
        app = create_app(opened, settings)
        names = ", ".join(name for model in opened.values() for name in model.names)
        return run(app, listener, lambda url: typer.echo(f"serving {names} at {url}"))
    except Refused as refused:
        raise ConfigError(refused.message) from None
    finally:
        listener.close()
        for model in opened.values():
            model.close()


def named_models(given: Sequence[str]) -> dict[str | None, Path]:
    """Paths by name; None: the one model's own name. Raises `ConfigError` where names are missing, unfit or come
    twice."""
    result: dict[str | None, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        # A path that exists is one, whatever characters it has.
        if not equals or Path(each).expanduser().exists():
            name, path = "", each
        if equals and name and not _MODEL_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a model", "Use letters, digits and _ . / -.")
        if not name and len(given) > 1:
            name = Path(path).expanduser().resolve().name.removesuffix(".gguf")
        if (name or None) in result:
            raise ConfigError(f"two models are named {name!r}", "Name them: NAME=PATH.")
        result[name or None] = model_path(path)
    return result


def places_of(paths: Mapping[str | None, Path], adapters: Mapping[str | None, Mapping[str, str]]) -> list[ModelPath]:
    """What is to be opened, each under names of its own. Runs of one base share it. Raises `SurogateError`."""
    from ..models import ModelPath

    places: list[ModelPath] = []
    for given, path in paths.items():
        place = ModelPath.of(path, given)
        for name, folder in adapters.get(given, {}).items():
            if name in place.adapters:
                raise ConfigError(f"--adapter {name}: {path} has an adapter of this name", "Choose another name.")
            place.adapters[name] = Path(folder)
        if (same := next((each for each in places if _shared(each, place)), None)) is None:
            places.append(place)
        elif both := same.adapters.keys() & place.adapters.keys():
            raise ConfigError(f"two adapters are named {min(both)!r}", "Name them: NAME=PATH.")
        else:
            same.name = place.name if place.name in place.main else same.name
            same.adapters |= place.adapters
            same.main += place.main
    names = [name for place in places for name in place.main]
    for place in places:
        others = [each.name for each in places if each is not place]
        if place.name not in place.main and place.name in (*names, *others):
            place.name = f"{place.main[0]}:base"
    names += [name for place in places for name in (place.name, *place.adapters) if name not in place.main]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models are named {twice!r}", "Name them: NAME=PATH.")
    return places


def _shared(one: ModelPath, other: ModelPath) -> bool:
    """Whether both need the same weights, and at most one of them names these."""
    named = one.name in one.main and other.name in other.main
    return one.base.resolve() == other.base.resolve() and not named


def adapters_of(given: Sequence[str], models: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Paths of adapters by name, by the model's name as `named_models` has it."""
    names = list(named_models(models))
    result: dict[str | None, dict[str, str]] = {}
    for each in given:
        name, equals, path = each.partition("=")
        base, colon, own = name.rpartition(":")
        if not equals or not own or not path:
            raise ConfigError(f"--adapter {each}: not NAME=PATH", "Give a name that requests will use, and a folder.")
        if colon and base not in names:
            raise ConfigError(f"--adapter {each}: there is no model {base!r}")
        if not _MODEL_NAME.fullmatch(own) or own in names:
            raise ConfigError(f"--adapter {each}: {own!r} is no name for it, or a model has it")
        result.setdefault(base if colon else names[0], {})[own] = path
    return result


def backend_of(name: str, device: int, batch_invariant: bool = False) -> str:
    """A backend that this machine can use. auto: the GPU where there is one and it can do what is asked. Raises
    `ConfigError`."""
    from surogate_core.plugins.manager import get_manager
    from surogate_core.train.machine import device_info

    backends = get_manager().backends
    if name == "auto" and batch_invariant:
        name = "cpu"  # the only one with such kernels
    elif name == "auto":
        usable = (each for each in backends if each != "cpu" and backends[each].unavailable() is None)
        name = next(usable, "cpu")
    elif reason := backends[name].unavailable():
        raise ConfigError(f"backend {name!r} cannot be used here: {reason}", "Leave --backend out.")
    if name != "cpu":
        device_info(name, device)
    elif device:
        raise ConfigError(f"--device {device}: the cpu is one device", "Leave --device out.")
    return name


def hosts_of(given: Sequence[str], host: str, with_keys: bool) -> tuple[str, ...]:
    """Names that requests may use; none: any. What only this machine reaches and no key protects answers to its own
    names."""
    if given or with_keys or host not in LOOPBACK:
        return (*(name.lower() for name in given), *LOOPBACK) if given else ()
    return LOOPBACK


def _keys_of(path: Path | None) -> list[str]:
    """The lines of a file of keys that are not empty."""
    if path is None:
        return []
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"{path}: no key in it")
    return keys


def _bytes_of(text: str) -> int:
    """4096, 512M, 8G, 8GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"--kv-memory {text}: not a size", "Write it as 512M or 8G.")
    return int(float(match[1]) * _UNITS[match[2]])
