"""A chat template that a run or a server chose becomes the tokenizer's own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from ..weights.tokenizer import saved_chat_template
from .template import ChatTemplate, load_template
from .turns import TurnFinder

if TYPE_CHECKING:
    from ..weights.tokenizer import Tokenizer


def adopt_template(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """From here on the tokenizer has this template, and so has what is saved with it; the token that ends the
    template's turns ends answers.

    Raises DataError where the tokenizer has no such token: a model would never end an answer.
    """
    end, token = _turn_end(template, tokenizer)
    if end and token is None:
        raise DataError(f"the chat template ends a turn with {end!r}, which is no token of {tokenizer.where}: answers "
                        "would never end", "Choose a template whose markers the tokenizer has, or `plain`.")
    tokenizer.use_chat_template(template.source, token)


def adopt_own_template(tokenizer: Tokenizer) -> None:
    """The special token that ends the turns of the tokenizer's own template ends answers, where its files do not say so:
    GGUF files of models with turns of their own name only what ends a text. A template that cannot be read is let be: it
    is refused where it is used."""
    if tokenizer.chat_template is None:
        return
    with contextlib.suppress(DataError):
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        _, token = _turn_end(template, tokenizer)
        if token in tokenizer.special_tokens:
            tokenizer.use_chat_template(template.source, token)


def adopt_choice(choice: str, tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
    """The template that a config or a command line names, as `load_template` reads it; unless it is the tokenizer's own."""
    template = load_template(choice, tokenizer, named)
    if template is not None and template.source != tokenizer.chat_template:
        adopt_template(template, tokenizer)


def adopt_saved_template(folder: str | Path, tokenizer: Tokenizer) -> None:
    """The same for the template beside an adapter in ``folder``, where it is another than the tokenizer's. The adapter
    may be of another program, so its turns may end as they like."""
    source = saved_chat_template(folder)
    if source is not None and source != tokenizer.chat_template:
        template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
        tokenizer.use_chat_template(source, _turn_end(template, tokenizer)[1])


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, str | None]:
    """What the template writes behind an answer, and the token that it begins with."""
    end = TurnFinder(template).turn_end
    return end, max((each for each in tokenizer.added_tokens if end.startswith(each)), key=len, default=None)
