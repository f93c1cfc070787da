"""config.json and GGUF metadata: every spelling is read, every setting used or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.dsl import RopeSpec
from surogate_core.dsl.rope import inverse_frequencies
from surogate_core.errors import WeightError
from surogate_core.model import LoadedModel
from surogate_core.weights.export import write_gguf, write_hf
from surogate_core.weights.tensor import from_f32
from surogate_llama.families import FAMILIES
from surogate_llama.family import LlamaFamily
from surogate_core.families.rope_factors import frequency_factors, llama3_of_factors
from surogate_llama.tiny import LLAMA, LLAMA3_ROPE, LLAMA_VARIANTS, MISTRAL, YARN_ROPE

LLAMA_FAMILY, MISTRAL_FAMILY = FAMILIES[:2]
RELEASED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}


def random_parameters(family, config, seed=0):
    """float32 tensors of every parameter by our names."""
    h = family.from_hf(config)
    generator = np.random.default_rng(seed)
    return h, {
        name: from_f32(name, generator.normal(0, 0.1, parameter.shape).astype(np.float32))
        for name, parameter in family.model(h).parameters()
    }


def write_folder(folder, family, config):
    h, parameters = random_parameters(family, config)
    write_hf(folder, family.hf_names(h).export(parameters), config, dtype="f32")
    return folder


def write_gguf_of(path, family, config, **metadata):
    h, parameters = random_parameters(family, config)
    tensors = dict(family.gguf_names(h).export(parameters))
    tensors |= {name: from_f32(name, array) for name, array in family.gguf_extra_tensors(h).items()}
    values = {key: value for key, value in {**family.gguf_metadata(h), **metadata}.items() if value is not None}
    write_gguf(path, tensors, values, dtype="f32")
    return path


def test_older_and_newer_spellings_of_rope_are_the_same_model():
    for rope in (LLAMA3_ROPE, YARN_ROPE):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        newer = LLAMA_FAMILY.from_hf({**LLAMA, "rope_parameters": rope})
        older = LLAMA_FAMILY.from_hf({**LLAMA, "rope_theta": rope["rope_theta"], "rope_scaling": scaling})
        oldest = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
        assert newer == older
        assert newer == LLAMA_FAMILY.from_hf({**LLAMA, "rope_theta": rope["rope_theta"], "rope_scaling": oldest})


def test_each_kind_of_scaling_changes_the_frequencies():
    seen = {
        variant: inverse_frequencies(LLAMA_FAMILY.from_hf(config).rope)
        for variant, config in LLAMA_VARIANTS.items() if "rope_parameters" in config
    }
    for variant, (frequencies, _) in seen.items():
        base = LLAMA_VARIANTS[variant]["rope_parameters"]["rope_theta"]
        assert np.abs(frequencies - inverse_frequencies(RopeSpec(16, base))[0]).max() > 1e-3, variant
    assert seen["yarn_rope"][1] > 1 and abs(seen["yarn_rope_tuned"][1] - seen["yarn_rope"][1]) > 0.01


def test_what_config_json_leaves_out_is_what_transformers_takes():
    transformers = pytest.importorskip("transformers", reason="compares defaults with transformers: install the extra `test`")
    for family, config in ((LLAMA_FAMILY, LLAMA), (MISTRAL_FAMILY, {**MISTRAL, "num_attention_heads": 8})):
        short = {key: value for key, value in config.items() if key in
                 ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        theirs = transformers.AutoConfig.for_model(**short)
        ours = family.from_hf(short)
        assert ours.num_kv_heads == theirs.num_key_value_heads and ours.norm_eps == theirs.rms_norm_eps
        assert ours.max_positions == theirs.max_position_embeddings and ours.tied == theirs.tie_word_embeddings
        assert ours.window == (getattr(theirs, "sliding_window", None) or 0)
        assert ours.rope_base == theirs.rope_parameters["rope_theta"] and ours.head_dim == theirs.head_dim


@pytest.mark.parametrize(("change", "says"), [
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"vocab_size": None}, "lacks 'vocab_size'"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_key_value_heads": 3}, "cannot share 3"),
    ({"head_dim": 15}, "rotated in pairs"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"sliding_window": 128}, "sliding_window is 128"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'.*known are default, linear, llama3, yarn"),
    ({"rope_scaling": {"type": "longrope"}}, "needs 'short_factor'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "needs 'high_freq_factor'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer"),
    ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' belongs to no installed family"),
])  # fmt: skip
def test_refused_by_name(change, says):
    with pytest.raises(WeightError, match=says):
        LoadedModel.from_architecture({**LLAMA, **change}, FAMILIES)


def test_mistral_refuses_biases():
    with pytest.raises(WeightError, match="attention_bias is True"):
        MISTRAL_FAMILY.from_hf({**MISTRAL, "attention_bias": True})


def _without(folder, name):
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def _load_all(model):
    for name, parameter in model.dsl().parameters():
        model.names.load(model.store, name, parameter.shape)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path):
    folder = write_folder(tmp_path / "whole", LLAMA_FAMILY, LLAMA)
    _load_all(LoadedModel.open(folder, FAMILIES))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(WeightError, match=r"mlp.gate_proj.weight.*\[96, 64\].*\[80, 64\]"):
        _load_all(LoadedModel.open(folder, FAMILIES))
    (folder / "config.json").write_text(json.dumps(config))
    _without(folder, "model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(WeightError, match="no tensor 'model.layers.1.self_attn.k_proj.weight'"):
        LoadedModel.open(folder, FAMILIES)


@pytest.mark.parametrize(("written", "read", "says"), [
    ({"attention_bias": True}, {"attention_bias": False}, "'model.layers.0.self_attn.q_proj.bias' has no place"),
    ({"attention_bias": False}, {"attention_bias": True}, "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ({}, {"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' has no place"),
    ({}, {"num_hidden_layers": 3}, "no tensor 'model.layers.2.input_layernorm.weight'.*and 8 more"),
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, None),
    ({}, {"tie_word_embeddings": True}, None),
])  # fmt: skip
def test_tensors_that_do_not_fit_the_configuration_are_named(tmp_path, written, read, says):
    folder = write_folder(tmp_path / "model", LLAMA_FAMILY, {**LLAMA, **written})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **read}))
    if says is None:
        _load_all(LoadedModel.open(folder, FAMILIES))
        return
    with pytest.raises(WeightError, match=says):
        LoadedModel.open(folder, FAMILIES)


@pytest.mark.parametrize("variant", LLAMA_VARIANTS)
def test_gguf_gives_the_same_model(tmp_path, variant):
    path = write_gguf_of(tmp_path / "model.gguf", LLAMA_FAMILY, LLAMA_VARIANTS[variant])
    opened = LoadedModel.open(path, FAMILIES)
    h, parameters = random_parameters(LLAMA_FAMILY, LLAMA_VARIANTS[variant])
    given, read = inverse_frequencies(h.rope), inverse_frequencies(opened.hyperparameters.rope)
    np.testing.assert_allclose(read[0], given[0], rtol=1e-6)
    assert read[1] == pytest.approx(given[1], rel=1e-6)
    ignored = ("rope_scaling", "init_std", "rope_base", "norm_eps")
    for field in (name for name in vars(h) if name not in ignored):
        assert getattr(opened.hyperparameters, field) == getattr(h, field), field
    assert opened.hyperparameters.norm_eps == pytest.approx(h.norm_eps)
    for name, tensor in parameters.items():
        np.testing.assert_array_equal(opened.names.load(opened.store, name).to_f32(), tensor.to_f32(), err_msg=name)


def test_gguf_keeps_the_window_and_the_export_is_mistral_again(tmp_path):
    path = write_gguf_of(tmp_path / "model.gguf", MISTRAL_FAMILY, {**MISTRAL, "sliding_window": 5})
    opened = LoadedModel.open(path, FAMILIES)
    assert opened.hyperparameters.window == 5
    config = opened.family.hf_config(opened.hyperparameters)
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_survives_gguf(tmp_path, factor):
    rope = {**RELEASED, "factor": factor}
    config = {**LLAMA, "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": rope}
    opened = LoadedModel.open(write_gguf_of(tmp_path / "model.gguf", LLAMA_FAMILY, config), FAMILIES)
    assert opened.hyperparameters.rope_scaling["rope_type"] == "factors"
    assert LLAMA_FAMILY.hf_config(opened.hyperparameters)["rope_scaling"] == rope


def test_factors_that_are_not_llama3_are_kept_in_gguf_and_refused_in_config_json():
    given = frequency_factors(RopeSpec(64, 500000.0, scaling=RELEASED))
    assert llama3_of_factors(RopeSpec(64, 500000.0, scaling={"rope_type": "factors", "factors": given})) == RELEASED
    h = LLAMA_FAMILY.from_hf({**LLAMA, "head_dim": 64})
    odd = type(h)(**{**vars(h), "rope_scaling": {"rope_type": "factors", "factors": tuple(1.01 * given)}})
    with pytest.raises(WeightError, match="not those of a Llama 3 scaling"):
        LLAMA_FAMILY.hf_config(odd)
    np.testing.assert_allclose(LLAMA_FAMILY.gguf_extra_tensors(odd)["rope_freqs.weight"], 1.01 * given, rtol=1e-6)


@pytest.mark.parametrize(("change", "says"), [
    ({"llama.block_count": None}, "lacks llama.block_count"),
    ({"llama.attention.head_count": [4, 4]}, "attention.head_count is .*not one number"),
    ({"llama.expert_count": 8}, "mixture of experts"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
    ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 2.0}, "'ntk' is not known"),
    ({"llama.rope.scaling.type": "longrope"}, "no tensor 'rope_factors_long.weight'"),
    ({"llama.rope.scaling.type": "linear"}, "lacks llama.rope.scaling.factor"),
    ({"general.architecture": "gpt2"}, "'gpt2' belongs to no installed family"),
])  # fmt: skip
def test_gguf_metadata_refused_by_name(tmp_path, change, says):
    path = write_gguf_of(tmp_path / "model.gguf", LLAMA_FAMILY, LLAMA, **change)
    with pytest.raises(WeightError, match=says):
        LoadedModel.open(path, FAMILIES)


def test_partial_rotation_is_written_to_config_json_and_refused_in_gguf():
    h = LLAMA_FAMILY.from_hf({**LLAMA, "partial_rotary_factor": 0.5})
    assert h.rope_dims == 8 and LLAMA_FAMILY.from_hf(LLAMA_FAMILY.hf_config(h)) == h
    with pytest.raises(WeightError, match="8 of 16 rotated dimensions"):
        LLAMA_FAMILY.gguf_metadata(h)


def test_a_relative_of_llama_goes_by_its_own_name(tmp_path):
    acme = LlamaFamily("acme", "AcmeForCausalLM", ())
    config = {**LLAMA, "model_type": "acme", "architectures": ["AcmeForCausalLM"]}
    model = LoadedModel.open(write_folder(tmp_path / "acme", acme, config), [*FAMILIES, acme])
    assert model.family is acme
    written = acme.hf_config(model.hyperparameters)
    assert (written["model_type"], written["architectures"]) == ("acme", ["AcmeForCausalLM"])


def test_two_families_of_one_architecture_are_not_guessed_between(tmp_path):
    twin = LlamaFamily("twin", "LlamaForCausalLM", ("llama",))
    folder = write_folder(tmp_path / "m", LLAMA_FAMILY, LLAMA)
    with pytest.raises(WeightError, match="claimed by the families 'llama' and 'twin'"):
        LoadedModel.open(folder, [*FAMILIES, twin])
    assert LoadedModel.open(folder, [*FAMILIES, twin], "twin").family is twin
