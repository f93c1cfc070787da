"""Conversations that chat templates are tried with, and what can be said of a template: its strings, and its masks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..data import ChatTemplate, Encoder, Example, adopt_template, encode_rendered, explain_mask
from ..weights.tokenizer import Tokenizer
from .tiny import write_byte_tokenizer


@dataclass(frozen=True)
class Conversation:
    """``variables`` reach the template by name."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    def upto(self, end: int) -> Conversation:
        """Its first ``end`` messages."""
        return Conversation(self.messages[:end], self.tools, self.variables)

    def asked(self) -> list[Conversation]:
        """What an answer may be asked to: what is before each of the assistant's turns, and the whole."""
        ends = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [self.upto(end) for end in (*ends, len(self.messages))]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str | None, thought: str | None = None, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = _call(1, "weather", city="Zürich & <b>", days=[1, 2.5], exact=True)
ADD = _call(2, "add", text='"x" < {{ y }}', deep={"a": 1, "b": "}"})
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "weather", "description": 'The <weather> "now"',
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "a städt"},
            "days": {"type": "array", "items": {"type": "number"}},
            "exact": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "F"]}}}}},
    {"type": "function", "function": {
        "name": "add", "description": "adds",
        "parameters": {"type": "object", "required": ["text", "deep"], "properties": {
            "text": {"type": "string"},
            "deep": {"type": "object", "required": ["a"], "description": "more", "properties": {
                "a": {"type": "integer", "nullable": True}, "b": {"type": "string"}}}}}}},
]
_SYSTEM = {"role": "system", "content": "Be brief: {x}. "}
_TALK = [_user("  Hi ü\n"), _answer("Hello {there}"), _user("{{ braces }} {% if x %}"), _answer("日本 🙂")]

CONVERSATIONS = {
    "question": Conversation(_TALK[:1]),
    "talk": Conversation(_TALK),
    "system": Conversation([_SYSTEM, *_TALK]),
    "no thinking": Conversation(_TALK, variables={"enable_thinking": False}),
    "thinking": Conversation([*_TALK[:3], _answer("42", "let me\nsee")], variables={"enable_thinking": True}),
    "earlier thought": Conversation(
        [_user("why?"), _answer("So.", "hm"), *_TALK[2:]], variables={"enable_thinking": True}
    ),
    "tools": Conversation([_SYSTEM, *_TALK[:1]], TOOLS),
    "call": Conversation(
        [_user("rain?"), _answer("", calls=[WEATHER]), _result(1, '{"c": "7°"}'), _answer("It rains.")], TOOLS
    ),
    "calls": Conversation(
        [_SYSTEM, _user("both"), _answer("", calls=[WEATHER, ADD]), _result(1, "wet"), _result(2, "3"),
         _answer("Done."), _user("thanks")], TOOLS,
    ),
    "steps": Conversation(
        [_user("first one, then the other"), _answer("", "I need both", [WEATHER]), _result(1, "wet"),
         _answer("", calls=[ADD]), _result(2, "3"), _answer("Done.")], TOOLS, {"enable_thinking": True},
    ),
    "text and call": Conversation(
        [_user("rain?"), _answer("I look.", calls=[WEATHER]), _result(1, "wet"), _answer("Wet.")], TOOLS
    ),
}


@lru_cache(maxsize=16)
def _compiled(source: str, bos: str | None, eos: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos, eos)


