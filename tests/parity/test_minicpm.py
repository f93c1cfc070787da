"""MiniCPM, which transformers does not have, in llama.cpp: multipliers, and rotary factors for short and long contexts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.export import export
from surogate_core.testing.parity import Parity, installed_family, random_reference, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer

from .test_llama_cpp import GREEDY, agree_until_a_tie, question

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0]}
ORIGINAL = {"short": 512, "long": 16}
"""First contexts that neither, and both, of a program of 48 positions and a llama.cpp context of 256 go beyond."""


def checkpoint(folder, original: int) -> Parity:
    """Weights of a random Granite, whose shapes are the same, under a config.json of MiniCPM."""
    family, base = installed_family("minicpm"), installed_family("granite").tiny_configs()["multipliers"]
    random_reference({**base, "tie_word_embeddings": True}, seed=9).save_pretrained(folder)
    kept = {key: value for key, value in base.items() if "multiplier" not in key and "scaling" not in key}
    config = {**kept, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "tie_word_embeddings": True,
              "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "rope_theta": 1000.0,
              "max_position_embeddings": 1024,
              "rope_scaling": {**LONGROPE, "original_max_position_embeddings": original}}
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder, num_bytes=base["vocab_size"] - 1, merges=[("t", "h")])
    return Parity.of(family, None, folder, seed=9)


def test_logits_and_text_equal_llama_cpps(llama_cpp, tmp_path):
    held = {name: checkpoint(tmp_path / name, original) for name, original in ORIGINAL.items()}
    for name, parity in held.items():
        export(parity.folder, tmp_path / f"{name}.gguf", "f32")
    questions = [question(parity, tmp_path / f"{name}.gguf") for name, parity in held.items()]
    ours = {}
    for (name, parity), reply in zip(held.items(), llama_cpp.ask(questions, tmp_path), strict=True):
        ours[name] = parity.logits()
        assert relative_error(ours[name], reply["logits"]) < 1e-4, name
        text = parity.greedy(parity.batch.tokens[14:38].tolist(), GREEDY)
        tolerance = 2 * float(np.abs(ours[name] - reply["logits"]).max())
        agree_until_a_tie(text, reply["greedy"][0], reply["gaps"][0], max(tolerance, 1e-3))
    assert np.abs(ours["short"] - ours["long"]).max() > 0.01 * np.abs(ours["short"]).max()


@pytest.mark.parametrize("name", ORIGINAL)
def test_through_gguf_and_back(tmp_path, name):
    parity = checkpoint(tmp_path / "first", ORIGINAL[name])
    export(tmp_path / "first", tmp_path / "model.gguf", "f32")
    export(tmp_path / "model.gguf", tmp_path / "second", "f32")
    again = Parity.of(installed_family("minicpm"), None, tmp_path / "second", seed=9)
    np.testing.assert_allclose(again.logits(), parity.logits(), rtol=1e-5, atol=1e-5)
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("first", "second"))
    assert {key: after[key] for key in ("scale_emb", "scale_depth", "dim_model_base", "architectures")} == {
        key: before[key] for key in ("scale_emb", "scale_depth", "dim_model_base", "architectures")}
