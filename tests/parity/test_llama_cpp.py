"""GGUF files from here in llama.cpp: they load, and give the same logits and the same greedy text."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from surogate_core.export import export
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, document_ranges, installed_family, random_reference, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.export import write_gguf
from surogate_core.weights.tensor import from_f32
from surogate_core.weights.tokenizer import Tokenizer

from .variants import gguf_cases

VOCAB = 288
GREEDY = 16
UNLIKE_LLAMA_CPP = {("mistral", "window"): "llama.cpp does not look at the window of a file of architecture llama"}
CASES = [case for case in gguf_cases() if case not in UNLIKE_LLAMA_CPP]
DTYPES = {"f16": 2e-3, "bf16": 3e-2} | dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"), 0.12)
"""Format of the file -> how far llama.cpp's logits may be from ours: its products round activations to the weight's kind."""
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("Ġ", "t"), ("e", "r"), ("Ċ", "Ċ")]
TEXTS = ["the other thing", "  then\n\n\tin there's 1234 things!", "naïve café – 日本 😀", "<s>not the </s> start", ""]


def checkpoint(folder, changes) -> Parity:
    chosen = installed_family("llama")
    base = next(iter(chosen.tiny_configs().values()))
    reference = random_reference({**base, "vocab_size": VOCAB, **changes}, seed=3)
    reference.save_pretrained(folder)
    write_byte_tokenizer(folder, ["<s>", "</s>"], merges=MERGES, bos_token="<s>", eos_token="</s>")
    return Parity.of(chosen, reference, folder, seed=3)


def question(parity: Parity, path) -> dict:
    documents = [parity.batch.tokens[part].tolist() for part in document_ranges(parity.batch)]
    return {"model": path, "logits": documents, "greedy": [[documents[2], GREEDY]]}


def agree_until_a_tie(
    ours: list[int], theirs: list[int], gaps: list[float], tolerance: float, at_least: int = GREEDY // 2,
) -> int:
    """How many ids are equal: ``at_least`` so many, and all of them up to a step whose two largest logits are nearer to each
    other than the engines are. A text of few different ids would prove little: half of its ids have to be different."""
    assert len(set(theirs)) >= len(theirs) // 2, theirs
    equal = next((step for step, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    assert equal == len(ours) or gaps[equal] < tolerance, (
        f"step {equal}: {ours[equal]} here, {theirs[equal]} in llama.cpp, whose two largest logits are {gaps[equal]} apart")
    assert equal >= at_least, (ours, theirs)
    return equal


@pytest.fixture(scope="module")
def replies(llama_cpp, gguf_of, tmp_path_factory) -> dict:
    """llama.cpp's answers to the files of all variants, from one process. A variant that cannot be written has none."""
    asked = {}
    for case in CASES:
        with suppress(Exception):
            held = gguf_of(case)
            asked[case] = question(held.parity, held.path)
    answers = llama_cpp.try_asking(list(asked.values()), tmp_path_factory.mktemp("replies"))
    return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_and_text_equal_llama_cpps(gguf_of, replies, case):
    parity, reply = gguf_of(case).parity, replies[case]
    assert "error" not in reply, reply["error"]
    config, ours = parity.reference.config, parity.logits()
    is_gelu = "gelu" in (getattr(config, "hidden_activation", None) or config.hidden_act)
    # llama.cpp looks GELU up in a table of half-precision numbers.
    assert relative_error(ours, reply["logits"]) < (5e-3 if is_gelu else 1e-4)
    text = parity.greedy(parity.batch.tokens[14:38].tolist(), GREEDY)
    tolerance = 2 * float(np.abs(ours - reply["logits"]).max())
    agree_until_a_tie(text, reply["greedy"][0], reply["gaps"][0], max(tolerance, 1e-3))


