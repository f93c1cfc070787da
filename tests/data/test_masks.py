"""Masks: what is trained on, for templates of every shape. `on` is the text whose tokens are supervised."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surogate_core.data import Encoder, Example, explain_mask, print_mask
from surogate_core.data.masks import encode_rendered
from surogate_core.data.template import ChatTemplate
from surogate_core.data.turns import TurnFinder
from surogate_core.errors import DataError

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("templates/*.jinja")}

U, A, S = "user", "assistant", "system"
TALK = [(U, "one two"), (A, "three"), (U, "four"), (A, "five dog")]
CALL = {"role": A, "content": None, "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TOOL_TALK = [(U, "weather?"), CALL, ("tool", "rain"), (A, "It rains.")]


def messages(items):
    return [item if isinstance(item, dict) else {"role": item[0], "content": item[1]} for item in items]


def encode(tokenizer, template, items, tools=None, variables=None, **options):
    encoder = Encoder(tokenizer, ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token), **options)
    return encoder.encode(Example(messages=messages(items), tools=tools, template_variables=variables or {}))


def on(encoded, tokenizer):
    """The supervised stretches, in order."""
    out, last = [], False
    for piece, trained in explain_mask(encoded, tokenizer):
        if trained:
            out[-1:] = [out[-1] + piece] if last else [*out[-1:], piece]
        last = trained
    return out


@pytest.mark.parametrize("name, ends", [
    ("chatml", "<|im_end|>"), ("chatml_default_system", "<|im_end|>"), ("no_generation_prompt", "<|im_end|>"),
    ("llama3", "<|eot_id|>"), ("generation_tags", "<|im_end|>"), ("thinking", "<|im_end|>")])
def test_answers_with_their_terminator_and_without_their_header(tokenizer, name, ends):
    assert on(encode(tokenizer, TEMPLATES[name], TALK), tokenizer) == ["three" + ends, "five dog" + ends]


def test_inst_template_without_header(make_tokenizer):
    tokenizer = make_tokenizer(bos="<s>", eos="</s>")
    encoded = encode(tokenizer, TEMPLATES["inst"], TALK)
    assert [x.strip() for x in on(encoded, tokenizer)] == ["three</s>", "five dog</s>"]


def test_template_whose_beginning_is_no_prefix_of_the_whole(make_tokenizer):
    tokenizer = make_tokenizer(bos="<s>", eos="</s>")
    encoded = encode(tokenizer, TEMPLATES["inst"], TALK, tools=TOOLS)
    assert "[TOOLS]" in encoded.text.split("three")[1]
    assert [x.strip() for x in on(encoded, tokenizer)] == ["three</s>", "five dog</s>"]


def test_the_last_supervised_id_of_each_turn_is_the_terminator(tokenizer):
    encoded = encode(tokenizer, TEMPLATES["chatml"], TALK)
    ends = [i for i in range(len(encoded.ids)) if encoded.weights[i] and not encoded.weights[i + 1:i + 2].any()]
    assert [encoded.ids[i] for i in ends] == [tokenizer.eos_token_id] * 2


def test_ids_are_those_of_the_whole_rendering(tokenizer):
    encoded = encode(tokenizer, TEMPLATES["chatml"], TALK)
    assert encoded.ids.tolist() == tokenizer.encode(encoded.text)
    assert "assistant\n<" not in encoded.text.split("five dog")[1]  # no generation prompt at the end


@pytest.mark.parametrize("train_on, wanted", [
    ("assistant", ["three<|im_end|>", "five dog<|im_end|>"]), ("last", ["five dog<|im_end|>"]),
    ("completion", ["five dog<|im_end|>"])])
def test_train_on(tokenizer, train_on, wanted):
    assert on(encode(tokenizer, TEMPLATES["chatml"], TALK, train_on=train_on), tokenizer) == wanted


def test_train_on_all_takes_every_token(tokenizer):
    assert encode(tokenizer, TEMPLATES["chatml"], TALK, train_on="all").weights.min() == 1


def test_last_round_is_everything_after_the_last_user_and_no_tool_text(tokenizer):
    items = [*TALK, *TOOL_TALK]
    encoded = encode(tokenizer, TEMPLATES["thinking"], items, tools=TOOLS, train_on="last")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert on(encoded, tokenizer) == [call, "It rains.<|im_end|>"]


def test_turns_that_go_on_behind_the_results_of_their_calls(tokenizer):
    """One model's turn with two calls, their results inside it: no header and no generation prompt between them."""
    goes_on = (
        "{% set ns = namespace(open=false) %}{% for m in messages %}"
        "{% if m.role == 'tool' %}[{{ m.content }}]{% else %}"
        "{% if not ns.open %}<|im_start|>{{ m.role }}\n{% endif %}{% set ns.open = m.tool_calls is defined %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }} city {{ call.function.arguments.city }};{% endfor %}"
        "{{ m.content or '' }}{% if not ns.open %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not ns.open %}<|im_start|>assistant\n{% endif %}"
    )
    items = [(U, "weather?"), CALL, ("tool", "rain"), CALL, ("tool", "sun"), (A, "both")]
    encoded = encode(tokenizer, goes_on, items)
    assert encoded.text.endswith("<|im_start|>assistant\nweather city Paris;[rain]weather city Paris;[sun]both<|im_end|>\n")
    assert on(encoded, tokenizer) == ["weather city Paris;", "weather city Paris;", "both<|im_end|>"]


