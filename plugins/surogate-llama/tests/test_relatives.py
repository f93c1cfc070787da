"""Llama's published relatives: what they leave out and refuse, and the arithmetic of the one without a variant."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, random_reference
from surogate_core.weights.export import write_gguf
from surogate_llama.families import FAMILIES
from surogate_llama.tiny import CWM, ERNIE, GRANITE, HELIUM, IQUESTCODER, LLAMA, MINISTRAL, SMOLLM3

BY_NAME = {family.name: family for family in FAMILIES}
MINICPM = {**LLAMA, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4,
           "dim_model_base": 16, "hidden_act": "silu"}
TINY = {"smollm3": SMOLLM3, "granite": GRANITE, "ministral": MINISTRAL, "cwm": CWM, "iquestcoder": IQUESTCODER,
        "minicpm": MINICPM, "ernie4_5": ERNIE, "helium": HELIUM}
_WRITTEN_ALWAYS = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                   "num_attention_heads", "head_dim")


def transformers_config(config):
    transformers = pytest.importorskip("transformers", reason="compares with transformers: install the extra `test`")
    return transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})


@pytest.mark.parametrize("name", [name for name in TINY if name != "minicpm"])
def test_what_config_json_leaves_out_is_what_transformers_takes(name):
    short = {key: value for key, value in TINY[name].items() if key in _WRITTEN_ALWAYS}
    short |= {"num_hidden_layers": 8, "num_attention_heads": 8} | ({"num_key_value_heads": 8} if name == "helium" else {})
    theirs, ours = transformers_config(short), BY_NAME[name].from_hf(short)
    assert ours.num_kv_heads == theirs.num_key_value_heads and ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings and ours.tied == theirs.tie_word_embeddings
    assert ours.rope_base == theirs.rope_parameters["rope_theta"] and ours.init_std == theirs.initializer_range
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    sliding = [kind.startswith("window") for kind in ours.kinds]
    assert sliding == [each == "sliding_attention" for each in getattr(theirs, "layer_types", None) or ["full"] * 8]
    assert ours.window == (theirs.sliding_window if any(sliding) else 0)
    assert [int("nope" not in kind) for kind in ours.kinds] == getattr(theirs, "no_rope_layers", [1] * 8)
    assert (ours.qkv_bias, ours.out_bias, ours.mlp_bias) == (False, False, False)
    scales = (ours.embed_scale, ours.residual_scale, ours.logit_divisor, ours.attention_scale)
    assert scales == ((1.0, 1.0, 1.0, theirs.attention_multiplier) if name == "granite" else (1.0, 1.0, 1.0, None))
    assert BY_NAME[name].from_hf(BY_NAME[name].hf_config(ours)) == ours


@pytest.mark.parametrize(("name", "change", "says"), [
    ("smollm3", {"no_rope_layers": [1]}, "not a 0 or 1 for each of 2 layers"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "not a 0 or 1"),
    ("smollm3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "no sliding_window is set"),
    ("smollm3", {"layer_types": ["full_attention"]}, "names 1 layers"),
    ("ministral", {"sliding_window": None}, "no sliding_window is set and in use"),
    ("ministral", {"layer_types": ["full_attention", "chunked_attention"]}, "has 'chunked_attention'"),
    ("ministral", {"attention_bias": True}, "attention_bias is True"),
    ("granite", {"residual_multiplier": "1"}, "residual_multiplier is '1'"),
    ("granite", {"sliding_window": 128}, "sliding_window is 128"),
    ("cwm", {"attention_bias": True}, "attention_bias is True"),
    ("iquestcoder", {"clip_qkv": 6.0}, "clip_qkv is 6.0"),
    ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse_config is"),
    ("minicpm", {"num_experts": 8}, "num_experts is 8"),
    ("minicpm", {"mlp_bias": True}, "mlp_bias is True"),
    ("minicpm", {"scale_depth": None}, "lacks 'scale_depth'"),
])  # fmt: skip
def test_refused_by_name(name, change, says):
    with pytest.raises(WeightError, match=says):
        BY_NAME[name].from_hf({**TINY[name], **change})


@pytest.mark.parametrize(("name", "change", "says"), [
    ("smollm3", {"no_rope_layers": [1, 0]}, "architecture 'smollm3' cannot say"),
    ("cwm", {}, "architecture 'llama' cannot say"),
])
def test_no_gguf_for_layers_that_it_cannot_tell_apart(name, change, says):
    family = BY_NAME[name]
    with pytest.raises(WeightError, match=says):
        family.gguf_metadata(family.from_hf({**TINY[name], **change}))


def agree(parity: Parity) -> None:
    assert parity.logits_error() < 2e-5
    errors = parity.gradient_errors()
    assert errors.pop("loss") < 1e-6 and max(errors.values()) < 1e-4
    prompt = parity.batch.tokens[14:38].tolist()
    assert parity.greedy(prompt, 8) == parity.reference_greedy(prompt, 8)


def test_the_window_of_cwm_is_left_out_in_every_fourth_layer(tmp_path):
    """Five layers, which its variant is too small for."""
    parity = Parity.make(BY_NAME["cwm"], {**CWM, "num_hidden_layers": 5}, tmp_path, seed=5)
    agree(parity)
    kinds = parity.loaded.hyperparameters.kinds
    assert len(set(kinds)) == 2 and kinds[0] == kinds[4] and len({*kinds[1:4]}) == 1


@pytest.mark.parametrize("name", ["iquestcoder", "helium"])
def test_a_gguf_of_architecture_llama_is_the_same_model_as_llama(tmp_path, name):
    parity = Parity.make(BY_NAME[name], TINY[name], tmp_path, seed=5)
    family, h = parity.loaded.family, parity.loaded.hyperparameters
    parameters = {each: parity.loaded.names.load(parity.loaded.store, each) for each, _ in parity.loaded.dsl().parameters()}
    write_gguf(tmp_path / "m.gguf", family.gguf_names(h).export(parameters), family.gguf_metadata(h), dtype="f32")
    ours, parity.loaded = parity.logits(), LoadedModel.open(tmp_path / "m.gguf", FAMILIES)
    assert parity.loaded.family.name == "llama"
    np.testing.assert_allclose(parity.logits(), ours, rtol=1e-5, atol=1e-5)


@pytest.fixture
def minicpm(tmp_path) -> Parity:
    """transformers' Granite with the multipliers of MiniCPM (arXiv:2404.06395), and its files under MiniCPM's names."""
    config = {**GRANITE, "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 64 / 16,
              "attention_multiplier": 16**-0.5, "tie_word_embeddings": True}
    reference = random_reference(config, seed=7)
    reference.save_pretrained(tmp_path)
    plain = {key: value for key, value in MINICPM.items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps({**plain, "rope_theta": 10000.0, "mup_denominator": 32}))
    return Parity.of(BY_NAME["minicpm"], reference, tmp_path, seed=7)


def test_minicpm_is_llama_with_three_multipliers(minicpm):
    assert minicpm.loaded.hyperparameters.tied
    agree(minicpm)
