"""Which chat template a served model has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surogate_core.data import adopt_choice, adopt_saved_template
from surogate_core.plugins.manager import get_manager
from surogate_core.weights.tokenizer import saved_chat_template

_log = logging.getLogger(__name__)


def choose_template(
    tokenizer: Any, choice: str | None, adapters: Mapping[str, str | Path], main: Sequence[str]
) -> None:
    """Gives the tokenizer the template that is served: ``choice`` (a name, a file or Jinja text), or its own; or that of
    an adapter, where only adapters were asked for, or it has none.

    Raises DataError for a choice that there is not, or whose turns the tokenizer cannot end.
    """
    if choice is not None:
        adopt_choice(choice, tokenizer, dict(get_manager().chat_templates.items()))
        return
    if tokenizer.chat_template is None or all(name in adapters for name in main):
        asked = [adapters[name] for name in (*main, *adapters) if name in adapters]
        with_one = next((path for path in asked if saved_chat_template(path) is not None), None)
        if with_one is not None:
            adopt_saved_template(with_one, tokenizer)
    for name, path in adapters.items():
        warn_of_another(name, path, tokenizer)


def warn_of_another(name: str, path: str | Path, tokenizer: Any) -> None:
    """All adapters of a model are served with its one template; that one of them expects another is worth a word."""
    saved = saved_chat_template(path)
    if saved is not None and saved != tokenizer.chat_template:
        _log.warning("%s was trained with another chat template than the one it is served with", name)
