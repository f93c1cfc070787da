"""The examples in docs/plugins/ are run as plugins: each is accepted and registers something."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from surogate_core.errors import PluginError
from surogate_core.plugins import PluginManager

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "plugins").glob("surogate_*.md"))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def module_of(code: str, page: Path, folder: Path, monkeypatch) -> types.ModuleType:
    module = types.ModuleType("acme")
    module.__file__ = str(folder / "acme.py")
    monkeypatch.setitem(sys.modules, "acme", module)
    exec(compile(code, str(page), "exec"), vars(module))
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_is_a_working_plugin(page, tmp_path, monkeypatch):
    (code,) = python_blocks(page)
    (tmp_path / "libacme_kernels.so").touch()
    module = module_of(code, page, tmp_path, monkeypatch)
    manager = PluginManager(group="no-such-group")
    manager.register(module, "acme")
    registry = getattr(manager, page.stem.removeprefix("surogate_"))
    assert [name for name in registry if registry.source(name) == "acme"], manager.report()[-1].reason


def test_the_plugin_in_the_readme_works(tmp_path, monkeypatch):
    (code,) = python_blocks(ROOT / "README.md")
    manager = PluginManager(group="no-such-group")
    manager.register(module_of(code, ROOT / "README.md", tmp_path, monkeypatch), "acme")
    assert manager.recipes.source("all_bf16") == "acme"


def test_a_module_without_hooks_would_not_pass():
    """The check above can fail: an empty module registers nothing."""
    with pytest.raises(PluginError, match="implements no hook"):
        PluginManager(group="no-such-group").register(types.ModuleType("acme"), "acme")
