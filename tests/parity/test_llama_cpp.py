"""GGUF files from here in llama.cpp: they load, and give the same logits and the same greedy text."""

from __future__ import annotations


import numpy as np
import pytest

from surogate_core.export import export
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, document_ranges, installed_family, random_reference, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.tokenizer import Tokenizer

VOCAB = 288
GREEDY = 16
# Released Llama 3.1 parameters, with heads wide enough for its three ranges of wavelengths.
LLAMA3 = {"head_dim": 32, "rope_parameters": {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}}  # fmt: skip
DTYPES = {"f16": 2e-3, "bf16": 3e-2} | dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"), 0.12)
"""Format of the file -> how far llama.cpp's logits may be from ours: its products round activations to the weight's kind."""
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("Ġ", "t"), ("e", "r"), ("Ċ", "Ċ")]
TEXTS = ["the other thing", "  then\n\n\tin there's 1234 things!", "naïve café – 日本 😀", "<s>not the </s> start", ""]


def checkpoint(folder, changes, family: str = "llama") -> Parity:
    chosen = installed_family(family)
    base = next(iter(chosen.tiny_configs().values()))
    reference = random_reference({**base, "vocab_size": VOCAB, **changes}, seed=3)
    reference.save_pretrained(folder)
    write_byte_tokenizer(folder, ["<s>", "</s>"], merges=MERGES, bos_token="<s>", eos_token="</s>")
    return Parity.of(chosen, reference, folder, seed=3)


def question(parity: Parity, path) -> dict:
    documents = [parity.batch.tokens[part].tolist() for part in document_ranges(parity.batch)]
    return {"model": path, "logits": documents, "greedy": [[documents[2], GREEDY]],
            "tokenize": [[text, special] for text in TEXTS for special in (False, True)]}


def agree_until_a_tie(ours: list[int], theirs: list[int], gaps: list[float], tolerance: float) -> None:
    """Equal ids, up to a step whose two largest logits are nearer to each other than the engines are."""
    for step, (a, b, gap) in enumerate(zip(ours, theirs, gaps, strict=True)):
        if gap < tolerance:
            return
        assert a == b, f"step {step}: {a} here, {b} in llama.cpp, whose two largest logits are {gap} apart"


@pytest.fixture(scope="module")
def variants(llama_cpp, tmp_path_factory):
    """Every variant of Llama exported in f32, and llama.cpp's answers to all of them."""
    scratch = tmp_path_factory.mktemp("variants")
    changes = dict(installed_family("llama").tiny_configs())
    changes["llama3_rope"] = {**changes["llama3_rope"], **LLAMA3}
    held = {}
    for name, config in changes.items():
        held[name] = checkpoint(scratch / name, {**config, "vocab_size": VOCAB})
        export(scratch / name, scratch / f"{name}.gguf", "f32")
    replies = llama_cpp.ask([question(parity, scratch / f"{name}.gguf") for name, parity in held.items()], scratch)
    return {name: (parity, scratch / f"{name}.gguf", reply) for (name, parity), reply in zip(held.items(), replies)}


def test_logits_and_text_of_every_variant_equal_llama_cpps(variants):
    for name, (parity, path, reply) in variants.items():
        ours = parity.logits()
        error = relative_error(ours, reply["logits"])
        assert error < 1e-4, (name, error)
        text = parity.greedy(parity.batch.tokens[14:38].tolist(), GREEDY)
        agree_until_a_tie(text, reply["greedy"][0], reply["gaps"][0], 1e-3)
        read_back = Parity(path, None, LoadedModel.open(path, [parity.loaded.family]), parity.batch)
        assert relative_error(read_back.logits(), ours) < 1e-5, name


def test_exported_tokenizer_cuts_as_before(variants):
    for parity, path, reply in variants.values():
        tokenizer = Tokenizer.from_hf_folder(parity.folder)
        expected = [tokenizer.encode(text, parse_special=special) for text in TEXTS for special in (False, True)]
        assert reply["tokenize"] == expected
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
