"""The chat templates of Gemma: their strings, what is trained on, and what transformers makes of a saved one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from surogate_core.errors import DataError
from surogate_core.plugins import get_manager
from surogate_core.testing import templates as tried
from surogate_core.testing.templates import CONVERSATIONS
from surogate_gemma.templates import TEMPLATES

SPECIAL = {
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "functiongemma": [
        "<start_of_turn>", "<end_of_turn>", "<start_function_declaration>", "<end_function_declaration>", "<escape>",
        "<start_function_call>", "<end_function_call>", "<start_function_response>", "<end_function_response>",
    ],
    "gemma4": [
        "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
        '<|"|>', "<|channel>", "<channel|>", "<|think|>",
    ],
}  # fmt: skip
CALLING = ("tools", "call", "calls", "steps", "text and call")
# Of what the template published with Gemma 3 renders, without a generation prompt and with, and the one of Gemma 4 with.
GEMMA3 = {
    "question": ("30cb95826e630687", "f92f852276e98b22"), "talk": ("846c45d84b185754", "74359dbcbb3312a2"),
    "system": ("ec0a3ed35830546a", "f57f37e72f2f126c"), "no thinking": ("846c45d84b185754", "74359dbcbb3312a2"),
    "thinking": ("dc5e74b853037357", "1292847c1b43b04b"), "earlier thought": ("a08eed393fc25a51", "f927f5d34e306ac9"),
}  # fmt: skip
GEMMA4 = {
    "question": "7f27314459ed937a", "talk": "047e5d29fb22555c", "system": "652c941f9205602c",
    "no thinking": "047e5d29fb22555c", "thinking": "499df20a08ce8727", "earlier thought": "830a6bf914231432",
    "tools": "14c57fce1186ae17", "call": "e17815b7c7f11fc8", "calls": "fdae3867762c9e76", "steps": "ab53e87c92a2c0be",
}  # fmt: skip


def trained_texts(end: str, call: str, after_call: str, weather: str, add: str, thought: str = "") -> dict[str, list[str]]:
    """The answers with what ends them: after a call the model stops where the result begins."""
    weather, add = call.format(weather), call.format(add)
    return {
        "question": [], "tools": [],
        "talk": ["Hello {there}" + end, "日本 🙂" + end],
        "system": ["Hello {there}" + end, "日本 🙂" + end],
        "no thinking": ["Hello {there}" + end, "日本 🙂" + end],
        "thinking": ["Hello {there}" + end, thought.format("let me\nsee") + "42" + end],
        "earlier thought": ["So." + end, "日本 🙂" + end],
        "call": [weather + after_call, "It rains." + end],
        "calls": [weather + add + after_call, "Done." + end],
        "steps": [thought.format("I need both") + weather + after_call, add + after_call, "Done." + end],
        "text and call": ["I look." + weather + after_call, "Wet." + end],
    }  # fmt: skip


TRAINED = {
    "gemma": trained_texts("<end_of_turn>", "", "", "", ""),
    "functiongemma": trained_texts(
        "<end_of_turn>", "<start_function_call>{}<end_function_call>", "<start_function_response>",
        "call:weather{city:<escape>Zürich & <b><escape>,days:[1,2.5],exact:true}",
        'call:add{deep:{a:1,b:<escape>}<escape>},text:<escape>"x" < {{ y }}<escape>}',
    ),
    "gemma4": trained_texts(
        "<turn|>", "<|tool_call>{}<tool_call|>", "<|tool_response>",
        'call:weather{city:<|"|>Zürich & <b><|"|>,days:[1,2.5],exact:true}',
        'call:add{deep:{a:1,b:<|"|>}<|"|>},text:<|"|>"x" < {{ y }}<|"|>}',
        "<|channel>thought\n{}\n<channel|>",
    ),
}  # fmt: skip
PAIRS = [(name, each) for name in TEMPLATES for each in CONVERSATIONS if name != "gemma" or each not in CALLING]


def refuses_thought(name: str, conversation: str) -> bool:
    return name != "gemma4" and conversation in ("thinking", "steps")


def made(root, across: bool = False):
    """(tokenizer, its folder) by the template that it has."""
    ends = ["<bos>", "<eos>"]
    return {
        name: (tried.tokenizer_with(source, root / name, [*ends, *SPECIAL[name]], *ends, across), root / name)
        for name, source in TEMPLATES.items()
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return made(tmp_path_factory.mktemp("apart"))


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """Tokens may hold the end of a header and the beginning of an answer."""
    return made(tmp_path_factory.mktemp("across"), True)


def test_they_are_what_a_configuration_can_name():
    templates = get_manager().chat_templates
    assert {name: templates[name] for name in templates if templates.source(name).startswith("surogate-gemma")} == TEMPLATES


@pytest.mark.parametrize("conversation", GEMMA3)
def test_the_strings_of_gemma_3_are_the_published_ones(conversation):
    ours = [tried.digest(tried.render(TEMPLATES["gemma"], CONVERSATIONS[conversation], prompt)) for prompt in (False, True)]
    assert tuple(ours) == GEMMA3[conversation]


@pytest.mark.parametrize("conversation", GEMMA4)
def test_what_gemma_4_is_asked_is_what_the_published_template_writes(conversation):
    assert tried.digest(tried.render(TEMPLATES["gemma4"], CONVERSATIONS[conversation], True)) == GEMMA4[conversation]


def test_functiongemma_writes_what_its_documentation_shows():
    tools = [{"type": "function", "function": {
        "name": "get_current_temperature", "description": "Gets the current temperature for a given location.",
        "parameters": {"type": "object", "required": ["location"], "properties": {
            "location": {"type": "string", "description": "The city name, e.g. San Francisco"}}}}}]
    call = {"type": "function", "function": {"name": "get_current_temperature", "arguments": {"location": "London"}}}
    messages = [
        {"role": "developer", "content": "You are a model that can do function calling with the following functions"},
        {"role": "user", "content": "What's the temperature in London?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "get_current_temperature", "content": {"temperature": 15, "weather": "sunny"}},
        {"role": "assistant", "content": "15 degrees."},
    ]
    assert tried.render(TEMPLATES["functiongemma"], tried.Conversation(messages, tools)) == (
        "<bos><start_of_turn>developer\nYou are a model that can do function calling with the following functions"
        "<start_function_declaration>declaration:get_current_temperature{description:<escape>Gets the current temperature "
        "for a given location.<escape>,parameters:{properties:{location:{description:<escape>The city name, e.g. San "
        "Francisco<escape>,type:<escape>STRING<escape>}},required:[<escape>location<escape>],type:<escape>OBJECT<escape>}}"
        "<end_function_declaration><end_of_turn>\n"
        "<start_of_turn>user\nWhat's the temperature in London?<end_of_turn>\n"
        "<start_of_turn>model\n<start_function_call>call:get_current_temperature{location:<escape>London<escape>}"
        "<end_function_call><start_function_response>response:get_current_temperature{temperature:15,weather:<escape>sunny"
        "<escape>}<end_function_response>15 degrees.<end_of_turn>\n"
    )


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_what_is_trained_on(tokenizers, name, conversation):
    tokenizer, _ = tokenizers[name]
    if refuses_thought(name, conversation):
        with pytest.raises(DataError, match="leaves out its reasoning_content"):
            tried.trained(tokenizer, CONVERSATIONS[conversation])
        return
    assert tried.trained(tokenizer, CONVERSATIONS[conversation]) == TRAINED[name][conversation]


@pytest.mark.parametrize(("name", "conversation"), [pair for pair in PAIRS if not refuses_thought(*pair)])
def test_every_token_that_is_trained_on(across, name, conversation):
    tokenizer, folder = across[name]
    ours = tried.tokens(tokenizer, CONVERSATIONS[conversation])
    assert ours == tried.tokens_of_transformers(folder, CONVERSATIONS[conversation], TRAINED[name][conversation])
    assert conversation != "talk" or (tokenizer.token_id("ĊH"), True) in ours


@pytest.mark.parametrize("conversation", [each for each in GEMMA3 if not refuses_thought("gemma", each)])
def test_every_token_by_the_mask_of_transformers(across, conversation):
    """Of the template with its answers marked."""
    turn = r"{{- plain(message.content) + '<end_of_turn>\n' -}}"
    answer = "{%- generation -%}" + turn.replace(r"\n", "") + r"{%- endgeneration -%}{{- '\n' -}}"
    assert turn in TEMPLATES["gemma"]
    marked = TEMPLATES["gemma"].replace(
        turn, "{%- if message.role == 'assistant' -%}" + answer + "{%- else -%}" + turn + "{%- endif -%}")
    tokenizer, folder = across["gemma"]
    ours = tried.tokens(tokenizer, CONVERSATIONS[conversation])
    assert ours == tried.tokens_by_mask(folder, marked, CONVERSATIONS[conversation])


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_a_turn_is_trained_on_behind_the_prompt_that_a_server_asks_it_with(name, conversation):
    turns = tried.prompts_of_turns(TEMPLATES[name], CONVERSATIONS[conversation])
    for place, (prompt, whole) in enumerate(turns):
        if name == "gemma4" and place == 0 and conversation in ("call", "calls", "text and call"):
            prompt = prompt.removesuffix("<|channel>thought\n<channel|>")  # which its past never has before a call
        assert whole.startswith(prompt)


@pytest.mark.parametrize(("name", "conversation"), [pair for pair in PAIRS if pair[0] in ("gemma", "functiongemma")])
def test_what_was_said_stays_the_beginning_of_the_next_prompt(name, conversation):
    """So a server's cache holds it. Where there are thoughts, they are taken out of the past."""
    turns = tried.prompts_of_turns(TEMPLATES[name], CONVERSATIONS[conversation])
    for (_, whole), (prompt, _) in pairwise(turns):
        assert prompt.startswith(whole)


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_transformers_reads_what_was_saved_the_same(tokenizers, name, conversation):
    tokenizer, folder = tokenizers[name]
    theirs = tried.ids_of_transformers(folder, CONVERSATIONS[conversation])
    assert tried.encoded(tokenizer, CONVERSATIONS[conversation], train_on="all").ids.tolist() == theirs


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_transformers_asks_with_the_same_prompt(tokenizers, name, conversation):
    tokenizer, folder = tokenizers[name]
    for asked in CONVERSATIONS[conversation].asked():
        assert tried.prompt_ids(tokenizer, asked) == tried.ids_of_transformers(folder, asked, prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_ends_an_answer(tokenizers, name):
    tokenizer, _ = tokenizers[name]
    end = "<turn|>" if name == "gemma4" else "<end_of_turn>"
    assert tokenizer.stop_token_ids == (tokenizer.token_id("<eos>"), tokenizer.token_id(end))


@pytest.mark.parametrize(
    ("name", "messages", "tools", "words"),
    [
        ("gemma", CONVERSATIONS["tools"].messages, tried.TOOLS, "no notation for tools"),
        ("gemma", CONVERSATIONS["call"].messages, None, "must alternate"),
        ("gemma", [CONVERSATIONS["question"].messages[0]] * 2, None, "must alternate"),
        ("gemma", [{"role": "user", "content": [{"type": "image", "image": "x"}]}], None, "only text"),
        ("gemma4", [{"role": "tool", "content": "x"}], None, "must follow its call"),
        ("functiongemma", [*CONVERSATIONS["call"].messages[:2], {"role": "user", "content": "?"}], None, "by its result"),
    ],
)
def test_conversations_that_cannot_be_told(name, messages, tools, words):
    with pytest.raises(DataError, match=words):
        tried.render(TEMPLATES[name], tried.Conversation(list(messages), tools))


def test_a_result_says_whose_it_is_without_an_id_too():
    messages = [{key: value for key, value in m.items() if key != "tool_call_id"} for m in CONVERSATIONS["calls"].messages]
    text = tried.render(TEMPLATES["gemma4"], tried.Conversation(messages, tried.TOOLS))
    assert 'response:weather{value:<|"|>wet<|"|>}' in text and 'response:add{value:<|"|>3<|"|>}' in text


def test_a_parameter_may_be_called_as_a_schema_calls_its_own():
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {
        "type": "object", "properties": {"type": {"type": ["string", "null"]}, "items": {"type": "object"}}}}}]
    text = tried.render(TEMPLATES["gemma4"], tried.Conversation(CONVERSATIONS["question"].messages, tools))
    assert 'properties:{items:{properties:{},type:<|"|>OBJECT<|"|>},type:{type:<|"|>STRING<|"|>}}' in text
