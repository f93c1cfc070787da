"""Tokenizers: the ids that llama.cpp, SentencePiece and transformers give, and the same tokenizer after every save.

The expected ids in data/ were recorded from llama.cpp; data/tokenizers.json says from which build.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from surogate_core.errors import WeightError
from surogate_core.weights.default_model import find_default_model
from surogate_core.weights.gguf_file import GGUFFile, write_gguf_file
from surogate_core.weights.pretokenizers import PRE_TOKENIZERS, recognise
from surogate_core.weights.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
RECORDED = json.loads((DATA / "tokenizers.json").read_text(encoding="utf-8"))["tokenizers"]
SMOLLM2 = json.loads((DATA / "smollm2_ids.json").read_text(encoding="utf-8"))
CUTS = json.loads((DATA / "cuts.json").read_text(encoding="utf-8"))
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


def write_tokenizer(path: Path, metadata: dict) -> Path:
    typed = {
        "tokenizer.ggml.scores": np.float32,
        "tokenizer.ggml.token_type": np.int32,
    }
    values = {key: np.array(value, typed[key]) if key in typed else value for key, value in metadata.items()}
    write_gguf_file(path, {"general.architecture": "llama", **values}, [])
    return path


@pytest.fixture(params=list(RECORDED))
def recorded(request, tmp_path):
    """A small tokenizer of one kind and what llama.cpp makes of some texts with it."""
    entry = RECORDED[request.param]
    metadata = {**entry["metadata"], "tokenizer.chat_template": TEMPLATE}
    return Tokenizer.from_gguf(write_tokenizer(tmp_path / "tokenizer.gguf", metadata)), entry["cases"]


def test_ids_equal_llama_cpp(recorded):
    tokenizer, cases = recorded
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["literal"], case["text"]
        assert tokenizer.plain_encoder()(case["text"]) == case["literal"], case["text"]
        assert tokenizer.encode(case["text"], add_special_tokens=True) == case["full"], case["text"]


def test_offsets_cover_the_text_in_order(recorded):
    tokenizer, cases = recorded
    for case in cases:
        ids, offsets = tokenizer.encode_with_offsets(case["text"])
        assert ids == case["ids"]
        assert offsets == sorted(offsets)
        assert all(start < end for start, end in offsets)
        assert {at for start, end in offsets for at in range(start, end)} == set(range(len(case["text"])))


def test_token_bytes_add_up_to_the_text(recorded):
    tokenizer, cases = recorded
    for case in cases:
        joined = b"".join(map(tokenizer.token_bytes, case["literal"])).decode()
        if tokenizer.encode("a") == tokenizer.encode("a", parse_special=False) and not joined.startswith(" "):
            assert joined == case["text"]
    assert tokenizer.token_bytes(10**6) == b""


def test_an_hf_folder_holds_the_same_tokenizer(recorded, tmp_path):
    tokenizer, cases = recorded
    tokenizer.save_hf(tmp_path / "hf")
    again = Tokenizer.from_hf_folder(tmp_path / "hf")
    for name in ("bos", "eos", "unk", "pad"):
        assert getattr(again, f"{name}_token_id") == getattr(tokenizer, f"{name}_token_id")
    assert again.chat_template == TEMPLATE and again.vocab_size == tokenizer.vocab_size
    for case in cases:
        assert again.encode(case["text"]) == case["ids"]
        assert again.encode(case["text"], add_special_tokens=True) == case["full"]
        assert again.encode_with_offsets(case["text"]) == tokenizer.encode_with_offsets(case["text"])
    again.save_hf(tmp_path / "twice")
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "twice" / file).read_text() == (tmp_path / "hf" / file).read_text(), file


def test_a_gguf_made_from_the_hf_folder_holds_it_too(recorded, tmp_path):
    tokenizer, cases = recorded
    tokenizer.save_hf(tmp_path / "hf")
    for number, source in enumerate((tokenizer, Tokenizer.from_hf_folder(tmp_path / "hf"))):
        metadata = {"general.architecture": "llama", **source.gguf_metadata(vocab_size=tokenizer.vocab_size + 5)}
        write_gguf_file(tmp_path / f"{number}.gguf", metadata, [])
        again = Tokenizer.from_gguf(tmp_path / f"{number}.gguf")
        assert again.vocab_size == tokenizer.vocab_size + 5 and again.chat_template == TEMPLATE
        for case in cases:
            assert again.encode(case["text"], add_special_tokens=True) == case["full"]
            assert again.encode(case["text"], parse_special=False) == case["literal"]


def test_special_tokens_stay_control_tokens_in_a_gguf(recorded, tmp_path):
    tokenizer, _ = recorded
    tokenizer.save_hf(tmp_path)
    metadata = Tokenizer.from_hf_folder(tmp_path).gguf_metadata()
    kind = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist(), strict=True))
    assert (kind["<|eot|>"], kind["<sep>"], kind["e"]) == (3, 4, 1)


def test_transformers_loads_the_saved_folder(recorded, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the comparison with transformers needs it")
    tokenizer, cases = recorded
    tokenizer.save_hf(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_token_id and theirs.bos_token_id == tokenizer.bos_token_id
    assert theirs.chat_template == TEMPLATE
    for case in cases:
        assert theirs(case["text"]).input_ids == case["full"], case["text"]
        assert theirs(case["text"], add_special_tokens=False).input_ids == case["ids"], case["text"]
        assert theirs.decode(case["ids"]) == tokenizer.decode(case["ids"])
        assert theirs.decode(case["ids"], skip_special_tokens=True) == tokenizer.decode(case["ids"], skip_special=True)


@pytest.mark.parametrize("name", list(CUTS))
def test_cuts(name):
    rule = PRE_TOKENIZERS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text, pieces in CUTS[name].items():
        expected = ["".join(part for part, _ in byte_level.pre_tokenize_str(piece)) for piece in pieces]
        assert [piece for piece, _ in rule.build().pre_tokenize_str(text)] == expected


@pytest.mark.parametrize("name", list(PRE_TOKENIZERS))
def test_every_rule_is_recognised_from_its_tokenizer_json(name):
    rule = PRE_TOKENIZERS[name]
    spec = {"model": {"ignore_merges": rule.ignore_merges}, "pre_tokenizer": json.loads(rule.build().__getstate__())}
    if rule.normalizer() is not None:
        spec["normalizer"] = json.loads(rule.normalizer().__getstate__())
    assert PRE_TOKENIZERS[recognise(spec, "here")] == rule


def test_a_rule_without_a_gguf_name_is_refused():
    for step in (pre_tokenizers.Split(Regex("[0-9]{2}"), "isolated"), pre_tokenizers.Whitespace()):
        spec = {"model": {}, "pre_tokenizer": json.loads(step.__getstate__())}
        with pytest.raises(WeightError, match="no name that is known here"):
            recognise(spec, "here")


def smollm2() -> Path:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not here; `surogate fetch-default-model` gets it")
    return path


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2())


def test_smollm2_equals_llama_cpp(real):
    for case in SMOLLM2:
        assert real.encode(case["text"]) == case["ids"], case["text"]
        assert real.encode(case["text"], parse_special=False) == case["literal"], case["text"]
        assert real.decode(case["ids"]) == case["text"]
        assert b"".join(map(real.token_bytes, case["ids"])).decode() == case["text"]
    assert (real.bos_token, real.eos_token, real.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert real.stop_token_ids == (2,) and real.vocab_size == 49152 and "SmolLM" in real.chat_template


def test_smollm2_is_written_to_gguf_as_it_was_read(real, tmp_path):
    write_gguf_file(tmp_path / "x.gguf", {"general.architecture": "llama", **real.gguf_metadata()}, [])
    before, after = GGUFFile(smollm2()), GGUFFile(tmp_path / "x.gguf")
    keys = [key for key in before.metadata if key.startswith("tokenizer.")]
    assert keys == [key for key in after.metadata if key.startswith("tokenizer.")]
    assert all(before.metadata[key] == after.metadata[key] and before.types[key] == after.types[key] for key in keys)


def test_one_character_of_many_bytes_gives_all_its_tokens_its_place(real):
    ids, offsets = real.encode_with_offsets("a 😀b")
    assert offsets[0] == (0, 1) and offsets[-1] == (3, 4) and len(ids) > 3
    assert set(offsets[1:-1]) <= {(1, 2), (1, 3), (2, 3)}


def change(metadata: dict, **values) -> dict:
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    "values,message",
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "my-own"}, "'my-own', which is not known; known: gpt-2"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be a list"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice"),
        ({"token_type": [1, 1]}, "a list of .*, one for each token"),
        ({"merges": None}, "tokenizer.ggml.merges must be a list"),
        ({"merges": ["ab"]}, "merge 'ab' does not join"),
        ({"merges": ["zz yy"]}, "merge 'zz yy' does not join"),
        ({"eos_token_id": 99999}, "eos_token_id is 99999, outside the vocabulary"),
    ],
)
def test_hostile_gguf_tokenizers(tmp_path, values, message):
    path = write_tokenizer(tmp_path / "bad.gguf", change(RECORDED["smollm"]["metadata"], **values))
    with pytest.raises(WeightError, match=message) as caught:
        Tokenizer.from_gguf(path)
    assert "bad.gguf" in str(caught.value)


def test_a_sentencepiece_gguf_needs_a_score_for_each_token(tmp_path):
    path = write_tokenizer(tmp_path / "bad.gguf", change(RECORDED["spm_plain"]["metadata"], scores=[1.0]))
    with pytest.raises(WeightError, match="scores must be a list of"):
        Tokenizer.from_gguf(path)


def test_hf_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(WeightError, match="no tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightError, match="is not a tokenizer"):
        Tokenizer.from_hf_folder(tmp_path)


def test_hf_details_are_read(recorded, tmp_path):
    tokenizer, _ = recorded
    tokenizer.save_hf(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"__type": "AddedToken", "content": "<|eot|>"}
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "chat_template.jinja").unlink()
    again = Tokenizer.from_hf_folder(tmp_path)
    eot = tokenizer.token_id("<|eot|>")
    assert again.eos_token == "<|eot|>" and set(again.stop_token_ids) == {eot, 1, 2}
    assert again.chat_template == "A" and again.chat_templates["tool_use"] == "B"
    again.save_hf(tmp_path / "again")
    assert Tokenizer.from_hf_folder(tmp_path / "again").chat_templates == again.chat_templates
    metadata = again.gguf_metadata()
    written = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    assert written[0] == eot and {*written} - {None} == {eot, 1, 2}
    config["eos_token"] = "<nothing>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match="eos_token is '<nothing>', which tokenizer.json does not know"):
        Tokenizer.from_hf_folder(tmp_path)


def test_padding_and_truncation_in_a_tokenizer_json_do_not_apply(recorded, tmp_path):
    tokenizer, _ = recorded
    tokenizer.save_hf(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The class statement"
    assert Tokenizer.from_hf_folder(tmp_path).encode(text) == tokenizer.encode(text)


def test_an_embedding_smaller_than_the_vocabulary_is_refused(recorded):
    with pytest.raises(WeightError, match="the embedding has 10 rows"):
        recorded[0].gguf_metadata(vocab_size=10)


def test_nfc_is_part_of_qwens_rule():
    assert isinstance(PRE_TOKENIZERS["qwen2"].normalizer(), normalizers.NFC)
