"""config.json and GGUF metadata of Gemma 1 to 3: every spelling is read, every setting used or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.model import AppliedAdapter, LoadedModel
from surogate_core.testing.parity import Parity, document_ranges, packed_batch, relative_error
from surogate_core.weights.export import write_gguf
from surogate_core.weights.tensor import from_f32
from surogate_gemma.gemma import FAMILIES
from surogate_gemma.tiny import GEMMA_1, GEMMA_2, GEMMA_3

WHY = "compares with transformers: pip install 'surogate-core[test]'"
FAMILY_1, FAMILY_2, FAMILY_3 = FAMILIES
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}


def write_gguf_of(path, family, config, metadata=None):
    h = family.from_hf(config)
    generator = np.random.default_rng(0)
    parameters = {
        name: from_f32(name, generator.normal(0, 0.1, parameter.shape).astype(np.float32))
        for name, parameter in family.model(h).parameters()
    }
    values = {**family.gguf_metadata(h), **(metadata or {})}
    values = {key: value for key, value in values.items() if value is not None}
    write_gguf(path, family.gguf_names(h).export(parameters), values, dtype="f32")
    return h, parameters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_config_json_leaves_out_is_what_transformers_takes(family):
    transformers = pytest.importorskip("transformers", reason=WHY)
    theirs = transformers.AutoConfig.for_model(family.name)
    assert family.from_hf({"model_type": family.name}) == family.from_hf(theirs.to_dict())
    ours = family.from_hf({"model_type": family.name})
    assert (ours.tied, ours.head_dim, ours.max_positions) == (True, theirs.head_dim, theirs.max_position_embeddings)
    kinds = {"sliding_attention": "local", "full_attention": "global"}
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    assert ours.layer_kinds == tuple(kinds[each] for each in types)


def test_older_and_newer_spellings_of_gemma_3_are_the_same_model():
    plain = {key: value for key, value in GEMMA_3.items() if key not in ("rope_parameters", "layer_types")}
    rope = {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    older = FAMILY_3.from_hf({**plain, **rope, "sliding_window_pattern": 2})
    assert older == FAMILY_3.from_hf(GEMMA_3)
    assert older.layer_kinds == ("local", "global", "local")
    assert older.rope_of("global").scaling["factor"] == 4.0 and older.rope_of("local").scaling == {}
    assert FAMILY_3.from_hf({**plain, "num_hidden_layers": 12}).layer_kinds == (("local",) * 5 + ("global",)) * 2


def test_scales_and_caps_that_no_released_file_has(tmp_path):
    """What GGUF cannot say, and so the variants of the families do not have."""
    changes = {"query_pre_attn_scalar": 5, "final_logit_softcapping": 3.0, "tie_word_embeddings": False}
    parity = Parity.make(FAMILY_3, {**GEMMA_3, **changes}, tmp_path)
    assert parity.logits_error() < 2e-5
    parity.round_trip(tmp_path / "again")
    plain = Parity.make(FAMILY_3, GEMMA_3, tmp_path / "plain")
    assert relative_error(parity.logits(), plain.logits()) > 0.1


def seeing_model():
    """A random Gemma 3 with a vision tower."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    text = {key: value for key, value in GEMMA_3.items() if key != "architectures"}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.Gemma3ForConditionalGeneration(config).eval()


def its_logits(model, batch) -> np.ndarray:
    import torch

    with torch.no_grad():
        documents = [torch.from_numpy(batch.tokens[part].astype(np.int64))[None] for part in document_ranges(batch)]
        return np.concatenate([model(document).logits[0].numpy() for document in documents])


@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_with_a_vision_tower(tmp_path, start):
    from safetensors.numpy import load_file, save_file

    model = seeing_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.replace("language_model.model.", start): each for name, each in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    loaded = LoadedModel.open(tmp_path, FAMILIES)
    batch = packed_batch(loaded.hyperparameters.vocab_size)
    assert relative_error(Parity(tmp_path, model, loaded, batch).logits(), its_logits(model, batch)) < 2e-5
    written = loaded.family.hf_config(loaded.hyperparameters)
    assert (written["architectures"], written["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")


def test_an_adapter_that_peft_made_for_a_model_with_a_vision_tower(tmp_path):
    peft = pytest.importorskip("peft", reason=WHY)
    model = seeing_model()
    model.save_pretrained(tmp_path / "model")
    targets = r".*language_model.*\.(q_proj|down_proj)"
    chosen = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, chosen).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = LoadedModel.open(tmp_path / "model", FAMILIES)
    batch = packed_batch(loaded.hyperparameters.vocab_size)
    parity = Parity(tmp_path, model, loaded, batch)
    ours = parity.logits(adapter=AppliedAdapter.open(tmp_path / "adapter", loaded))
    assert relative_error(ours, its_logits(model, batch)) < 2e-5
    assert relative_error(ours, parity.logits()) > 1e-2


