"""What the core itself brings, registered through the same hooks as any plugin's.

Every import of another part of the core is inside its hook, so that importing the plugin manager stays cheap.
"""

from __future__ import annotations

from pathlib import Path

from .hookspecs import hookimpl
from .records import Backend, Strategy


@hookimpl
def surogate_ops(register):
    from ..ops import ALL

    for name, op in ALL.items():
        register(name, op)


@hookimpl
def surogate_backends(register):
    from ..engine import cuda

    library = Path(__file__).resolve().parent.parent / "lib" / "libsurogate_cpu.so"
    register("cpu", Backend(name="cpu", library=library))
    register("cuda", Backend(name="cuda", library=cuda.LIBRARY, unavailable=cuda.unavailable))


@hookimpl
def surogate_recipes(register):
    from ..passes.precision import RECIPES

    for name, recipe in RECIPES.items():
        register(name, recipe)


@hookimpl
def surogate_optimizers(register):
    from ..train.optimizers import BUILTIN

    for name, optimizer in BUILTIN.items():
        register(name, optimizer)


@hookimpl
def surogate_strategies(register):
    register("single", Strategy(name="single", description="one device holds everything"))


@hookimpl
def surogate_dataset_formats(register):
    from ..data.formats import BUILTIN

    for name, dataset_format in BUILTIN.items():
        register(name, dataset_format)


@hookimpl
def surogate_chat_templates(register):
    from ..data.template import BUILTIN

    for name, text in BUILTIN.items():
        register(name, text)


@hookimpl
def surogate_models(register):
    from ..weights.default_model import DEFAULT

    register(DEFAULT.name, DEFAULT)


@hookimpl
def surogate_trackers(register):
    from ..train.trackers import BUILTIN

    for name, tracker in BUILTIN.items():
        register(name, tracker)


@hookimpl
def surogate_cli_commands(register):
    from ..cli.app import app

    for command in app.registered_commands:
        register(command.name or command.callback.__name__.replace("_", "-"), command.callback)
    for group in app.registered_groups:
        register(group.name, group.typer_instance)
