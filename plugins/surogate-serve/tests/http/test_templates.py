"""Chat templates by name: which one is served, how thinking is switched, and that the calls they write are read back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import Running
from surogate_serve.engine import EngineOptions
from surogate_serve.http.limits import Settings
from surogate_serve.models import ServedModel
from surogate_serve.parsers import Parser, choose_format
from surogate_serve.render import render
from surogate_serve.types import Content, Reasoning, ToolCallArguments, ToolCallBegin

from surogate_core.data import ChatTemplate
from surogate_core.errors import DataError
from surogate_core.plugins import get_manager
from surogate_core.testing import templates as tried
from surogate_core.testing.templates import TOOLS
from surogate_core.testing.tiny import write_byte_tokenizer

NAMED = get_manager().chat_templates
FORMATS = dict(get_manager().parsers.items())
FORMAT_OF = {
    "chatml": "plain", "plain": "plain", "qwen2.5": "hermes", "qwen3": "hermes", "gemma": "gemma3",
    "functiongemma": "functiongemma", "gemma4": "gemma4",
}  # fmt: skip
CALLING = ("qwen2.5", "qwen3", "functiongemma", "gemma4")
THINKING = ("qwen3", "gemma4")
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>",
         "<start_function_response>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>",
         "<channel|>", "<|tool_response>", "<|think|>"]  # fmt: skip
OPTIONS = EngineOptions(threads=1, max_sequences=2)


def special_of(name: str) -> tuple[list[str], str, str]:
    """Special tokens, the first and the last of a text, of a tokenizer that the template is for."""
    is_gemma = "gemma" in name
    return (GEMMA, "<bos>", "<eos>") if is_gemma else (QWEN, "<|endoftext|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By template."""
    return {
        name: tried.tokenizer_with(NAMED[name], tmp_path_factory.mktemp(name), *special_of(name)) for name in FORMAT_OF
    }


def read(tokenizer, text: str, tools=TOOLS, tail: str = "") -> dict:
    """What an answer of this text is, token by token: its content, reasoning, and calls as (name, arguments)."""
    parser = Parser(choose_format(tokenizer.chat_template, FORMATS), tokenizer)
    stream = parser.stream(0, tail, tools)
    events = [
        event for token in tokenizer.encode(text) for event in stream.feed(token, tokenizer.token_bytes(token).decode())
    ]
    told: dict = {"content": "", "reasoning": "", "calls": []}
    for event in events + stream.finish():
        match event:
            case Content():
                told["content"] += event.text
            case Reasoning():
                told["reasoning"] += event.text
            case ToolCallBegin():
                told["calls"].append([event.name, ""])
            case ToolCallArguments():
                told["calls"][-1][1] += event.text
    told["calls"] = [(name, json.loads(arguments)) for name, arguments in told["calls"]]
    return told


@pytest.mark.parametrize("name", FORMAT_OF)
def test_answers_are_read_by_the_format_that_a_template_shows(name):
    assert choose_format(NAMED[name], FORMATS).name == FORMAT_OF[name]


WEATHER = {"id": "call_1", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "<b> & \"c\" {{ d }}", "days": [1, 2.5], "exact": True}}}  # fmt: skip
ADD = {"id": "call_2", "type": "function", "function": {
    "name": "add", "arguments": {"text": "x}, y", "deep": {"a": None, "b": ""}}}}  # fmt: skip


