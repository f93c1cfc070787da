"""The chat templates of Qwen: their strings, what is trained on, and what transformers makes of a saved one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from surogate_core.errors import DataError
from surogate_core.plugins import get_manager
from surogate_core.testing import templates as tried
from surogate_core.testing.templates import CONVERSATIONS
from surogate_qwen.templates import TEMPLATES

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>",
]  # fmt: skip
# Of what the templates published with Qwen2.5-7B-Instruct and Qwen3-0.6B render: without a generation prompt, and with.
PUBLISHED = {
    "qwen2.5": {
        "question": ("6e7cc5774a4f37dd", "aade6f617c84680b"), "talk": ("f23970a123b4a994", "8c10fbbd6db4ec3d"),
        "system": ("6feb7482f23e6dc2", "c3fec1d0d13602b8"), "no thinking": ("f23970a123b4a994", "8c10fbbd6db4ec3d"),
        "thinking": ("3e05e5d1842dd582", "a98c6c50582de343"), "earlier thought": ("a43b25c0f1408a33", "e21d5d4c05ba6497"),
        "tools": ("edbb88722ede58dd", "b1823b069cc6fb5a"), "call": ("65045f82257347bb", "a6facfeab7c2bb82"),
        "calls": ("b836ecaa0956b2b5", "6c39410f5fcae986"), "steps": ("7507ac6481bfff9a", "eeae4acc56de48d0"),
        "text and call": ("a08189876d4e3ea3", "e9c1bef1260e8015"),
    },
    "qwen3": {
        "question": ("48cc769d44dae95b", "d19b2eb3ede8aedc"), "talk": ("ee067cbe41c688bb", "9a3eb15a4a008058"),
        "system": ("735ccc10aaf17ab2", "7f6082099bf6c535"), "no thinking": ("ee067cbe41c688bb", "da369637d61efeab"),
        "thinking": ("e50f06b49f51fc3d", "3d11048d631765f8"), "earlier thought": ("168a8a830e561ef2", "cdcb256f634fb149"),
        "tools": ("edbb88722ede58dd", "b1823b069cc6fb5a"), "call": ("ab242a1707ffe0ab", "7c36961f1dc8439c"),
        "calls": ("b836ecaa0956b2b5", "6c39410f5fcae986"), "steps": ("3bff29c918c5440b", "57a67c10a4562f37"),
        "text and call": ("3eb937de58aa711d", "3a166efdd68c23c6"),
    },
}  # fmt: skip
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich & <b>", "days": [1, 2.5], "exact": true}}\n</tool_call>'
)
ADD = (
    '<tool_call>\n{"name": "add", "arguments": {"text": "\\"x\\" < {{ y }}", "deep": {"a": 1, "b": "}"}}}\n</tool_call>'
)
END = "<|im_end|>"
# The answers with what ends them; neither their headers nor an empty thought that nobody wrote.
TRAINED = {
    "question": [],
    "talk": ["Hello {there}" + END, "日本 🙂" + END],
    "system": ["Hello {there}" + END, "日本 🙂" + END],
    "no thinking": ["Hello {there}" + END, "日本 🙂" + END],
    "thinking": ["Hello {there}" + END, "<think>\nlet me\nsee\n</think>\n\n42" + END],
    "earlier thought": ["So." + END, "日本 🙂" + END],
    "tools": [],
    "call": [WEATHER + END, "It rains." + END],
    "calls": [WEATHER + "\n" + ADD + END, "Done." + END],
    "steps": ["<think>\nI need both\n</think>\n\n" + WEATHER + END, ADD + END, "Done." + END],
    "text and call": ["I look.\n" + WEATHER + END, "Wet." + END],
}
PAIRS = [(name, conversation) for name in TEMPLATES for conversation in CONVERSATIONS]


def made(root, across: bool = False):
    """(tokenizer, its folder) by the template that it has."""
    return {
        name: (tried.tokenizer_with(source, root / name, SPECIAL, "<|endoftext|>", "<|im_end|>", across), root / name)
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
    assert {name: templates[name] for name in templates if templates.source(name).startswith("surogate-qwen")} == TEMPLATES


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_the_strings_are_those_of_the_published_templates(name, conversation):
    ours = [tried.digest(tried.render(TEMPLATES[name], CONVERSATIONS[conversation], prompt)) for prompt in (False, True)]
    assert tuple(ours) == PUBLISHED[name][conversation]


def refuses_thought(name: str, conversation: str) -> bool:
    return name == "qwen2.5" and conversation in ("thinking", "steps")


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_what_is_trained_on(tokenizers, name, conversation):
    tokenizer, _ = tokenizers[name]
    if refuses_thought(name, conversation):
        with pytest.raises(DataError, match="leaves out its reasoning_content"):
            tried.trained(tokenizer, CONVERSATIONS[conversation])
        return
    assert tried.trained(tokenizer, CONVERSATIONS[conversation]) == TRAINED[conversation]


@pytest.mark.parametrize(("name", "conversation"), [pair for pair in PAIRS if not refuses_thought(*pair)])
def test_every_token_that_is_trained_on(across, name, conversation):
    tokenizer, folder = across[name]
    ours = tried.tokens(tokenizer, CONVERSATIONS[conversation])
    assert ours == tried.tokens_of_transformers(folder, CONVERSATIONS[conversation], TRAINED[conversation])
    assert conversation != "talk" or (tokenizer.token_id("ĊH"), True) in ours


@pytest.mark.parametrize("conversation", [each for each in CONVERSATIONS if each != "no thinking"])
def test_every_token_by_the_mask_of_transformers(across, conversation):
    """Of the template with its answers marked, a thought that nobody wrote among them; the prompt has it with "no thinking"."""
    header, end = r"{{- '<|im_start|>assistant\n' -}}", r"{{- '<|im_end|>\n' -}}"
    before, _, turn = TEMPLATES["qwen3"].partition(header)
    answer, _, behind = turn.partition(end)
    marked = "".join([
        before, header, "{%- generation -%}", answer, "{{- '<|im_end|>' -}}{%- endgeneration -%}", r"{{- '\n' -}}", behind])
    tokenizer, folder = across["qwen3"]
    ours = tried.tokens(tokenizer, CONVERSATIONS[conversation], empty_think=True)
    assert ours == tried.tokens_by_mask(folder, marked, CONVERSATIONS[conversation])


def test_an_empty_thought_is_trained_on_where_that_is_asked_for(tokenizers):
    tokenizer, _ = tokenizers["qwen3"]
    answers = tried.trained(tokenizer, CONVERSATIONS["talk"], empty_think=True)
    assert answers == ["Hello {there}" + END, "<think>\n\n</think>\n\n日本 🙂" + END]


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_a_turn_is_trained_on_behind_the_prompt_that_a_server_asks_it_with(name, conversation):
    for prompt, whole in tried.prompts_of_turns(TEMPLATES[name], CONVERSATIONS[conversation]):
        assert whole.startswith(prompt) and whole.endswith(END + "\n")


@pytest.mark.parametrize(("name", "conversation"), [pair for pair in PAIRS if pair[0] in ("qwen2.5",)])
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


def test_thoughts_are_read_inside_a_text_too():
    inside = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."}]
    apart = [inside[0], {"role": "assistant", "content": "So.", "reasoning_content": "hm"}]
    one, other = (tried.render(TEMPLATES["qwen3"], tried.Conversation(messages)) for messages in (inside, apart))
    assert one == other and "<think>\nhm\n</think>\n\nSo.<|im_end|>" in one


def test_a_role_that_is_not_known_is_refused():
    with pytest.raises(DataError, match="there is no role narrator"):
        tried.render(TEMPLATES["qwen3"], tried.Conversation([{"role": "narrator", "content": "x"}]))