def test_tool_calls_in_llama3_shape(tokenizer):
    encoded = encode(tokenizer, TEMPLATES["llama3"], TOOL_TALK, tools=TOOLS)
    assert on(encoded, tokenizer) == ['{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>',
                                      "It rains.<|eot_id|>"]


def test_a_template_that_ignores_tool_calls_is_refused(tokenizer):
    with pytest.raises(DataError, match="leaves out the .*tool call weather"):
        encode(tokenizer, TEMPLATES["ignores_calls"], TOOL_TALK)


def test_per_message_train_and_weight(tokenizer):
    items = messages(TALK)
    items[1]["train"], items[3]["weight"] = False, 0.5
    encoded = encode(tokenizer, TEMPLATES["chatml"], items)
    assert on(encoded, tokenizer) == ["five dog<|im_end|>"] and set(encoded.weights.tolist()) == {0.0, 0.5}
    items[1]["train"] = True
    assert len(on(encode(tokenizer, TEMPLATES["chatml"], items, train_on="last"), tokenizer)) == 2


def test_weights_follow_the_call_they_stand_on(tokenizer):
    items = messages(TOOL_TALK)
    items[1]["weight"], items[3]["weight"] = 2.0, 0.25
    encoded = encode(tokenizer, TEMPLATES["thinking"], items, tools=TOOLS)
    pieces = [(encoded.text[s:e], w) for (s, e), w in zip(encoded.offsets, encoded.weights.tolist(), strict=True)]
    by_weight = {wanted: "".join(piece for piece, w in pieces if w == wanted) for wanted in (2.0, 0.25)}
    assert by_weight[2.0].startswith("<tool_call>") and by_weight[0.25] == "It rains.<|im_end|>"


def test_asking_to_train_on_a_users_message_is_an_error(tokenizer):
    items = messages(TALK)
    items[0]["train"] = True
    with pytest.raises(DataError, match=r"messages\[0\] \(user\): train is True"):
        encode(tokenizer, TEMPLATES["chatml"], items)


