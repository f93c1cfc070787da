"""GGUF files from here in llama.cpp: they load, and give the same logits and the same greedy text."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from surogate_core.export import export
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, document_ranges, installed_family, random_reference, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
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


def agree_until_a_tie(ours: list[int], theirs: list[int], gaps: list[float], tolerance: float) -> None:
    """Equal ids, up to a step whose two largest logits are nearer to each other than the engines are."""
    for step, (a, b, gap) in enumerate(zip(ours, theirs, gaps, strict=True)):
        if gap < tolerance:
            return
        assert a == b, f"step {step}: {a} here, {b} in llama.cpp, whose two largest logits are {gap} apart"


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
    replies = llama_cpp.ask([question(parity, path) for path in paths.values()], tmp_path)
    for (dtype, path), reply in zip(paths.items(), replies):
        ours = Parity(path, None, LoadedModel.open(path, [parity.loaded.family]), parity.batch)
        error = relative_error(ours.logits(), reply["logits"])
        assert error < DTYPES[dtype], (dtype, error)
        tolerance = 2 * float(np.abs(ours.logits() - reply["logits"]).max())
        text = ours.greedy(parity.batch.tokens[14:38].tolist(), GREEDY)
        agree_until_a_tie(text, reply["greedy"][0], reply["gaps"][0], tolerance)
