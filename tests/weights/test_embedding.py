"""What checkpoints say of vectors: sentence-transformers' folders and GGUF files, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.weights.embedding import Dense, Embedding, shaped
from surogate_core.weights.gguf_embedding import read_gguf_embedding, write_gguf_embedding
from surogate_core.weights.gguf_file import write_gguf_file
from surogate_core.weights.sentence_transformers import read_modules, write_modules
from surogate_core.weights.store import WeightStore
from surogate_core.weights.tensor import from_f32

RNG = np.random.default_rng(3)


def dense(out: int, into: int, bias: bool = False) -> Dense:
    weight = from_f32("weight", RNG.standard_normal((out, into)).astype(np.float32))
    return Dense(weight, from_f32("bias", RNG.standard_normal(out).astype(np.float32)) if bias else None)


FULL = Embedding("last", (dense(12, 8, True), dense(6, 12)), False, (), {"query": "find: ", "none": ""}, "query", 77)


def described(embedding: Embedding) -> tuple[Any, ...]:
    return (embedding.pooling, embedding.normalized, embedding.prompts, embedding.default_prompt, embedding.max_tokens)


@pytest.mark.parametrize("embedding", [Embedding(), Embedding("cls"), FULL], ids=["mean", "cls", "full"])
def test_a_folder_reads_as_it_was_written(tmp_path, embedding):
    write_modules(tmp_path, embedding, 8, "f32")
    again = read_modules(tmp_path)
    assert described(again) == described(embedding)
    pooled = RNG.standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(again.checked(8, "here").finished(pooled), embedding.finished(pooled))


def test_dense_layers_are_applied_in_order():
    pooled = RNG.standard_normal((3, 8)).astype(np.float32)
    first, second = FULL.dense
    expected = (pooled @ first.weight.data.T + first.bias.data) @ second.weight.data.T
    np.testing.assert_allclose(FULL.finished(pooled), expected, atol=1e-5)
    assert np.array_equal(FULL.finished(pooled)[1:2], FULL.finished(pooled[1:2]))  # to the bit, whatever is beside it
    assert FULL.width(8) == 6 and FULL.with_sizes([100, 4, 2], 8).sizes == (6, 4, 2)


def test_vectors_are_cut_before_they_are_normalised():
    vectors = np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 5.0]], np.float32)
    np.testing.assert_allclose(shaped(vectors, 2, True), [[0.6, 0.8], [0.0, 0.0]], atol=1e-7)
    assert np.array_equal(shaped(vectors, None, False), vectors)


def test_newer_spellings(tmp_path):
    """Types lie elsewhere in newer versions, and pooling has one key; a folder without modules says nothing."""
    assert read_modules(tmp_path) is None
    write_modules(tmp_path, Embedding(), 8, "f32")
    modules = json.loads((tmp_path / "modules.json").read_text())
    for module in modules:
        module["type"] = module["type"].replace(".models.", ".sentence_transformer.models.")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 8, "pooling_mode": "lasttoken"}))
    assert read_modules(tmp_path).pooling == "last"


def _change(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


@pytest.mark.parametrize(("file", "change", "says"), [
    ("modules.json", lambda m: [m[0], m[2], m[1], *m[3:]], "the modules are Transformer, Dense, Pooling"),
    ("modules.json", lambda m: [*m[:2], {**m[2], "type": "sentence_transformers.models.LSTM"}], "LSTM"),
    ("modules.json", lambda m: [*m[:2], {**m[2], "path": "../2_Dense"}], "outside the folder"),
    ("modules.json", lambda m: {"modules": m}, "must hold a list"),
    ("modules.json", lambda m: [*m, "Normalize"], "is no module"),
    ("1_Pooling/config.json", lambda c: {**c, "pooling_mode_max_tokens": True}, "lasttoken and pooling_mode_max_tokens"),
    ("1_Pooling/config.json", lambda c: {"pooling_mode": "max"}, "pooling is max"),
    ("1_Pooling/config.json", lambda c: {**c, "include_prompt": False}, "include_prompt is false"),
    ("2_Dense/config.json", lambda c: {**c, "activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh"),
    ("3_Dense/config.json", lambda c: {**c, "bias": True}, "linear.bias"),
    ("sentence_bert_config.json", lambda c: {**c, "do_lower_case": True}, "do_lower_case"),
    ("config_sentence_transformers.json", lambda c: {"prompts": ["query"]}, "texts by name"),
])
def test_what_would_change_the_vectors_is_refused(tmp_path, file, change, says):
    write_modules(tmp_path, FULL, 8, "f32")
    _change(tmp_path / file, change)
    with pytest.raises(WeightError, match=says):
        read_modules(tmp_path)


def test_layers_that_do_not_fit():
    with pytest.raises(WeightError, match="dense layer 1 has shape .12, 8., but 9 values come in"):
        FULL.checked(9, "here")
    with pytest.raises(WeightError, match="no prompt 'other'"):
        Embedding(prompts={"query": ""}, default_prompt="other").checked(8, "here")


def store_of(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> WeightStore:
    all_tensors = [from_f32("x", np.zeros(2, np.float32)), *tensors.values()]
    write_gguf_file(path, {"general.architecture": "any", **metadata}, all_tensors)
    return WeightStore.open(path)


@pytest.mark.parametrize("embedding", [Embedding("cls"), Embedding("mean", (dense(12, 8), dense(8, 12)))], ids=["cls", "dense"])
def test_a_gguf_reads_as_it_was_written(tmp_path, embedding):
    again = read_gguf_embedding(store_of(tmp_path / "x.gguf", *write_gguf_embedding(embedding, "any")))
    assert described(again) == described(embedding)
    pooled = RNG.standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(again.finished(pooled), embedding.finished(pooled))


def test_what_a_gguf_cannot_say(tmp_path):
    assert read_gguf_embedding(store_of(tmp_path / "none.gguf", {}, {})) is None
    with pytest.raises(WeightError, match="pooling_type is 4"):
        read_gguf_embedding(store_of(tmp_path / "rank.gguf", {"any.pooling_type": 4}, {}))
    for embedding, says in (
        (Embedding(normalized=False), "not normalised"),
        (Embedding(prompts={"a": "b"}, default_prompt="a"), "its prompt 'a'"),
        (Embedding(dense=(dense(4, 8),)), "two dense layers"),
    ):
        with pytest.raises(WeightError, match=says):
            write_gguf_embedding(embedding, "any")