def characters_and_merges() -> dict[str, Any]:
    """Metadata of a tokenizer of characters, bytes for the others, and merges in order: the kind that Gemma 4's files have."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("i", "n"), ("in", "g"), ("▁", "t"), ("e", "r"), ("o", "the"),
              ("othe", "r"), ("▁", "▁"), ("▁▁", "▁")]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghinorst'1234"]
    tokens += dict.fromkeys(left + right for left, right in merges)
    types = [3, 3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 260)
    start = "tokenizer.ggml."
    return {
        start + "model": "gemma4", start + "tokens": tokens, start + "token_type": np.array(types, np.int32),
        start + "scores": np.zeros(len(tokens), np.float32), start + "merges": [" ".join(merge) for merge in merges],
        start + "bos_token_id": 2, start + "eos_token_id": 1, start + "unknown_token_id": 3, start + "padding_token_id": 0,
        start + "add_space_prefix": False, start + "add_bos_token": True,
    }


def test_a_tokenizer_of_characters_and_merges_cuts_as_llama_cpps(llama_cpp, tmp_path):
    metadata = characters_and_merges()
    family = installed_family("gemma4_unified_text")
    changes = {"vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    h = family.from_hf({**family.tiny_configs()["keys_are_values"], **changes})
    zeros = {name: from_f32(name, np.zeros(parameter.shape, np.float32)) for name, parameter in family.model(h).parameters()}
    extra = {name: from_f32(name, array) for name, array in family.gguf_extra_tensors(h).items()}
    path, texts = tmp_path / "model.gguf", [*TEXTS, "   the   tin", "other\n\n\nings the", "the<eos>there"]
    write_gguf(path, {**family.gguf_names(h).export(zeros), **extra}, {**family.gguf_metadata(h), **metadata}, dtype="f32")
    asked = [[text, special] for text in texts for special in (False, True)]
    [reply] = llama_cpp.ask([{"model": path, "tokenize": asked}], tmp_path)
    tokenizer = Tokenizer.from_gguf(path)
    assert reply["tokenize"] == [tokenizer.encode(text, parse_special=special) for text, special in asked]
    assert reply["add_bos"] and tokenizer.encode("the", add_special_tokens=True)[0] == 2
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts[:3]] == texts[:3]


def test_exported_tokenizer_cuts_as_before(llama_cpp, tmp_path):
    parity = checkpoint(tmp_path / "model", {})
    export(parity.folder, tmp_path / "model.gguf", "f32")
    texts = [[text, special] for text in TEXTS for special in (False, True)]
    [reply] = llama_cpp.ask([{"model": tmp_path / "model.gguf", "tokenize": texts}], tmp_path)
    tokenizer = Tokenizer.from_hf_folder(parity.folder)
    assert reply["tokenize"] == [tokenizer.encode(text, parse_special=special) for text, special in texts]
    assert reply["add_bos"] is False


def test_quantised_exports_answer(llama_cpp, tmp_path):
    parity = checkpoint(tmp_path / "model", {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": True})
    paths = {dtype: tmp_path / f"{dtype}.gguf" for dtype in DTYPES}
    for dtype, path in paths.items():
        export(tmp_path / "model", path, dtype)
    replies, equal = llama_cpp.ask([question(parity, path) for path in paths.values()], tmp_path), {}
    for (dtype, path), reply in zip(paths.items(), replies):
        ours = Parity(path, None, LoadedModel.open(path, [parity.loaded.family]), parity.batch)
        error = relative_error(ours.logits(), reply["logits"])
        assert error < DTYPES[dtype], (dtype, error)
        tolerance = 2 * float(np.abs(ours.logits() - reply["logits"]).max())
        text = ours.greedy(parity.batch.tokens[14:38].tolist(), GREEDY)
        equal[dtype] = agree_until_a_tie(text, reply["greedy"][0], reply["gaps"][0], tolerance, at_least=0)
    # With blocks llama.cpp multiplies activations of eight bits: a text may part from ours early, but not those of all formats.
    assert min(equal["f16"], equal["bf16"]) >= GREEDY // 2, equal
    assert sum(equal.values()) >= len(equal) * GREEDY // 2, equal
