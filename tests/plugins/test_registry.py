"""The registry's errors: they name both sides, the nearest names, what is installed and what did not load."""

from __future__ import annotations

import pytest

from surogate_core.errors import PluginError
from surogate_core.plugins.registry import Registry


def filled() -> Registry[int]:
    registry: Registry[int] = Registry("model family", failures=lambda: ["surogate-odd 3.0: ImportError: no odd"])
    registry.register("llama", 1, "surogate-llama 0.1.0")
    registry.register("gemma", 2, "surogate-gemma 0.2.0")
    return registry


def test_unknown_name_gives_nearest_installed_and_failed():
    with pytest.raises(PluginError) as caught:
        filled()["Lama"]
    text = str(caught.value)
    assert "no model family is named 'Lama'" in text
    assert "Did you mean 'llama'?" in text
    assert "gemma (surogate-gemma 0.2.0), llama (surogate-llama 0.1.0)" in text
    assert "Did not load: surogate-odd 3.0: ImportError: no odd" in text


def test_unknown_name_in_an_empty_registry():
    with pytest.raises(PluginError, match="No installed plugin brings one"):
        Registry("optimizer")["adamw"]


def test_duplicate_names_both_distributions():
    registry = filled()
    with pytest.raises(PluginError, match="surogate-llama 0.1.0 and again by copycat 9") as caught:
        registry.register("llama", 3, "copycat 9")
    assert "Uninstall one" in caught.value.hint
    assert registry["llama"] == 1


@pytest.mark.parametrize("name", ["", " llama", "-x", "a/b", "a b", 7, None])
def test_malformed_names_are_refused(name):
    with pytest.raises(PluginError, match="copycat 9 registers a model family under the name"):
        filled().register(name, 3, "copycat 9")


def test_withdraw_frees_a_name():
    registry = filled()
    registry.withdraw(["llama"])
    assert registry.names() == ["gemma"] and "llama" not in registry and len(registry) == 1
    registry.register("llama", 3, "copycat 9")
    assert registry.source("llama") == "copycat 9"
    assert registry.items() == [("gemma", 2), ("llama", 3)]