@pytest.mark.parametrize("name", CALLING)
def test_the_calls_that_a_template_writes_are_read_back(tokenizers, name):
    """What is trained on, and so what the model writes, is what the request's history said."""
    calls = [WEATHER, ADD]
    answer = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    asked = {"role": "user", "content": "both"}
    (written,) = tried.trained(tokenizers[name], tried.Conversation([asked, answer], TOOLS))
    told = read(tokenizers[name], written)
    assert told["calls"] == [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
    assert told["content"].strip() == "I look."


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_that_a_template_writes_are_read_back(tokenizers, name):
    answer = {"role": "assistant", "content": "42", "reasoning_content": "let me\nsee"}
    asked = tried.Conversation([{"role": "user", "content": "why"}, answer], variables={"enable_thinking": True})
    (written,) = tried.trained(tokenizers[name], asked)
    assert read(tokenizers[name], written) == {"content": "42", "reasoning": "let me\nsee", "calls": []}


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_switched_by_the_variables_of_the_format(tokenizers, name):
    tokenizer = tokenizers[name]
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    parser = Parser(choose_format(tokenizer.chat_template, FORMATS), tokenizer)
    opening, closing = parser.format.reasoning
    prompts = {
        enabled: render(template, tokenizer, [{"role": "user", "content": "hi"}],
                        **parser.format.thinking_variables(enabled, None))
        for enabled in (True, False)
    }  # fmt: skip
    assert opening not in prompts[True].tail
    assert prompts[False].tail.count(opening) == prompts[False].tail.count(closing) == 1
    begin, end = tokenizer.token_id(opening), tokenizer.token_id(closing)
    assert parser.reasoning_tokens(prompts[True].tail) == (end, begin)
    assert parser.reasoning_tokens(prompts[False].tail) == (None, None)


# -- with a model -----------------------------------------------------------------------------------------------------


def bare(write_tiny, folder: Path, name: str) -> Path:
    """A tiny model with a tokenizer for this template, and no template of its own."""
    special, bos, eos = special_of(name)
    write_tiny(folder, vocab_size=288, max_position_embeddings=2048)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return write_byte_tokenizer(folder, special, bos_token=bos, eos_token=eos)


@pytest.fixture(scope="module", params=CALLING)
def server(request, write_tiny, tmp_path_factory) -> Iterator[tuple[str, Running]]:
    folder = bare(write_tiny, tmp_path_factory.mktemp("bare") / "model", request.param)
    model = ServedModel.open(folder, "tiny", OPTIONS, chat_template=request.param)
    running = Running([model], Settings())
    yield request.param, running
    running.stop()
    model.close()


def chat(running: Running, **body) -> dict:
    reply = httpx.post(running.url + "/v1/chat/completions", json={"model": "tiny", **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_call_goes_to_the_tool_and_its_result_back(server):
    _, running = server
    tools = [{"type": "function", "function": {"name": "pick", "strict": True, "parameters": {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"type": "string", "enum": ["x y", "z"]}}}}}]  # fmt: skip
    messages = [{"role": "user", "content": "pick one"}]
    wanted = {"tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none", "max_tokens": 120,
              "temperature": 0}
    message = chat(running, messages=messages, tools=tools, **wanted)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "pick" and json.loads(call["function"]["arguments"])["a"] in ("x y", "z")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    again = chat(running, messages=[*messages, message, result], tools=tools, tool_choice="none", max_tokens=4)
    assert again["choices"][0]["finish_reason"] in ("length", "stop")


def test_efforts_and_template_variables_switch_thinking(server):
    name, running = server
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    def size(**fields) -> int:
        return chat(running, **ask, **fields)["usage"]["prompt_tokens"]

    off = {size(reasoning_effort="none"), size(chat_template_kwargs={"enable_thinking": False})}
    on = {size(reasoning_effort="high"), size(chat_template_kwargs={"enable_thinking": True})}
    assert len(off) == len(on) == 1 and (on != off) == (name in THINKING)


def test_what_a_run_was_trained_with_is_what_it_is_served_with(write_tiny, write_adapter_for, tmp_path, caplog):
    base = bare(write_tiny, tmp_path / "base", "qwen3")
    for run, template in (("one", "qwen3"), ("two", "qwen2.5")):
        folder = write_adapter_for(tmp_path / run, 1, vocab_size=288, max_position_embeddings=2048)
        tried.tokenizer_with(NAMED[template], folder, *special_of(template))
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
    cases = [
        (tmp_path / "one", {}, None, "qwen3"), (tmp_path / "one", {}, "chatml", "chatml"),
        (base, {}, None, None), (base, {"a": tmp_path / "two"}, None, "qwen2.5"),
        (tmp_path / "one", {"a": tmp_path / "two"}, None, "qwen3"),
    ]  # fmt: skip
    for path, adapters, choice, expected in cases:
        model = ServedModel.open(path, options=OPTIONS, adapters=adapters, chat_template=choice)
        if path == base and not adapters:
            asyncio.run(model.load_adapter("b", tmp_path / "two"))
        model.close()
        assert model.tokenizer.chat_template == (None if expected is None else NAMED[expected])
        assert model.tokenizer.token_id("<|im_end|>") in model.tokenizer.stop_token_ids
    words = "was trained with another chat template than the one it is served with"
    assert [record.getMessage() for record in caplog.records] == [f"b {words}", f"a {words}"]


def test_a_template_that_does_not_fit_is_refused(write_tiny, tmp_path):
    folder = bare(write_tiny, tmp_path / "model", "qwen3")
    with pytest.raises(DataError, match="did you mean qwen3"):
        ServedModel.open(folder, options=OPTIONS, chat_template="qwen33")
    with pytest.raises(DataError, match="<end_of_turn>"):
        ServedModel.open(folder, options=OPTIONS, chat_template="gemma")
