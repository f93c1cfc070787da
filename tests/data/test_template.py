"""Rendering equals transformers', and message text is never taken for a template."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from surogate_core.data.template import BUILTIN, ChatTemplate, load_template
from surogate_core.errors import DataError

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("templates/*.jinja")}

TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Wetter & <more> \"now\"",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "string"}}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich & <b>", "at": "nöw"}}}]}
TALK = [{"role": "user", "content": "  Hi ü\n"}, {"role": "assistant", "content": "Hello {there}  "},
        {"role": "user", "content": "{{ messages }} {% if x %}"}, {"role": "assistant", "content": "ok\n\n"}]
CONVERSATIONS = {
    "talk": (TALK, None, {}),
    "system": ([{"role": "system", "content": "Be brief."}, *TALK], None, {}),
    "tools": ([TALK[0], CALL, {"role": "tool", "content": '{"c": "7°"}'}, {"role": "assistant", "content": "7°"}],
              [TOOL], {}),
    "thought": ([*TALK[:3], {"role": "assistant", "content": "done", "reasoning_content": "let me\nsee"}], None, {}),
    "no thinking": (TALK[:3], None, {"enable_thinking": False}),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["chatml", "chatml_default_system", "llama3", "thinking", "inst", "generation_tags"])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_as_transformers_does(name, conversation, prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    messages, tools, variables = CONVERSATIONS[conversation]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = utils.render_jinja_template([messages], tools=tools, chat_template=TEMPLATES[name],
                                            add_generation_prompt=prompt, **variables, **tokens)
    ours = ChatTemplate(TEMPLATES[name], **tokens).render(messages, tools, prompt, **variables)
    assert ours == theirs[0]


@pytest.mark.parametrize("content", ["{INPUT}", "{% if %}", "{{ 1/0 }}", "{# no #}", "a\\nb", "<b>&amp;</b>"])
def test_text_that_looks_like_a_template_passes_untouched(content):
    rendered = ChatTemplate(TEMPLATES["chatml"]).render([{"role": "user", "content": content}])
    assert rendered == f"<|im_start|>user\n{content}<|im_end|>\n"


def test_tojson_keeps_letters_html_and_key_order():
    template = ChatTemplate("{{ messages[0] | tojson }}")
    assert template.render([{"city": "Zürich & <b>", "at": 1}]) == '{"city": "Zürich & <b>", "at": 1}'


def test_strftime_now_uses_the_given_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2026, 3, 4))
    assert template.render([]) == "04 Mar 2026"


def test_a_template_that_refuses_says_why_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        template.render([])


def test_templates_cannot_reach_out_of_the_sandbox():
    with pytest.raises(DataError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}").render([])
    with pytest.raises(DataError):
        ChatTemplate("{{ messages.append(1) }}").render([])


def test_a_broken_template_names_the_line():
    with pytest.raises(DataError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_templates_refuse_the_calls_that_they_cannot_tell(name):
    template = ChatTemplate(BUILTIN[name], "<s>", "</s>")
    assert "Hello {there}" in template.render(TALK)
    for messages, tools in ((TALK, [TOOL]), ([TALK[0], CALL], None)):
        with pytest.raises(DataError, match="no notation for tools and calls"):
            template.render(messages, tools)


def test_loop_controls():
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ChatTemplate(source).render([]) == "1"


def test_load_template_by_name_file_text_and_tokenizer(tmp_path, make_tokenizer):
    own = make_tokenizer(chat_template="own")
    assert load_template(None, own).render([]) == "own"
    assert load_template(None, make_tokenizer()) is None
    assert load_template("chatml", own).source == BUILTIN["chatml"]
    (tmp_path / "t.jinja").write_text("ä", encoding="utf-8")
    assert load_template(str(tmp_path / "t.jinja"), own).render([]) == "ä"
    assert load_template("{{ eos_token }}", own).render([]) == "<|im_end|>"
    with pytest.raises(DataError, match="did you mean chatml"):
        load_template("chatm", own)
