"""Finds plugins, calls their hooks, and keeps what they register.

One plugin never takes the rest down: where it fails, the reason is kept, everything it registered is withdrawn, and
the run goes on unless its configuration names that plugin. The core is not a plugin: where a hook of its own fails,
the error is raised at once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import importlib_metadata
import pluggy

from .. import __version__
from ..errors import EngineError, PluginError
from . import builtin, hookspecs
from .checks import KINDS
from .registry import Registry, nearest

# This package's own name: "surogate_core", or whatever a package that vendors it calls it.
CORE_PACKAGE = __name__.rsplit(".", 2)[0]
# A vendored core has a group of its own: plugins built on the public core are made of other classes than it knows.
_VENDORED = CORE_PACKAGE != "surogate_core"
ENTRY_POINT_GROUP = CORE_PACKAGE if _VENDORED else hookspecs.PROJECT
CORE_DISTRIBUTION = CORE_PACKAGE if _VENDORED else "surogate-core"

Status = Literal["loaded", "failed", "not allowed"]

_TRACEBACK = "`surogate plugins --json` has the whole traceback."

@dataclasses.dataclass
class PluginReport:
    """What is known about one plugin.

    `name`: its entry point's name. `distribution`, `version`: what was installed. `entry_point`: "module:attribute".
    `hooks`: those it implements. `provides`: hook -> names registered so far. `reason`: one line where it is not
    loaded. `details`: the whole traceback of a failure.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: Status = "loaded"
    hooks: list[str] = dataclasses.field(default_factory=list)
    provides: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    reason: str = ""
    details: str = ""
    built_in: bool = False

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.distribution} {self.version}".strip()

    def answers_to(self, name: str) -> bool:
        """Whether a configuration that says `name` means this plugin."""
        return _normal(name) in (_normal(self.distribution), _normal(self.name))


@dataclasses.dataclass
class _Plugin:
    report: PluginReport
    implementation: object = None
    calls: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    kernels_loaded: bool = False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _one_line(error: BaseException) -> str:
    """The error's type and message, and the line of the plugin (not of the machinery) that raised it."""
    message = " ".join(str(error).split())
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and not isinstance(error, PluginError) else ""
    return f"{type(error).__name__}: {message}{where}" if not isinstance(error, PluginError) else message


