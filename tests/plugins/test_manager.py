"""Discovery through entry points, isolation of failing plugins, the allow-list, and the hooks' contracts."""

from __future__ import annotations

import ctypes
import inspect
import sys
import textwrap
from pathlib import Path

import pytest

from surogate_core.errors import PluginError
from surogate_core.plugins import OutputFormat, PluginManager, Strategy, builtin, hookimpl, hookspecs
from surogate_core.plugins.checks import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "plugins"


class Site:
    """A folder of fake installed distributions, each one module with an entry point in the group `test-surogate`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, body: str, version: str = "1.0", attribute: str = "") -> None:
        module = distribution.replace("-", "_")
        source = "from surogate_core.plugins import Strategy, hookimpl\n" + textwrap.dedent(body)
        (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        metadata = self.folder / f"{module}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        target = f"{module}:{attribute}" if attribute else module
        (metadata / "entry_points.txt").write_text(f"[test-surogate]\n{module.split('_')[-1]} = {target}\n")

    def manager(self) -> PluginManager:
        return PluginManager(group="test-surogate")


@pytest.fixture
def site(tmp_path, monkeypatch):
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in set(sys.modules) - known:  # the test's own; numpy, say, cannot be imported twice
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


GOOD = """
@hookimpl
def surogate_strategies(register):
    register("good", Strategy("good", "for a test"))
