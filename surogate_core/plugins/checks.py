"""What each hook's items must be. Types of other parts of the core are imported only when an item is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from ..errors import DataError, PluginError
from .records import KERNEL_CAPSULES, Backend, OutputFormat, Strategy


def _describe(item: object) -> str:
    return f"a {type(item).__module__}.{type(item).__qualname__}"


def require_type(noun: str, name: str, item: object, expected: type) -> None:
    """`item` is an `expected` that carries `name`."""
    if not isinstance(item, expected):
        kin = "; it belongs to another copy of the core" if type(item).__name__ == expected.__name__ else ""
        raise PluginError(
            f"{noun} {name!r} is {_describe(item)}, not a {expected.__module__}.{expected.__qualname__}{kin}"
        )
    own = getattr(item, "name", name)
    if own != name:
        raise PluginError(f"{noun} {name!r} calls itself {own!r}", "Register it under its own name.")


def check_family(name: str, item: object) -> None:
    from ..dsl import Family

    require_type("model family", name, item, Family)


def check_op(name: str, item: object) -> None:
    from ..ops import Op

    require_type("op", name, item, Op)


def check_recipe(name: str, item: object) -> None:
    from ..passes.precision import Recipe

    require_type("precision recipe", name, item, Recipe)


def check_optimizer(name: str, item: object) -> None:
    from ..train.optimizers import Optimizer

    require_type("optimizer", name, item, Optimizer)


def check_backend(name: str, item: object) -> None:
    require_type("backend", name, item, Backend)


def check_strategy(name: str, item: object) -> None:
    require_type("parallelism strategy", name, item, Strategy)


def check_kernel_library(name: str, item: object) -> None:
    if isinstance(item, (str, Path)):
        if not Path(item).is_file():
            raise PluginError(
                f"kernel library {name!r}: there is no file {item}", "Was the plugin's native part built and installed?"
            )
        return
    if type(item).__name__ != "PyCapsule":
        raise PluginError(f"kernel library {name!r} is {_describe(item)}, neither a path nor a capsule")
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    capsule_name = (get_name(item) or b"").decode(errors="replace")
    if capsule_name not in KERNEL_CAPSULES:
        wanted = " or ".join(map(repr, KERNEL_CAPSULES))
        raise PluginError(f"kernel library {name!r} is a capsule named {capsule_name!r}, not {wanted}")


def check_parser(name: str, item: object) -> None:
    require_type("format of answers", name, item, OutputFormat)


def check_dataset_format(name: str, item: object) -> None:
    from ..data.formats import DatasetFormat

    require_type("data-set format", name, item, DatasetFormat)


def check_model(name: str, item: object) -> None:
    from ..weights.packaged import PackagedModel

    require_type("model", name, item, PackagedModel)


def check_chat_template(name: str, item: object) -> None:
    from ..data.template import ChatTemplate

    if not isinstance(item, str):
        raise PluginError(f"chat template {name!r} is {_describe(item)}, not a text")
    try:
        ChatTemplate(item)
    except DataError as error:
        raise PluginError(f"chat template {name!r}: {error.message}") from error


def check_tracker(name: str, item: object) -> None:
    if not callable(item):
        raise PluginError(f"tracker {name!r} is {_describe(item)}, which cannot be called to open a run")


def check_cli_command(name: str, item: object) -> None:
    import typer

    if not isinstance(item, typer.Typer) and not callable(item):
        raise PluginError(f"command {name!r} is {_describe(item)}, neither a function nor a typer.Typer")


# hook -> (noun of messages, check)
KINDS: dict[str, tuple[str, Callable[[str, object], None]]] = {
    "surogate_families": ("model family", check_family),
    "surogate_ops": ("op", check_op),
    "surogate_kernel_libraries": ("kernel library", check_kernel_library),
    "surogate_backends": ("backend", check_backend),
    "surogate_recipes": ("precision recipe", check_recipe),
    "surogate_optimizers": ("optimizer", check_optimizer),
    "surogate_strategies": ("parallelism strategy", check_strategy),
    "surogate_parsers": ("parser", check_parser),
    "surogate_dataset_formats": ("data-set format", check_dataset_format),
    "surogate_chat_templates": ("chat template", check_chat_template),
    "surogate_models": ("model", check_model),
    "surogate_trackers": ("tracker", check_tracker),
    "surogate_cli_commands": ("command", check_cli_command),
}
