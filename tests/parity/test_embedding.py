"""GGUF files of models that make vectors, in llama.cpp: they load, and texts get the same vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.export import export, write_folder
from surogate_core.model import FrozenWeights, LoadedModel, initial_values, loss_program
from surogate_core.passes import RECIPES
from surogate_core.testing.parity import installed_family, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.embedding import Dense, Embedding, shaped
from surogate_core.weights.tensor import from_f32
from surogate_core.weights.tokenizer import Tokenizer

RNG = np.random.default_rng(2)
LENGTHS = (13, 1, 40)
BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
}


def dense(out: int, into: int) -> Dense:
    return Dense(from_f32("w", RNG.standard_normal((out, into)).astype(np.float32)))


# llama.cpp knows of EmbeddingGemma which layers are local, and how they are rotated.
CASES = {
    "gemma-embedding": ({**BASE, "num_hidden_layers": 6, "query_pre_attn_scalar": 16, "sliding_window": 9,
                         "use_bidirectional_attention": True}, Embedding("mean", (dense(96, 64), dense(64, 96)))),
    "qwen3": ({**BASE, "num_hidden_layers": 2}, Embedding("last")),
}


def write_gguf(name: str, folder: Path) -> Path:
    """A random model of a family that an installed plugin has, with its vectors, exported."""
    family, (config, embedding) = installed_family(name), CASES[name]
    h = family.from_hf({"architectures": list(family.architectures[:1]), **config})
    parameters = {}
    for each, parameter in family.model(h).parameters():
        array = initial_values(each, parameter.shape, parameter, 7)
        scale = 1.5 / (0.02 * parameter.shape[-1] ** 0.5)
        parameters[each] = from_f32(each, array * np.float32(scale) if array.ndim > 1 else array)
    write_byte_tokenizer(folder, num_bytes=160)
    model = LoadedModel(family, h, None, None, embedding)
    write_folder(model, parameters, folder, Tokenizer.from_hf_folder(folder), "f32")
    export(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def vectors(path: Path, texts: list[list[int]]) -> np.ndarray:
    """float32 [texts, dim], all in one run."""
    model = LoadedModel.open(path, [installed_family(path.parent.name)])
    weights, total = FrozenWeights(model, "f32"), sum(map(len, texts))
    graph, program = loss_program(
        model, RECIPES["fp32"], weights, {"T": total, "D": len(texts) + 1}, max_positions=64, output="hidden")
    session = weights.open_session(graph, program, threads=1)
    starts = np.cumsum([0, *map(len, texts)])
    session.write("tokens", np.concatenate(texts).astype(np.int32))
    session.write("positions", np.concatenate([np.arange(len(text)) for text in texts]).astype(np.int32))
    session.write("doc_starts", starts.astype(np.int32))
    session.run("forward")
    states = np.split(session.read("hidden"), starts[1:-1])
    is_mean = model.embedding.pooling == "mean"
    pooled = np.stack([each.mean(axis=0) if is_mean else each[-1] for each in states])
    return shaped(model.embedding.finished(pooled), None, True)


@pytest.mark.parametrize("name", CASES)
def test_vectors_of_llama_cpp(name, llama_cpp, tmp_path):
    path = write_gguf(name, tmp_path / name)
    texts = [RNG.integers(0, 160, length).tolist() for length in LENGTHS]
    (reply,) = llama_cpp.ask([{"model": path, "embed": texts}], tmp_path)
    theirs = shaped(np.array(reply["embed"], np.float32), None, True)
    ours = vectors(path, texts)
    assert relative_error(ours, theirs) < 1e-3  # llama.cpp looks gelu up in a table of float16
    assert min(np.linalg.norm(theirs[i] - theirs[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1
