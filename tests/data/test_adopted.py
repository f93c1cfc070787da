"""A chosen template becomes the tokenizer's: it is saved, and what ends its turns ends answers."""

from __future__ import annotations

import json

import pytest

from surogate_core.data import ChatTemplate, adopt_choice, adopt_saved_template, adopt_template
from surogate_core.errors import DataError
from surogate_core.model.loaded import open_tokenizer
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.tokenizer import Tokenizer, saved_chat_template

TALK = "{% for m in messages %}<a>{{ m.role }} {{ m.content }}<b>\n{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    special = ["<a>", "<b>", "<b>\n", "<end>"]
    return write_byte_tokenizer(tmp_path / "model", special, eos_token="<end>", chat_template="own")


def test_the_template_is_saved_and_its_longest_token_ends_answers(folder, tmp_path):
    tokenizer = Tokenizer.from_hf_folder(folder)
    assert tokenizer.stop_token_ids == (tokenizer.token_id("<end>"),) and saved_chat_template(folder) == "own"
    adopt_template(ChatTemplate(TALK), tokenizer)
    assert tokenizer.chat_template == TALK
    assert tokenizer.stop_token_ids == (tokenizer.token_id("<end>"), tokenizer.token_id("<b>"))
    tokenizer.save_hf(tmp_path / "run")
    assert saved_chat_template(tmp_path / "run") == TALK
    metadata = tokenizer.gguf_metadata()
    assert metadata["tokenizer.chat_template"] == TALK
    assert metadata["tokenizer.ggml.eot_token_id"] == tokenizer.token_id("<b>")
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.token_id("<end>")


def test_a_choice_is_a_name_a_file_or_what_the_tokenizer_has(folder, tmp_path):
    tokenizer = Tokenizer.from_hf_folder(folder)
    adopt_choice("tokenizer_default", tokenizer, {})  # its turns end in no token, which is its own affair
    assert tokenizer.chat_template == "own"
    adopt_choice("talk", tokenizer, {"talk": TALK})
    assert tokenizer.chat_template == TALK
    (tmp_path / "other.jinja").write_text(TALK.replace("<a>", ""))
    adopt_choice(str(tmp_path / "other.jinja"), tokenizer, {})
    assert tokenizer.chat_template == TALK.replace("<a>", "")
    with pytest.raises(DataError, match="did you mean talk"):
        adopt_choice("talc", tokenizer, {"talk": TALK})


def test_a_model_takes_over_what_its_adapter_was_trained_with(folder, tmp_path):
    trained, base = Tokenizer.from_hf_folder(folder), Tokenizer.from_hf_folder(folder)
    adopt_template(ChatTemplate(TALK), trained)
    trained.save_hf(tmp_path / "run")
    adopt_saved_template(tmp_path / "run", base)
    assert (base.chat_template, base.stop_token_ids) == (TALK, trained.stop_token_ids)
    (tmp_path / "bare").mkdir()
    adopt_saved_template(tmp_path / "bare", base)  # an adapter that has none
    assert base.chat_template == TALK


def test_a_template_whose_turns_end_in_no_token_is_refused(folder, tmp_path):
    tokenizer = Tokenizer.from_hf_folder(folder)
    chatml = TALK.replace("<b>", "<|im_end|>")
    with pytest.raises(DataError, match=r"ends a turn with '<\|im_end\|>', which is no token"):
        adopt_template(ChatTemplate(chatml), tokenizer)
    assert tokenizer.chat_template == "own"
    adopt_template(ChatTemplate(TALK.replace("<b>", "")), tokenizer)  # no end at all: training ends the answer with EOS
    assert tokenizer.stop_token_ids == (tokenizer.token_id("<end>"),)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "tokenizer_config.json").write_text(json.dumps({"chat_template": chatml}))
    adopt_saved_template(tmp_path / "foreign", tokenizer)  # what others trained is used as it is
    assert tokenizer.chat_template == chatml


@pytest.mark.parametrize(("template", "ends"), [
    (TALK, ["<end>", "<b>"]),
    (TALK.replace("<b>", "\n<b>"), ["<end>"]),  # the line break before is what a model writes first
    (TALK.replace("<b>", ""), ["<end>"]),
    ("{% for", ["<end>"]),  # refused where it is used
])  # fmt: skip
def test_what_ends_the_turns_of_a_models_own_template_ends_answers(tmp_path, template, ends):
    write_byte_tokenizer(tmp_path, ["<a>", "<b>", "<end>"], eos_token="<end>", chat_template=template)
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.stop_token_ids == tuple(map(tokenizer.token_id, ends))
    assert tokenizer.chat_template == template