class PluginManager:
    """Discovery, failure keeping and the registries. Most callers want the process's own: `get_manager()`.

    Plugins are found through the entry-point group `surogate`. Nothing is imported before `load`, which the first use
    of a registry calls. Registries, one a hook: `families`, `ops`, `kernel_libraries`, `backends`, `recipes`,
    `optimizers`, `strategies`, `parsers`, `dataset_formats`, `chat_templates`, `models`, `trackers`,
    `cli_commands`.
    """

    def __init__(self, group: str = ENTRY_POINT_GROUP) -> None:
        self._group = group
        self._lock = threading.RLock()
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)
        self._plugins: list[_Plugin] = []
        self._loaded = False
        self._named: list[str] = []
        self._filled: set[str] = set()
        self._registries: dict[str, Registry[Any]] = {
            hook: Registry(noun, check, self._failures) for hook, (noun, check) in KINDS.items()
        }
        core = PluginReport("core", CORE_DISTRIBUTION, __version__, builtin.__name__, built_in=True)
        self._add(core, builtin)

    # Registries

    @property
    def families(self) -> Registry[Any]:
        """Model families by name."""
        return self._filled_registry("surogate_families")

    @property
    def ops(self) -> Registry[Any]:
        """Op records by name."""
        return self._filled_registry("surogate_ops")

    @property
    def kernel_libraries(self) -> Registry[Any]:
        """Paths or capsules of plugins' kernel libraries."""
        return self._filled_registry("surogate_kernel_libraries")

    @property
    def backends(self) -> Registry[Any]:
        """Backends by name."""
        return self._filled_registry("surogate_backends")

    @property
    def recipes(self) -> Registry[Any]:
        """Precision recipes by name."""
        return self._filled_registry("surogate_recipes")

    @property
    def optimizers(self) -> Registry[Any]:
        """Optimizers by name."""
        return self._filled_registry("surogate_optimizers")

    @property
    def strategies(self) -> Registry[Any]:
        """Parallelism strategies by name."""
        return self._filled_registry("surogate_strategies")

    @property
    def parsers(self) -> Registry[Any]:
        """Parsers of reasoning and tool calls by name."""
        return self._filled_registry("surogate_parsers")

    @property
    def dataset_formats(self) -> Registry[Any]:
        """Data-set formats by name."""
        return self._filled_registry("surogate_dataset_formats")

    @property
    def chat_templates(self) -> Registry[Any]:
        """Jinja texts of chat templates by name."""
        return self._filled_registry("surogate_chat_templates")

    @property
    def models(self) -> Registry[Any]:
        """Models that can be had by name."""
        return self._filled_registry("surogate_models")

    @property
    def trackers(self) -> Registry[Any]:
        """Tracker factories by name."""
        return self._filled_registry("surogate_trackers")

    @property
    def cli_commands(self) -> Registry[Any]:
        """Verbs of the command line by name."""
        return self._filled_registry("surogate_cli_commands")

    # Loading

    def load(self, allow: Iterable[str] | None = None) -> None:
        """Imports the installed plugins; `allow` names the only ones to use, by distribution or entry point.

        Called again with a list, it drops what the list does not name. Raises `PluginError` where the list names a
        plugin that is not installed or fails. The core is always used, and so is what `register` was given.
        """
        with self._lock:
            allowed = None if allow is None else list(allow)
            if not self._loaded:
                self._loaded = True
                self._discover(allowed)
            elif allowed is not None:
                for plugin in self._plugins:
                    report = plugin.report
                    discovered = report.entry_point and not report.built_in
                    if discovered and report.status == "loaded" and not self._is_allowed(report, allowed):
                        self._retire(plugin, "not allowed", "the configuration's `plugins:` does not list it")
            if allowed is not None:
                self._named = allowed
                for name in allowed:
                    self.require(name)

    def register(self, implementation: object, name: str, version: str = "") -> None:
        """Adds a plugin that no entry point names: a module or object with hooks. For hosts that vendor the core.

        Raises `PluginError` where it does not fit, at once; nothing of it stays.
        """
        with self._lock:
            plugin = self._add(PluginReport(name, name, version, ""), implementation)
            if plugin.report.status == "loaded":
                for hook in sorted(self._filled):
                    self._call(plugin, hook)
            if plugin.report.status == "failed":
                self._plugins.remove(plugin)
                raise PluginError(f"plugin {name} does not load: {plugin.report.reason}", plugin.report.details)

    def require(self, name: str) -> PluginReport:
        """The plugin of that name (distribution or entry point), with all its hooks called.

        Raises `PluginError` where it is not installed, failed, or is kept out by the allow-list.
        """
        with self._lock:
            self.load()
            plugins = [plugin for plugin in self._plugins if plugin.report.answers_to(name)]
            if not plugins:
                known = [plugin.report.distribution for plugin in self._plugins]
                close = nearest(name, known)
                raise PluginError(
                    f"plugin {name!r} is not installed",
                    (f"Did you mean {close[0]!r}? " if close else "") + f"Installed: {', '.join(sorted(set(known)))}.",
                )
            for plugin in plugins:
                for hook in list(plugin.calls):
                    self._filled_registry(hook)
                report = plugin.report
                if report.status != "loaded":
                    what = "does not load" if report.status == "failed" else f"is {report.status}"
                    hint = _TRACEBACK if report.details else None
                    raise PluginError(f"plugin {report.label} {what}: {report.reason}", hint)
            return plugins[0].report

    def report(self) -> list[PluginReport]:
        """One row for each plugin, the core first, after every hook has been called. Raises nothing: it is what one
        looks at when something is broken."""
        with self._lock:
            broken: dict[str, str] = {}
            for hook in KINDS:
                try:
                    self._filled_registry(hook)
                except (Exception, SystemExit) as error:
                    broken = {
                        "status": "failed",
                        "reason": f"{hook}: {_one_line(error)}",
                        "details": "".join(traceback.format_exception(error)).rstrip(),
                    }
            core, *others = [plugin.report for plugin in self._plugins]
            return [dataclasses.replace(core, **broken), *others]

    def load_kernels(self) -> None:
        """Hands the plugins' kernel libraries, and those of their backends that this machine has, to the engine, once.

        A library that the engine refuses makes its plugin fail. Raises `PluginError` for a plugin that `load` was told
        to use.
        """
        with self._lock:
            libraries = dict(self.kernel_libraries.items())
            backends = {name: backend.library for name, backend in self.backends.items() if not backend.unavailable()}
            for plugin in self._plugins:
                provides = plugin.report.provides
                owned = [libraries[name] for name in provides.get("surogate_kernel_libraries", ())]
                owned += [backends[name] for name in provides.get("surogate_backends", ()) if name in backends]
                if plugin.report.built_in or plugin.kernels_loaded or not owned:
                    continue
                self._hand_over(plugin, owned)

    def _hand_over(self, plugin: _Plugin, libraries: list[Any]) -> None:
        from ..engine import load_library, register_library

        try:
            for library in libraries:
                if isinstance(library, (str, Path)):
                    load_library(library)
                else:
                    register_library(library, plugin.report.label)
            plugin.kernels_loaded = True
        except EngineError as error:
            self._fail(plugin, error)
            if any(plugin.report.answers_to(name) for name in self._named):
                raise PluginError(f"plugin {plugin.report.label} does not load: {plugin.report.reason}", _TRACEBACK) from error

    def _discover(self, allowed: list[str] | None) -> None:
        found = importlib_metadata.entry_points(group=self._group)
        for entry_point in sorted(found, key=lambda each: (_normal(each.dist.name), each.name)):
            report = PluginReport(
                entry_point.name, entry_point.dist.name, entry_point.dist.version, entry_point.value
            )
            if allowed is not None and not self._is_allowed(report, allowed):
                report.status, report.reason = "not allowed", "the configuration's `plugins:` does not list it"
                self._plugins.append(_Plugin(report))
                continue
            try:
                implementation = entry_point.load()
            except (Exception, SystemExit) as error:
                plugin = _Plugin(report)
                self._plugins.append(plugin)
                self._fail(plugin, error)
                continue
            self._add(report, implementation)

    @staticmethod
    def _is_allowed(report: PluginReport, allowed: list[str]) -> bool:
        return any(report.answers_to(name) for name in allowed)

    # One plugin

    def _add(self, report: PluginReport, implementation: object) -> _Plugin:
        plugin = _Plugin(report, implementation)
        self._plugins.append(plugin)
        try:
            self._check_hooks(implementation)
            self._hooks.register(implementation, name=f"{report.distribution}:{report.name}")
            for hook in KINDS:
                for found in getattr(self._hooks.hook, hook).get_hookimpls():
                    if found.plugin is implementation:
                        plugin.calls[hook] = functools.partial(self._call_with_known, found.function, found.argnames)
            if not plugin.calls:
                raise PluginError("it implements no hook", f"There are: {', '.join(KINDS)}.")
        except (Exception, SystemExit) as error:
            self._fail(plugin, error)
        report.hooks = list(plugin.calls)
        return plugin

    def _check_hooks(self, implementation: object) -> None:
        """Refuses hooks that do not exist, hooks that lack the marker, and wrappers, which have nothing to wrap."""
        for name in dir(implementation):
            options = self._hooks.parse_hookimpl_opts(implementation, name)
            if options is None:
                if name in KINDS and callable(getattr(implementation, name)):
                    raise PluginError(f"{name} has no @hookimpl, so it would never be called")
                continue
            if name not in KINDS:
                close = nearest(name, list(KINDS))
                hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(KINDS)}."
                raise PluginError(f"it implements {name}, which is no hook of this version", hint)
            if options["hookwrapper"] or options["wrapper"]:
                raise PluginError(f"{name} is a wrapper; hooks here only register")

    @staticmethod
    def _call_with_known(function: Callable[..., None], argnames: tuple[str, ...], **available: Any) -> None:
        """Calls a hook with the arguments it takes: a plugin may take fewer than a later version offers."""
        function(*(available[name] for name in argnames))

    def _call(self, plugin: _Plugin, hook: str) -> None:
        call = plugin.calls.get(hook)
        if call is None or plugin.report.status != "loaded":
            return
        registry = self._registries[hook]
        provided = plugin.report.provides.setdefault(hook, [])

        def register(name: str, item: object) -> None:
            registry.register(name, item, plugin.report.label)
            provided.append(name)

        try:
            call(register=register)
        except (Exception, SystemExit) as error:
            if plugin.report.built_in:
                registry.withdraw(provided)
                del plugin.report.provides[hook]
                self._filled.discard(hook)
                raise
            self._fail(plugin, error)

    def _fail(self, plugin: _Plugin, error: BaseException) -> None:
        plugin.report.details = "".join(traceback.format_exception(error)).rstrip()
        self._retire(plugin, "failed", _one_line(error))

    def _retire(self, plugin: _Plugin, status: Status, reason: str) -> None:
        plugin.report.status, plugin.report.reason = status, reason
        for hook, names in plugin.report.provides.items():
            self._registries[hook].withdraw(names)
        plugin.report.provides = {}
        if plugin.calls:
            plugin.calls = {}
            self._hooks.unregister(plugin.implementation)

    # Filling

    def _filled_registry(self, hook: str) -> Registry[Any]:
        registry = self._registries[hook]
        with self._lock:
            self.load()
            if hook not in self._filled:
                self._filled.add(hook)
                for plugin in self._plugins:
                    self._call(plugin, hook)
        return registry

    def _failures(self) -> list[str]:
        reports = (plugin.report for plugin in self._plugins)
        return [f"{report.label}: {report.reason}" for report in reports if report.status == "failed"]


@functools.lru_cache(maxsize=1)
def get_manager() -> PluginManager:
    """The plugin manager of this process."""
    return PluginManager()