class TestThoughts:
    def test_an_empty_thought_of_the_template_is_masked_unless_asked_for(self, tokenizer):
        encoded = encode(tokenizer, TEMPLATES["thinking"], TALK)
        assert "<think>\n\n</think>\n\nfive" in encoded.text
        assert on(encoded, tokenizer)[-1] == "five dog<|im_end|>"
        kept = encode(tokenizer, TEMPLATES["thinking"], TALK, empty_think=True)
        assert on(kept, tokenizer)[-1] == "<think>\n\n</think>\n\nfive dog<|im_end|>"

    def test_a_thought_of_the_row_is_trained_on(self, tokenizer):
        items = [*TALK[:3], {"role": A, "content": "five dog", "reasoning_content": "lazy fox"}]
        assert on(encode(tokenizer, TEMPLATES["thinking"], items), tokenizer)[-1] == \
            "<think>\nlazy fox\n</think>\n\nfive dog<|im_end|>"

    def test_an_earlier_thought_that_the_template_drops_is_no_error(self, tokenizer):
        items = [TALK[0], (A, "<think>\nlazy\n</think>\n\nthree"), *TALK[2:]]
        assert on(encode(tokenizer, TEMPLATES["thinking"], items), tokenizer)[0] == "three<|im_end|>"

    def test_a_thought_of_the_last_answer_that_the_template_drops_is_refused(self, tokenizer):
        thoughtful = {"role": A, "content": "five dog", "reasoning_content": "lazy fox"}
        with pytest.raises(DataError, match=r"messages\[3\] \(assistant\): .* leaves out its reasoning_content"):
            encode(tokenizer, TEMPLATES["chatml"], [*TALK[:3], thoughtful])
        earlier = [TALK[0], {**thoughtful, "content": "three"}, *TALK[2:]]
        assert on(encode(tokenizer, TEMPLATES["chatml"], earlier), tokenizer)[0] == "three<|im_end|>"

    def test_an_empty_thought_in_place_of_an_earlier_one_is_masked(self, tokenizer):
        """Some templates do not only drop it."""
        emptied = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.last }}</think>{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
        items = [TALK[0], {"role": A, "content": "three", "reasoning_content": "lazy", "thinking": "lazy"}, *TALK[2:]]
        assert on(encode(tokenizer, emptied, items), tokenizer) == ["three<|im_end|>", "five dog<|im_end|>"]

    def test_with_thinking_switched_off(self, tokenizer):
        encoded = encode(tokenizer, TEMPLATES["thinking"], TALK, variables={"enable_thinking": False})
        assert on(encoded, tokenizer) == ["three<|im_end|>", "five dog<|im_end|>"]

    def test_a_closing_tag_without_its_opener_is_refused_not_cut(self, tokenizer):
        with pytest.raises(DataError, match="leaves out or changes part of its content"):
            encode(tokenizer, TEMPLATES["thinking"], [TALK[0], (A, "half </think> other half"), *TALK[2:]])


class TestBosAndEos:
    def test_a_template_that_writes_bos_gets_no_second_one(self, make_tokenizer):
        tokenizer = make_tokenizer(bos="<|begin_of_text|>", eos="<|eot_id|>", adds_bos=True)
        ids = encode(tokenizer, TEMPLATES["llama3"], TALK).ids.tolist()
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1

    def test_a_template_without_bos_gets_one_where_the_tokenizer_adds_it(self, make_tokenizer):
        tokenizer = make_tokenizer(bos="<s>", eos="<|im_end|>", adds_bos=True)
        encoded = encode(tokenizer, TEMPLATES["chatml"], TALK)
        assert encoded.ids.tolist().count(tokenizer.bos_token_id) == 1 and encoded.weights[0] == 0
        assert on(encoded, tokenizer) == ["three<|im_end|>", "five dog<|im_end|>"]
        assert encode_rendered(tokenizer, "<s>a")[0] == encode_rendered(tokenizer, "a")[0]

    def test_one_terminator_only(self, tokenizer):
        encoded = encode(tokenizer, TEMPLATES["chatml"], TALK)
        assert encoded.ids.tolist().count(tokenizer.eos_token_id) == 4

    def test_a_template_without_terminator_gets_eos_after_the_last_answer(self, tokenizer):
        encoded = encode(tokenizer, TEMPLATES["no_terminator"], TALK)
        assert encoded.ids[-1] == tokenizer.eos_token_id and encoded.weights[-1] == 1
        assert on(encoded, tokenizer)[0] == "three"

    def test_text_is_trained_on_whole_with_one_eos(self, make_tokenizer):
        tokenizer = make_tokenizer(bos="<s>", eos="</s>", adds_bos=True)
        for text in ("quick fox", "quick fox</s>"):
            encoded = Encoder(tokenizer, None).encode(Example(text=text))
            inner = tokenizer.encode("quick fox")
            assert encoded.ids.tolist() == [tokenizer.bos_token_id, *inner, tokenizer.eos_token_id]
            assert encoded.num_supervised == len(encoded.ids) - 1

    def test_id_zero_is_a_token_like_any_other(self, make_tokenizer):
        tokenizer = make_tokenizer(bos=None, eos="<|endoftext|>")
        assert tokenizer.eos_token_id == 0
        assert Encoder(tokenizer, None).encode(Example(text="fox")).ids[-1] == 0


def test_prompt_and_completion_as_text(tokenizer):
    example = Example(text="### Response:\nthree four", completion_start=14)
    assert on(Encoder(tokenizer, None).encode(example), tokenizer) == ["three four<|im_end|>"]
    assert Encoder(tokenizer, None, train_on="all").encode(example).weights.min() == 1


def test_prompt_and_completion_as_messages(tokenizer):
    encoder = Encoder(tokenizer, ChatTemplate(TEMPLATES["chatml"]), train_on="completion")
    encoded = encoder.encode(Example(messages=messages(TALK), completion_start=1))
    assert on(encoded, tokenizer) == ["three<|im_end|>", "five dog<|im_end|>"]


def test_a_marker_that_tokenizes_differently_in_context_is_no_matter(tokenizer):
    """A token that holds the end of the header and the start of the answer belongs to the answer."""
    text = "Q: hello A: world"
    ids, offsets = tokenizer.encode_with_offsets(text)
    straddling = next((s, e) for s, e in offsets if s == text.index(" world"))
    encoded = Encoder(tokenizer, None).encode(Example(text=text, completion_start=text.index("world")))
    assert straddling[0] < text.index("world") and on(encoded, tokenizer) == [" world<|im_end|>"]


@pytest.mark.parametrize("content", ["ä€😀 日本", "a  b\n\n", "<|im_end|>", "assistant\n", "three"])
def test_answers_of_any_text(tokenizer, content):
    encoded = encode(tokenizer, TEMPLATES["chatml"], [(U, content), (A, content or "x"), (U, "three"), (A, "three")])
    assert on(encoded, tokenizer) == [content + "<|im_end|>", "three<|im_end|>"]


def test_system_prompt_for_conversations_without_one(tokenizer):
    encoded = encode(tokenizer, TEMPLATES["chatml"], TALK, system_prompt="lazy")
    assert encoded.text.startswith("<|im_start|>system\nlazy<|im_end|>")
    assert encode(tokenizer, TEMPLATES["chatml"], [(S, "quick"), *TALK], system_prompt="lazy").text.count("lazy") == 0


def test_no_template_is_an_error_that_says_what_to_set(tokenizer):
    with pytest.raises(DataError, match="chat_template"):
        Encoder(tokenizer, None).encode(Example(messages=messages(TALK)))


def test_unclear_turns_are_refused(tokenizer):
    backwards = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="its place in the rendered conversation cannot be told"):
        encode(tokenizer, backwards, TALK)