@lru_cache(maxsize=16)
def _of_transformers(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def render(source: str, conversation: Conversation, prompt: bool = False) -> str:
    """As the template has it for a model whose text begins with <bos> and ends with <eos>."""
    template = _compiled(source, "<bos>", "<eos>")
    return template.render(conversation.messages, conversation.tools, prompt, **conversation.variables)


def digest(text: str) -> str:
    """What a test keeps of a string that is not ours to keep: another template's rendering."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


ACROSS = [("Ċ", first) for first in "HSDIW4æ"]
"""Merges of the end of a header, a newline, with the first bytes of answers in CONVERSATIONS."""


def tokenizer_with(source: str, folder: Path, special: list[str], bos: str, eos: str, across: bool = False) -> Tokenizer:
    """A tokenizer of bytes and these special tokens that has adopted the template; saved in ``folder``. ``across``: some of its
    tokens hold the end of a header and the first byte of an answer."""
    write_byte_tokenizer(folder, special, merges=ACROSS if across else (), words=not across, bos_token=bos, eos_token=eos)
    tokenizer = Tokenizer.from_hf_folder(folder)
    adopt_template(ChatTemplate(source, bos, eos), tokenizer)
    tokenizer.save_hf(folder)
    return tokenizer


def encoded(tokenizer: Tokenizer, conversation: Conversation, **options: Any) -> Any:
    """The conversation as a run trains on it (`surogate_core.data.Encoded`); ``options``: of the `Encoder`."""
    template = _compiled(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    return Encoder(tokenizer, template, **options).encode(
        Example(messages=conversation.messages, tools=conversation.tools, template_variables=conversation.variables)
    )


def trained(tokenizer: Tokenizer, conversation: Conversation, **options: Any) -> list[str]:
    """The stretches of text whose tokens carry loss, in order."""
    stretches: list[str] = []
    inside = False
    for piece, carries in explain_mask(encoded(tokenizer, conversation, **options), tokenizer):
        if carries and not inside:
            stretches.append("")
        if carries:
            stretches[-1] += piece
        inside = carries
    return stretches


def tokens(tokenizer: Tokenizer, conversation: Conversation, **options: Any) -> list[tuple[int, bool]]:
    """(id, carries loss) of each token that a run trains on; ``options``: of the `Encoder`."""
    row = encoded(tokenizer, conversation, **options)
    return list(zip(row.ids.tolist(), (row.weights > 0).tolist(), strict=True))


def tokens_of_transformers(folder: Path, conversation: Conversation, answers: list[str]) -> list[tuple[int, bool]]:
    """The same by what `transformers` renders, its ids and where it says that they stand: whatever shares a character with one of
    ``answers``, each of which is found once behind the one before it, carries loss."""
    theirs = _of_transformers(folder)
    text = theirs.apply_chat_template(
        conversation.messages, tools=conversation.tools, tokenize=False, **conversation.variables)
    spans, at = [], 0
    for answer in answers:
        assert text.count(answer, at) == 1, (answer, text[at:])
        start = text.index(answer, at)
        at = start + len(answer)
        spans.append((start, at))
    found = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    return [
        (token, any(first < end and start < last for start, end in spans))
        for token, (first, last) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


def tokens_by_mask(folder: Path, source: str, conversation: Conversation) -> list[tuple[int, bool]]:
    """The same by the mask that `transformers` makes of ``source``, a template that says {% generation %}."""
    found = _of_transformers(folder).apply_chat_template(
        conversation.messages, tools=conversation.tools, chat_template=source, return_dict=True,
        return_assistant_tokens_mask=True, **conversation.variables)
    return [(token, bool(carries)) for token, carries in zip(found["input_ids"], found["assistant_masks"], strict=True)]


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """What a server gives the model for an answer to the conversation."""
    template = _compiled(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    text = template.render(conversation.messages, conversation.tools, add_generation_prompt=True, **conversation.variables)
    return encode_rendered(tokenizer, text)[0]


def ids_of_transformers(folder: Path, conversation: Conversation, prompt: bool = False) -> list[int]:
    """What `transformers` makes of the conversation with the tokenizer in ``folder`` and the template saved there."""
    return _of_transformers(folder).apply_chat_template(
        conversation.messages, tools=conversation.tools, add_generation_prompt=prompt, return_dict=False,
        **conversation.variables,
    )


def prompts_of_turns(source: str, conversation: Conversation) -> list[tuple[str, str]]:
    """(prompt, rendering that ends with the turn) for each of the assistant's turns: what a server asks, and what is
    trained on."""
    return [
        (render(source, conversation.upto(index), prompt=True), render(source, conversation.upto(index + 1)))
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]