@pytest.mark.parametrize(("family", "change", "says"), [
    (FAMILY_1, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    (FAMILY_2, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    (FAMILY_2, {"sliding_window": None}, "lacks 'sliding_window'"),
    (FAMILY_2, {"sliding_window_pattern": 3}, "sliding_window_pattern is 3"),
    (FAMILY_2, {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    (FAMILY_3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (FAMILY_3, {"attention_bias": True}, "attention_bias is True"),
    (FAMILY_3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (FAMILY_3, {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    (FAMILY_3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "are by layer type"),
    (FAMILY_3, {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}}, "of sliding_attention are"),
])  # fmt: skip
def test_refused_by_name(family, change, says):
    base = {"gemma": GEMMA_1, "gemma2": GEMMA_2, "gemma3_text": GEMMA_3}[family.name]
    with pytest.raises(WeightError, match=says):
        LoadedModel.from_architecture({**base, **change}, FAMILIES)


@pytest.mark.parametrize(("family", "config"), [
    (FAMILY_1, GEMMA_1), (FAMILY_2, GEMMA_2), (FAMILY_3, GEMMA_3),
    (FAMILY_3, {**GEMMA_3, "layer_types": ["full_attention"] * 3}),
], ids=["gemma", "gemma2", "gemma3", "all global"])  # fmt: skip
def test_gguf_gives_the_same_model(tmp_path, family, config):
    h, parameters = write_gguf_of(tmp_path / "model.gguf", family, config)
    opened = LoadedModel.open(tmp_path / "model.gguf", FAMILIES)
    assert opened.family is family
    for field in (name for name in vars(h) if name not in ("init_std", "norm_eps")):
        assert getattr(opened.hyperparameters, field) == getattr(h, field), field
    for name, tensor in parameters.items():
        read = opened.names.load(opened.store, name).to_f32()
        np.testing.assert_allclose(read, tensor.to_f32(), atol=1e-7, err_msg=name)


def test_what_files_of_gemma_3_do_not_say(tmp_path):
    """Published files have neither of the keys: llama.cpp knows them of the architecture, and so must we."""
    config = {**GEMMA_3, "num_hidden_layers": 7, "layer_types": None, "rope_parameters": None}
    unsaid = {"gemma3.attention.sliding_window_pattern": None, "gemma3.rope.freq_base_swa": None}
    h, _ = write_gguf_of(tmp_path / "model.gguf", FAMILY_3, config, unsaid)
    read = LoadedModel.open(tmp_path / "model.gguf", FAMILIES).hyperparameters
    assert read.layer_kinds == h.layer_kinds == ("local",) * 5 + ("global", "local")
    assert (read.local_rope_base, read.rope_base, read.query_scalar) == (10000.0, 1e6, 16)


@pytest.mark.parametrize(("family", "config", "layers"), [(FAMILY_2, GEMMA_2, 46), (FAMILY_3, GEMMA_3, 62)],
                         ids=["gemma2", "gemma3"])
def test_the_27b_scales_queries_by_what_hidden_size_leaves_a_head(tmp_path, family, config, layers):
    size = {"num_hidden_layers": layers, "layer_types": None, "head_dim": 4, "num_attention_heads": 2,
            "hidden_size": 20, "query_pre_attn_scalar": 10}
    h, _ = write_gguf_of(tmp_path / "model.gguf", family, {**config, **size})
    assert LoadedModel.open(tmp_path / "model.gguf", FAMILIES).hyperparameters.query_scalar == h.query_scalar == 10


@pytest.mark.parametrize(("family", "config", "says"), [
    (FAMILY_1, {**GEMMA_1, "tie_word_embeddings": False}, "a head of its own"),
    (FAMILY_2, {**GEMMA_2, "query_pre_attn_scalar": 9}, "width of 9; readers of GGUF take 16"),
    (FAMILY_3, {**GEMMA_3, "final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
    (FAMILY_3, {**GEMMA_3, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "no period"),
])  # fmt: skip
def test_what_gguf_cannot_say_is_refused(family, config, says):
    with pytest.raises(WeightError, match=says):
        family.gguf_metadata(family.from_hf(config))