def test_a_template_that_drops_a_message_is_refused():
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(DataError, match=r"messages\[0\] \(system\): the chat template leaves out"):
        TurnFinder(template).find(messages([(S, "be brief"), *TALK]))


def test_print_mask_shows_text_with_brackets(tokenizer):
    from rich.console import Console

    console = Console(width=200, record=True)
    print_mask(console, encode(tokenizer, TEMPLATES["chatml"], [(U, "[red]a"), (A, "[/b] ok")]), tokenizer)
    assert "⟦[/b] ok<|im_end|>⟧" in console.export_text()


def test_print_mask_needs_no_brackets_where_there_are_colours(tokenizer):
    from rich.console import Console

    console = Console(width=200, record=True, force_terminal=True, color_system="standard", file=io.StringIO())
    print_mask(console, encode(tokenizer, TEMPLATES["chatml"], [(U, "hi"), (A, "ok")]), tokenizer)
    assert "⟦" not in console.export_text()


WORDS = st.text(st.sampled_from("ab é\n<>|{}%日😀"), min_size=1, max_size=12).filter(str.strip)


@given(answers=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.booleans(),
       name=st.sampled_from(["chatml", "chatml_default_system", "no_generation_prompt", "generation_tags"]))
@example(answers=[("<", ">")], system=False, name="chatml")  # the answer ends as its terminator does
@settings(max_examples=60, deadline=None)
def test_any_conversation_is_supervised_on_its_answers_exactly(tokenizer, answers, system, name):
    items = [(S, "be brief")] if system else []
    for question, answer in answers:
        items += [(U, question), (A, answer)]
    got = on(encode(tokenizer, TEMPLATES[name], items), tokenizer)
    # a line feed that begins the answer may share a token with the header's: white space alone makes none supervised
    assert [piece.lstrip() for piece in got] == [answer.lstrip() + "<|im_end|>" for _, answer in answers]
