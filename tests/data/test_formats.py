"""Layouts of rows: detection by columns, and every spelling of a conversation."""

from __future__ import annotations

import pytest

from surogate_core.data.formats import BUILTIN, DatasetFormat, Example, find_format
from surogate_core.errors import DataError


def example(row, kind="auto", formats=BUILTIN):
    return find_format(kind, set(row), "f.jsonl:1", formats).to_example(row)


@pytest.mark.parametrize("row, kind", [
    ({"messages": []}, "chat"), ({"conversations": [], "id": 1}, "chat"), ({"prompt": "", "completion": ""},
                                                                          "prompt_completion"),
    ({"messages": [], "prompt": "", "completion": ""}, "chat"),
    ({"instruction": "", "input": "", "output": ""}, "instruction"), ({"query": "", "response": ""}, "instruction"),
    ({"text": "", "meta": 1}, "text")])
def test_auto_detection(row, kind):
    assert find_format("auto", set(row), "f.jsonl:1").name == kind


def test_wrong_columns_list_those_found_and_the_nearest_layout():
    with pytest.raises(DataError, match=r"f\.jsonl:1: columns found: mesages, n, which is no known layout") as error:
        find_format("auto", {"mesages", "n"}, "f.jsonl:1")
    assert "The nearest one is chat: messages" in error.value.hint
    with pytest.raises(DataError, match="type chat reads messages"):
        find_format("chat", {"text"}, "f.jsonl:1")


def test_unknown_type_and_the_names_others_use():
    with pytest.raises(DataError, match="did you mean instruction"):
        find_format("instructions", {"instruction", "output"}, "f.jsonl:1")
    assert find_format("alpaca", {"instruction", "output"}, "f.jsonl:1").name == "instruction"
    assert find_format("sharegpt", {"conversations"}, "f.jsonl:1").name == "chat"


def test_sharegpt():
    got = example({"system": "s", "conversations": [
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"}]}).messages
    assert [m["role"] for m in got] == ["system", "user", "assistant", "assistant", "tool"]
    assert got[3]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_tool_calls_in_both_spellings_and_null_ones():
    got = example({"messages": [
        {"role": "user", "content": "q", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1]}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]}],
        "tools": '[{"type": "function"}]'})
    assert "tool_calls" not in got.messages[0] and "name" not in got.messages[0]
    assert got.messages[1]["tool_calls"][0] == {"id": "1", "type": "function",
                                                "function": {"name": "f", "arguments": {"é": [1]}}}
    assert got.messages[2] == {"role": "tool", "tool_call_id": "1", "content": "r"}
    assert got.tools == [{"type": "function"}]


def test_reasoning_and_loss_spellings():
    got = example({"messages": [{"role": "assistant", "content": "a", "thinking": "t", "loss": False}]}).messages[0]
    assert got == {"role": "assistant", "content": "a", "reasoning_content": "t", "thinking": "t", "train": False}


def test_instruction_with_input_and_history():
    got = example({"instruction": "do", "input": "this", "output": "done", "system": "s", "history": [["q", "a"]]})
    assert [(m["role"], m["content"]) for m in got.messages] == [
        ("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "do\n\nthis"), ("assistant", "done")]


def test_prompt_completion():
    assert example({"prompt": "a ", "completion": "b"}) == Example(text="a b", completion_start=2)
    got = example({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]})
    assert got.completion_start == 1 and len(got.messages) == 2


@pytest.mark.parametrize("row, reason", [
    ({"messages": []}, "empty"), ({"messages": "hi"}, "a str, not a list"),
    ({"messages": [1]}, r"messages\[0\] is a int"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "role 'alien'; known roles"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
    ({"messages": [{"role": "user", "content": 3}]}, "content is a int"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}, "no function name"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
     "not valid JSON"),
    ({"messages": [{"role": "assistant", "content": "a", "weight": -1}]}, "weight is -1"),
    ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, "train is 'no'"),
    ({"instruction": "a", "output": ""}, "output is empty"), ({"text": None}, "text is a NoneType"),
    ({"text": "  "}, "empty"), ({"prompt": "a", "completion": []}, "both strings or both lists"),
    ({"prompt": "a", "completion": ""}, "completion is empty")])
def test_rows_that_cannot_be_used_say_why(row, reason):
    with pytest.raises(DataError, match=reason):
        example(row)


def test_a_plugins_format_is_found_like_the_built_in_ones():
    class Songs(DatasetFormat):
        name, columns = "songs", "title, verses"

        def matches(self, columns):
            return {"title", "verses"} <= columns

        def to_example(self, row):
            return Example(text="\n".join(row["verses"]))

    formats = {**BUILTIN, "songs": Songs()}
    assert example({"title": "t", "verses": ["a", "b"]}, formats=formats).text == "a\nb"
