"""The examples in docs/plugins/ are run as plugins: each is accepted and registers something."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from surogate_core.errors import PluginError
from surogate_core.plugins import PluginManager, get_manager, hookspecs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "plugins").glob("surogate_*.md"))


@pytest.mark.parametrize("page", ["plugins.md", "plugins/README.md"])
def test_tables_of_hooks_have_every_hook(page):
    hooks = [name for name in vars(hookspecs) if name.startswith("surogate_")]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((?:plugins/)?(\w+)\.md\) \|", text, re.MULTILINE)
    assert rows == [(name, name) for name in hooks]
    assert sorted(hooks) == [each.stem for each in PAGES]


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


def excerpts(page: Path) -> list[tuple[Path, str]]:
    """Files that are quoted, and what of them: blocks marked py below a path; lines of "..." stand for what is left out."""
    found = re.findall(r"^`([^`\n]+\.py)`\n\n```py\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(ROOT / path, piece) for path, block in found for piece in re.split(r"^\s*\.\.\.\n", block, flags=re.MULTILINE)]


def test_what_the_pages_quote_is_the_code_that_runs():
    quoted = [each for page in PAGES for each in excerpts(page)]
    assert len(quoted) > 5
    for path, piece in quoted:
        assert piece.strip("\n") in path.read_text(encoding="utf-8"), f"{path} has no such lines:\n{piece}"


def test_every_family_of_this_repository_is_in_the_table():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", page, re.MULTILINE)
    told = {name: set(re.findall(r"`([^`]+)`", architectures)) for name, architectures in rows}
    ours = {name: family for name, family in get_manager().families.items()
            if get_manager().families.source(name).split()[0] in ("surogate-llama", "surogate-qwen", "surogate-gemma")}
    assert {name: set(family.architectures) for name, family in ours.items()} == {name: told.get(name) for name in ours}


def test_a_module_without_hooks_would_not_pass():
    """The check above can fail: an empty module registers nothing."""
    with pytest.raises(PluginError, match="implements no hook"):
        PluginManager(group="no-such-group").register(types.ModuleType("acme"), "acme")
