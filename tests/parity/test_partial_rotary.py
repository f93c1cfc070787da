"""Partial rotary embedding. transformers' Llama turns whole heads, so its Phi-3 lends the rotation to compare with."""

from __future__ import annotations

import json

import pytest

from surogate_core.testing.parity import Parity, installed_family, random_reference

transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")


@pytest.fixture
def parity(tmp_path, monkeypatch) -> Parity:
    from transformers.models.llama import modeling_llama
    from transformers.models.phi3 import modeling_phi3

    family = installed_family("llama")
    config = family.tiny_configs()["gqa"]
    reference = random_reference(config, seed=6)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "partial_rotary_factor": 0.5}))
    phi = transformers.Phi3Config(
        hidden_size=64, num_attention_heads=4, pad_token_id=0, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb)
    reference.model.rotary_emb = modeling_phi3.Phi3RotaryEmbedding(phi)
    return Parity.of(family, reference, tmp_path, seed=6)


def test_half_of_each_head_turns(parity):
    assert parity.loaded.hyperparameters.rope_dims == 8
    assert parity.logits_error() < 2e-5
    assert max(parity.gradient_errors().values()) < 1e-4
    prompt = parity.batch.tokens[14:38].tolist()
    text = parity.reference_greedy(prompt, 8)
    assert parity.greedy(prompt, 8) == text and len(set(text)) >= 4
