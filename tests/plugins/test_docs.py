"""The examples in docs/plugins/ are run as plugins: each is accepted and registers something."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from surogate_core.errors import PluginError
from surogate_core.plugins import PluginManager

PAGES = sorted((Path(__file__).parents[2] / "docs" / "plugins").glob("surogate_*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_is_a_working_plugin(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    (tmp_path / "libacme_kernels.so").touch()
    module = types.ModuleType("acme")
    module.__file__ = str(tmp_path / "acme.py")
    monkeypatch.setitem(sys.modules, "acme", module)
    exec(compile(blocks[0], str(page), "exec"), vars(module))
    manager = PluginManager(group="no-such-group")
    manager.register(module, "acme")
    registry = getattr(manager, page.stem.removeprefix("surogate_"))
    assert [name for name in registry if registry.source(name) == "acme"], manager.report()[-1].reason


def test_links_between_pages_lead_somewhere():
    folder = PAGES[0].parent
    for page in folder.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (folder / target).exists(), f"{page.name} links to {target}"


def test_a_module_without_hooks_would_not_pass():
    """The check above can fail: an empty module registers nothing."""
    with pytest.raises(PluginError, match="implements no hook"):
        PluginManager(group="no-such-group").register(types.ModuleType("acme"), "acme")
