"""Chat templates: Jinja text rendered the way `transformers` renders it, so that training and serving see one string.

The text of a message is data: it is never parsed as a template, whatever braces it holds.
"""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import DataError

Message = dict[str, Any]

_NO_CALLS = (
    "{% if tools or messages | selectattr('tool_calls') | list %}"
    "{{ raise_exception('this chat template has no notation for tools and calls') }}{% endif %}"
)
# For models that come without a template of their own, registered like those of plugins.
BUILTIN = {
    "chatml": _NO_CALLS + (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": _NO_CALLS + (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'assistant' %}### Assistant:\n{{ message.content }}{{ eos_token }}\n\n"
        "{% else %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
    ),
}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` renders its body and no more: masks are made from offsets, for every template alike."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Not Jinja's own filter: that one escapes <, > and & for HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class ChatTemplate:
    """A compiled chat template.

    source: Jinja text. bos_token, eos_token, special_tokens: what the template may print by these names.
    now: the clock of `strftime_now`. Raises DataError where the text is no template.
    """

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None,
                 special_tokens: dict[str, str] | None = None,
                 now: Callable[[], datetime.datetime] = datetime.datetime.now) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self.source = source
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or "", **(special_tokens or {})}
        try:
            self._compiled = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise DataError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None,
               add_generation_prompt: bool = False, **variables: Any) -> str:
        """The conversation as one string. `variables` reach the template by name, e.g. enable_thinking=False.

        Raises DataError with the template's own words where it refuses the conversation.
        """
        return "".join(self.pieces(messages, tools, add_generation_prompt, **variables))

    def pieces(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None,
               add_generation_prompt: bool = False, **variables: Any) -> Iterator[str]:
        """What `render` gives, piece by piece, for those who want to stop in between."""
        try:
            yield from self._compiled.generate(messages=list(messages), tools=tools, documents=None,
                                               add_generation_prompt=add_generation_prompt,
                                               **{**self._names, **variables})
        except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise DataError(f"the chat template refuses this conversation: {error}") from error


def load_template(choice: str | None, tokenizer: Any, named: Mapping[str, str] = BUILTIN) -> ChatTemplate | None:
    """The template that a config's `chat_template` names: None (the tokenizer's own), a name, a file or Jinja text.

    tokenizer: has `chat_template`, `bos_token` and `eos_token`. named: Jinja texts by name, such as those of plugins.
    None where the tokenizer has no template. Raises DataError for a name that is not known.
    """
    source = tokenizer.chat_template if choice in (None, "tokenizer_default") else _template_source(choice, named)
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)


def _template_source(choice: str, named: Mapping[str, str]) -> str:
    if choice in named:
        return named[choice]
    if "{%" in choice or "{{" in choice:
        return choice
    if Path(choice).is_file():
        return Path(choice).read_text(encoding="utf-8")
    near = difflib.get_close_matches(choice, named, n=1)
    raise DataError(f"chat_template: {choice!r} is neither a named template nor a file" +
                    (f"; did you mean {near[0]}?" if near else ""),
                    f"Named templates: {', '.join(sorted(named))}; or the path of a Jinja file.")