"""


def rows(manager: PluginManager) -> dict:
    return {report.distribution: report for report in manager.report()}


def test_an_installed_plugin_is_found_and_listed(site):
    site.install("acme-good", GOOD, version="2.1")
    manager = site.manager()
    assert manager.strategies["good"].description == "for a test"
    assert manager.strategies.source("good") == "acme-good 2.1"
    report = rows(manager)["acme-good"]
    assert (report.name, report.version, report.entry_point, report.status) == ("good", "2.1", "acme_good", "loaded")
    assert report.hooks == ["surogate_strategies"]
    assert report.provides == {"surogate_strategies": ["good"]}


def test_nothing_is_imported_before_it_is_asked_for(site):
    site.install("acme-good", GOOD)
    site.manager()
    assert "acme_good" not in sys.modules


def test_an_entry_point_may_name_an_object(site):
    site.install(
        "acme-object",
        """
        class Plugin:
            @hookimpl
            def surogate_strategies(self, register):
                register("object", Strategy("object", ""))
        plugin = Plugin()
        """,
        attribute="plugin",
    )
    assert "object" in site.manager().strategies


FAILURES = {
    "acme-import": ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    "acme-exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "acme-raises": ("@hookimpl\ndef surogate_strategies(register):\n    1 / 0", "ZeroDivisionError: division by zero"),
    "acme-typo": ("@hookimpl\ndef surogate_strategy(register): pass", "surogate_strategy, which is no hook"),
    "acme-marker": ("def surogate_strategies(register): pass", "surogate_strategies has no @hookimpl"),
    "acme-argument": ("@hookimpl\ndef surogate_strategies(registry): pass", "registry"),
    "acme-wrapper": ("@hookimpl(wrapper=True)\ndef surogate_strategies():\n    yield", "is a wrapper"),
    "acme-nothing": ("", "it implements no hook"),
    "acme-unfit": ("@hookimpl\ndef surogate_strategies(register): register('x', 7)", "'x' is a builtins.int, not a"),
    "acme-name": (
        "@hookimpl\ndef surogate_strategies(register): register('x', Strategy('y', ''))",
        "calls itself 'y'",
    ),
    "acme-taken": (
        "@hookimpl\ndef surogate_strategies(register):\n"
        "    register('mine', Strategy('mine', ''))\n    register('single', Strategy('single', ''))",
        "is registered by surogate-core",
    ),
}


@pytest.mark.parametrize("distribution", FAILURES)
def test_a_failing_plugin_is_kept_out_with_its_reason(site, distribution):
    body, reason = FAILURES[distribution]
    site.install(distribution, body)
    site.install("acme-good", GOOD)
    manager = site.manager()
    assert manager.strategies.names() == ["good", "single"]
    report = rows(manager)[distribution]
    assert report.status == "failed" and reason in report.reason and "\n" not in report.reason
    assert "Traceback" in report.details
    assert report.provides == {}
    with pytest.raises(PluginError, match=f"Did not load: {distribution} 1.0: "):
        manager.strategies["mine"]
    with pytest.raises(PluginError, match=f"plugin {distribution} 1.0 does not load"):
        manager.require(distribution)


def test_the_reason_points_into_the_plugin(site):
    site.install("acme-raises", FAILURES["acme-raises"][0])
    assert "acme_raises.py:4" in rows(site.manager())["acme-raises"].reason


def test_a_plugin_that_fails_in_one_hook_keeps_nothing_of_another(site):
    site.install("acme-half", GOOD + "@hookimpl\ndef surogate_parsers(register): register('t', 5)\n")
    manager = site.manager()
    assert "good" in manager.strategies
    manager.report()
    assert "good" not in manager.strategies


def test_two_plugins_with_one_name(site):
    site.install("acme-good", GOOD)
    site.install("zeta-good", GOOD)
    manager = site.manager()
    assert manager.strategies.source("good") == "acme-good 1.0"
    assert "is registered by acme-good 1.0 and again by zeta-good 1.0" in rows(manager)["zeta-good"].reason


def test_the_allow_list_keeps_others_from_being_imported(site):
    site.install("acme-good", GOOD)
    site.install("acme-import", FAILURES["acme-import"][0])
    manager = site.manager()
    manager.load(allow=["Acme_Good"])
    assert "good" in manager.strategies
    report = rows(manager)["acme-import"]
    assert report.status == "not allowed" and "plugins:" in report.reason
    assert "acme_import" not in sys.modules


def test_an_allow_list_given_later_drops_what_it_does_not_name(site):
    site.install("acme-good", GOOD)
    manager = site.manager()
    assert "good" in manager.strategies
    manager.load(allow=[])
    assert manager.strategies.names() == ["single"]
    assert rows(manager)["acme-good"].status == "not allowed"


def test_a_plugin_that_the_config_names_must_load(site):
    site.install("acme-raises", FAILURES["acme-raises"][0])
    with pytest.raises(PluginError, match="acme-raises 1.0 does not load: ZeroDivisionError"):
        site.manager().load(allow=["acme-raises"])
    with pytest.raises(PluginError, match="plugin 'acme-rises' is not installed.*\n.*Did you mean 'acme-raises'"):
        site.manager().load(allow=["acme-rises"])


def test_a_host_registers_a_plugin_without_an_entry_point(site):
    class Plugin:
        @hookimpl
        def surogate_strategies(self, register):
            register("host", Strategy("host", ""))

    for touch_first in (False, True):
        manager = site.manager()
        if touch_first:
            assert "host" not in manager.strategies
        manager.register(Plugin(), "acme-host")
        manager.load(allow=[])
        assert "host" in manager.strategies
        with pytest.raises(PluginError, match="acme-again does not load.*registered by acme-host"):
            manager.register(Plugin(), "acme-again")
            manager.strategies
            manager.require("acme-again")


def test_hooks_may_take_fewer_arguments(site):
    site.install("acme-few", "@hookimpl\ndef surogate_strategies(): pass")
    assert rows(site.manager())["acme-few"].status == "loaded"


def capsule(name: bytes) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(1, name, None)


CAPSULE_NAME = b"surogate.kernel_library_v1"
OTHER_NAME = b"dltensor"


def test_kernel_libraries_are_files_or_rightly_named_capsules(tmp_path):
    check = KINDS["surogate_kernel_libraries"][1]
    library = tmp_path / "libtidy.so"
    with pytest.raises(PluginError, match="there is no file"):
        check("tidy", str(library))
    library.touch()
    check("tidy", library)
    check("tidy", capsule(CAPSULE_NAME))
    with pytest.raises(PluginError, match="capsule named 'dltensor'"):
        check("tidy", capsule(OTHER_NAME))
    with pytest.raises(PluginError, match="neither a path nor a capsule"):
        check("tidy", 5)


def test_parsers_trackers_and_commands_are_checked():
    with pytest.raises(PluginError, match="not a surogate_core.plugins.records.OutputFormat"):
        KINDS["surogate_parsers"][1]("think", object())
    with pytest.raises(PluginError, match="calls itself 'thought'"):
        KINDS["surogate_parsers"][1]("think", OutputFormat("thought"))
    with pytest.raises(PluginError, match="cannot be called"):
        KINDS["surogate_trackers"][1]("board", 5)
    with pytest.raises(PluginError, match="neither a function nor a typer.Typer"):
        KINDS["surogate_cli_commands"][1]("verb", 5)
    with pytest.raises(PluginError, match="not a surogate_core.data.formats.DatasetFormat"):
        KINDS["surogate_dataset_formats"][1]("chat", object())
    with pytest.raises(PluginError, match="chat template 'talk' is a builtins.int, not a text"):
        KINDS["surogate_chat_templates"][1]("talk", 5)
    with pytest.raises(PluginError, match="chat template 'talk': .*line 2"):
        KINDS["surogate_chat_templates"][1]("talk", "ok\n{% if %}")


def hook_functions() -> dict:
    return {name: value for name, value in vars(hookspecs).items() if name.startswith("surogate_")}


def test_every_hook_has_a_contract_a_check_a_registry_and_a_page():
    hooks = hook_functions()
    assert set(hooks) == set(KINDS)
    for name, function in hooks.items():
        documentation = inspect.getdoc(function)
        assert "register(name, " in documentation and "Checked" in documentation, name
        assert list(inspect.signature(function).parameters) == ["register"]
        assert isinstance(getattr(PluginManager, name.removeprefix("surogate_")), property)
        page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}\n"), name
        for part in ("## Contract", "## Example", "## What is checked"):
            assert part in page, f"{name}: {part}"
        assert f"def {name}(register)" in page, name
        assert f"]({name}.md)" in (DOCS / "README.md").read_text(encoding="utf-8"), name
    assert {page.stem for page in DOCS.glob("surogate_*.md")} == set(hooks)


def test_the_core_registers_through_the_same_hooks():
    implemented = {name for name in vars(builtin) if name.startswith("surogate_")}
    assert implemented <= set(KINDS)
    core = PluginManager(group="no-such-group").report()[0]
    assert core.built_in and core.status == "loaded", core.details
    assert set(core.provides) == implemented
    assert all(core.provides.values())
