"""A conversation as every API means it, and its way to the model: prompt, room, grammar, generation, events. Chat
completions, Messages and Responses say theirs in these words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..answers import Answer
from ..types import Generation, Prompt, Refused, Thinking
from .constraints import Wanted, grammar_of, offered_tools
from .limits import APART_BYTES, Settings
from .requests import Chosen, GenerationFields, generation_of, parser_of, room


@dataclass(slots=True)
class Conversation:
    """messages and tools: as chat templates read them. tool_choice: as `offered_tools` takes it. fields: sampling, stop
    strings and the like. thinking: on, off, or None for what the template does by itself. budget: of reasoning tokens.
    budget_counts: a model without reasoning is refused, rather than said to keep to any budget. variables: more of the
    template's. prefilled: the answer goes on where the last message ends. names: what the API calls the fields
    "messages", "budget" and "format", for errors. size: of the request in bytes."""

    chosen: Chosen
    messages: list[dict[str, Any]]
    fields: GenerationFields
    max_tokens: int | None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel: bool = True
    thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None
    budget_counts: bool = False
    response_format: dict[str, Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prefilled: bool = False
    logprobs: int | None = None
    size: int = 0
    names: Mapping[str, str] = field(default_factory=dict)


class Asked:
    """What a conversation became. ``tool_choice``: as `offered_tools` gives it. ``read``: that of its `Answer`. ``cut``:
    fewer tokens fit than were asked for."""

    def __init__(
        self, conversation: Conversation, parser: Any, prompt: Prompt, generation: Generation, offer: tuple[Any, Any]
    ) -> None:
        self.prompt_tokens = len(prompt.tokens)
        self.tool_choice = offer[1]
        wanted = conversation.max_tokens
        self.cut = wanted is None or (generation.max_tokens is not None and generation.max_tokens < wanted)
        self._answer = Answer(
            conversation.chosen.model, prompt, generation, *offer, parser, parallel=conversation.parallel
        )
        self.read = self._answer.read

    @property
    def cached_tokens(self) -> int:
        """Right from the first event on."""
        return self._answer.usage.cached_tokens


async def prompt_of(conversation: Conversation, settings: Settings) -> Prompt:
    """The prompt. Raises `Refused` for what the model's template does not take."""
    with _in_words_of(conversation):
        tools, _ = offered_tools(list(conversation.tools), conversation.tool_choice)
        return await _render(conversation, parser_of(conversation.chosen.model, settings), tools)


async def ask(conversation: Conversation, settings: Settings) -> Asked:
    """Everything up to the queue. Raises `Refused` for what cannot be answered."""
    with _in_words_of(conversation):
        return await _ask(conversation, settings)


@contextmanager
def _in_words_of(conversation: Conversation) -> Iterator[None]:
    """Errors name the fields as the API at hand does."""
    try:
        yield
    except Refused as refused:
        for ours, theirs in conversation.names.items():
            if refused.param is not None and refused.param.startswith(ours):
                refused.param = theirs + refused.param[len(ours) :]
                break
        raise


async def _ask(conversation: Conversation, settings: Settings) -> Asked:
    model = conversation.chosen.model
    parser = parser_of(model, settings)
    tools, tool_choice = offered_tools(list(conversation.tools), conversation.tool_choice)
    prompt = await _render(conversation, parser, tools)
    max_tokens = room(model, prompt.tokens, conversation.max_tokens, "messages")
    structured = conversation.fields.structured_outputs
    form = Wanted(conversation.response_format, structured, tools, tool_choice, conversation.parallel)
    grammar = await grammar_of(model, parser, prompt, form)
    end, opening = parser.reasoning_tokens(prompt.tail)
    thinking = _thinking(conversation, parser)
    generation = generation_of(
        conversation.fields,
        conversation.chosen,
        prompt.tokens,
        max_tokens,
        settings.limits,
        logprobs=conversation.logprobs,
        grammar=grammar,
        stop_after=end,
        opening=opening,
        thinking=None if end is None else thinking,
    )
    return Asked(conversation, parser, prompt, generation, (tools, tool_choice))


def _thinking(conversation: Conversation, parser: Any) -> Thinking | None:
    if conversation.budget is None:
        return None
    if parser.format.reasoning is None and not conversation.budget_counts:
        return None  # what has no reasoning keeps to every budget of it
    if parser.reasoning_end is None:
        raise Refused(
            "this model has no reasoning whose length could be limited",
            param="thinking_token_budget",
        )
    return Thinking(conversation.budget, (parser.reasoning_end,))


async def _render(conversation: Conversation, parser: Any, tools: Sequence[Mapping[str, Any]]) -> Prompt:
    options: dict[str, Any] = {}
    if conversation.thinking is not None:
        effort = conversation.effort if conversation.thinking else None
        options.update(parser.format.thinking_variables(conversation.thinking, effort))
    options.update(conversation.variables)
    if conversation.prefilled:
        options |= {"continue_final_message": True, "add_generation_prompt": False}

    def render() -> Prompt:
        return conversation.chosen.model.render(conversation.messages, tools=list(tools) or None, **options)

    return render() if conversation.size < APART_BYTES else await asyncio.to_thread(render)
