"""config.json, names and GGUF metadata of Qwen: every setting is used, or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, random_reference
from surogate_core.weights.export import write_gguf, write_hf
from surogate_core.weights.tensor import from_f32
from surogate_qwen.family import FAMILIES
from surogate_qwen.presets import PRESETS
from surogate_qwen.tiny import QWEN2, QWEN3, YARN_ROPE

QWEN2_FAMILY, QWEN3_FAMILY = FAMILIES
WHY = "compares with transformers: pip install 'surogate-core[test]'"


def write_gguf_of(path, family, config, **changes):
    """A random model in a GGUF file. changes: of its metadata, and of its tensors by name ("blk.0.attn_q.bias")."""
    h = family.from_hf(config)
    generator = np.random.default_rng(0)
    tensors = dict(family.gguf_names(h).export({
        name: from_f32(name, generator.normal(0, 0.1, parameter.shape).astype(np.float32))
        for name, parameter in family.model(h).parameters()
    }))
    tensors |= {name: from_f32(name, value) for name, value in changes.items() if isinstance(value, np.ndarray)}
    metadata = family.gguf_metadata(h) | {key: value for key, value in changes.items() if key not in tensors}
    write_gguf(path, tensors, metadata, dtype="f32")
    return path


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("config", [
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"sliding_window": 7, "max_window_layers": 0},
    {"use_sliding_window": True, "num_hidden_layers": 3,
     "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"num_key_value_heads": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
], ids=["defaults", "usual_window", "all_slide", "no_width", "off", "layer_types", "older_rope"])  # fmt: skip
def test_a_config_means_what_transformers_makes_of_it(family, config):
    transformers = pytest.importorskip("transformers", reason=WHY)
    theirs = transformers.AutoConfig.for_model(family.name, **config)
    ours = family.from_hf({"model_type": family.name, **config})
    assert ours == family.from_hf(theirs.to_dict() | {"use_sliding_window": theirs.sliding_window is not None})
    assert list(ours.layer_types) == theirs.layer_types
    slides = "sliding_attention" in theirs.layer_types
    assert ours.window == (theirs.sliding_window if slides else 0)
    rope = theirs.rope_parameters
    assert (ours.rope_base, ours.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert (ours.num_kv_heads, ours.tied) == (theirs.num_key_value_heads, theirs.tie_word_embeddings)


def test_released_configs_are_read():
    """As they lie beside the weights, with keys that say nothing of the arithmetic and windows that are off."""
    shared = {"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
              "initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
              "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False}
    older = {**shared, "max_window_layers": 21, "sliding_window": 32768}
    newer = {**shared, "attention_bias": False, "max_window_layers": 28, "rope_scaling": None, "sliding_window": None}
    for name, family, keys in (("qwen2.5-0.5b", QWEN2_FAMILY, older), ("qwen3-0.6b", QWEN3_FAMILY, newer)):
        preset = PRESETS[family.name][name]
        h = LoadedModel.from_architecture({**preset, **keys}, FAMILIES).hyperparameters
        assert h == family.from_hf(preset) and h.window == 0 and h.rope_base == 1e6


@pytest.mark.parametrize(("base", "change", "says"), [
    (QWEN2, {"attention_bias": False}, "attention_bias is False"),
    (QWEN2, {"use_mrope": True}, "use_mrope is True"),
    (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is"),
    (QWEN3, {"num_experts": 128}, "num_experts is 128"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (QWEN3, {"is_causal": False}, "is_causal is False"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (QWEN3, {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    (QWEN3, {"max_window_layers": -1}, "max_window_layers is -1"),
    (QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "give these layers no window"),
    (QWEN3, {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 2"),
    (QWEN3, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
])  # fmt: skip
def test_refused_by_name(base, change, says):
    with pytest.raises(WeightError, match=says):
        LoadedModel.from_architecture({**base, **change}, FAMILIES)


@pytest.mark.parametrize("architecture", [
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration", "Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3ForSequenceClassification",
])  # fmt: skip
def test_relatives_of_another_build_are_refused(architecture):
    with pytest.raises(WeightError, match=f"'{architecture}' belongs to no installed family; known: .*Qwen3ForCausalLM"):
        LoadedModel.from_architecture({**QWEN3, "architectures": [architecture]}, FAMILIES)


@pytest.mark.parametrize("named", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_body_without_a_head_is_read_under_either_name(tmp_path, named):
    """Embedding models are saved so: no tensor begins with "model.". Some say that they are the model with a head."""
    reference = random_reference({**QWEN3, "tie_word_embeddings": True})
    reference.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
    parity = Parity.of(QWEN3_FAMILY, reference, tmp_path)
    assert "embed_tokens.weight" not in parity.loaded.store and parity.logits_error() < 2e-5
    assert QWEN3_FAMILY.hf_config(parity.loaded.hyperparameters)["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("named", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_body_whose_head_would_be_its_own_writes_no_text(tmp_path, named):
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    reference = random_reference({**QWEN3, "tie_word_embeddings": False}).model
    reference.save_pretrained(tmp_path / "body")
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    (tmp_path / "body" / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
    model = LoadedModel.open(tmp_path / "body", FAMILIES)
    assert not model.writes_text
    parameters = {name: model.names.load(model.store, name) for name, _ in model.dsl().parameters()}
    config = model.family.hf_config(model.hyperparameters)
    write_hf(tmp_path / "again", model.names.export(parameters), config, dtype="f32")
    again = LoadedModel.open(tmp_path / "again", FAMILIES)
    assert again.hyperparameters == model.hyperparameters
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "again", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in reference.state_dict().items())


def test_gguf_that_cannot_be_honoured_is_refused(tmp_path):
    path = write_gguf_of(tmp_path / "experts.gguf", QWEN3_FAMILY, QWEN3, **{"qwen3.expert_count": 8})
    with pytest.raises(WeightError, match=r"a mixture of experts \(qwen3.expert_count\)"):
        LoadedModel.open(path, FAMILIES)
    path = write_gguf_of(tmp_path / "partial.gguf", QWEN3_FAMILY, QWEN3, **{"qwen3.rope.dimension_count": 12})
    with pytest.raises(WeightError, match="rope.dimension_count is 12; a qwen3 model rotates all 24"):
        LoadedModel.open(path, FAMILIES)
    path = write_gguf_of(tmp_path / "bias.gguf", QWEN3_FAMILY, QWEN3, **{"blk.0.attn_q.bias": np.zeros(96, np.float32)})
    with pytest.raises(WeightError, match="'blk.0.attn_q.bias' has no place"):
        LoadedModel.open(path, FAMILIES)
    path = write_gguf_of(tmp_path / "moe.gguf", QWEN3_FAMILY, QWEN3, **{"general.architecture": "qwen3moe"})
    with pytest.raises(WeightError, match="'qwen3moe' belongs to no installed family"):
        LoadedModel.open(path, FAMILIES)


@pytest.mark.parametrize(("config", "says"), [
    ({**QWEN3, "attention_bias": True}, "a bias of the attention's output: GGUF files of architecture qwen3"),
    ({**QWEN2, "rope_parameters": {**YARN_ROPE, "beta_fast": 8.0}}, "beta_fast.*: GGUF files of architecture qwen2"),
])  # fmt: skip
def test_what_readers_of_gguf_would_not_see_is_not_written(config, says):
    family = QWEN3_FAMILY if config["model_type"] == "qwen3" else QWEN2_FAMILY
    with pytest.raises(WeightError, match=says):
        family.gguf_metadata(family.from_hf(config))


@pytest.mark.parametrize(("name", "parameters"), [
    ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096), ("qwen3-8b", 8_190_735_360),
])  # fmt: skip
def test_presets_are_the_published_sizes(name, parameters):
    [(family, config)] = [(family, PRESETS[family.name][name]) for family in FAMILIES if name in PRESETS[family.name]]
    model = family.model(family.from_hf(config))
    assert sum(int(np.prod(parameter.shape)) for _, parameter in model.parameters()) == parameters
