"""Mistral 3 and Ministral 3: a model that sees is its text, whichever Mistral that is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from surogate_core.dsl import RopeSpec, rope_table
from surogate_core.dsl.rope import inverse_frequencies
from surogate_core.errors import WeightError
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity
from surogate_core.weights.export import write_gguf
from surogate_core.weights.tensor import from_f32
from surogate_llama.families import FAMILIES
from surogate_llama.tiny import MINISTRAL3, MISTRAL

FAMILY = FAMILIES[-1]
TEXTS = {"ministral3": MINISTRAL3, "mistral": {**MISTRAL, "head_dim": 16, "sliding_window": None}}
VISION = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "head_dim": 8, "image_size": 32, "patch_size": 16}


def seeing(text, tied: bool):
    """A random Mistral3ForConditionalGeneration of transformers around a tiny text."""
    torch = pytest.importorskip("torch", reason="compares with transformers: install the extra `test`")
    transformers = pytest.importorskip("transformers", reason="compares with transformers: install the extra `test`")
    text = {key: value for key, value in text.items() if key not in ("architectures", "tie_word_embeddings")}
    config = transformers.Mistral3Config(
        text_config={**text, "tie_word_embeddings": tied}, vision_config=VISION, tie_word_embeddings=tied, image_token_index=3)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = transformers.Mistral3ForConditionalGeneration._from_config(
            config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2)
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_model_that_sees(tmp_path, name, tied):
    reference = seeing(TEXTS[name], tied)
    reference.save_pretrained(tmp_path)
    parity = Parity.of(FAMILY, reference, tmp_path)
    parity.batch.tokens[parity.batch.tokens == 3] = 4  # no images
    assert parity.logits_error() < 2e-5
    h = parity.loaded.hyperparameters
    assert h.tied == tied and (h.query_growth > 0) == (name == "ministral3")
    assert FAMILY.hf_config(h)["architectures"] == TEXTS[name]["architectures"]


@pytest.mark.parametrize(("change", "says"), [
    ({"text_config": {"model_type": "mistral4"}}, "text_config is of model_type 'mistral4'"),
    ({"rope_parameters": {"rope_type": "default"}}, "lack 'llama_4_scaling_beta'"),
    ({"attention_bias": True}, "attention_bias is True"),
])
def test_refused_by_name(change, says):
    with pytest.raises(WeightError, match=says):
        FAMILY.from_hf({**MINISTRAL3, **change})


def test_what_is_left_out_is_what_transformers_takes():
    transformers = pytest.importorskip("transformers", reason="compares with transformers: install the extra `test`")
    short = {key: value for key, value in MINISTRAL3.items() if key in ("vocab_size", "hidden_size", "intermediate_size",
             "num_hidden_layers", "num_attention_heads")} | {"num_attention_heads": 8}  # fmt: skip
    ours, theirs = FAMILY.from_hf({**short, "model_type": "ministral3"}), transformers.AutoConfig.for_model("ministral3", **short)
    assert (ours.max_positions, ours.num_kv_heads, ours.head_dim) == (262144, 8, 128)
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling.items() <= {**theirs.rope_parameters}.items()
    assert ours.query_growth == 0.1 and ours.query_rope.growth_step == 16384
    assert FAMILY.from_hf(json.loads(json.dumps(FAMILY.hf_config(ours)))) == ours


def test_both_ways_in_which_gguf_says_that_yarn_magnifies_nothing(tmp_path):
    """attn_factor, as written here, and yarn_log_multiplier, as in published files; llama.cpp gives the same logits for both."""
    h = FAMILY.from_hf(MINISTRAL3)
    parameters = {name: from_f32(name, np.ones(each.shape, np.float32)) for name, each in FAMILY.model(h).parameters()}
    metadata = dict(FAMILY.gguf_metadata(h))
    magnitudes = []
    for name, change in (("ours", {}), ("theirs", {"mistral3.rope.scaling.yarn_log_multiplier": 1.0})):
        if change:
            del metadata["mistral3.rope.scaling.attn_factor"]
        write_gguf(tmp_path / name, FAMILY.gguf_names(h).export(parameters), metadata | change, dtype="f32")
        read = LoadedModel.open(tmp_path / name, [FAMILY]).hyperparameters
        assert (read.query_growth, read.query_rope.growth_step) == (0.5, 8)
        magnitudes.append(inverse_frequencies(read.rope)[1])
    assert magnitudes == pytest.approx([1.0, 1.0])
    assert inverse_frequencies(h.rope)[1] == 1.0


def test_a_growing_table():
    plain, growing = rope_table(RopeSpec(8), 25), rope_table(RopeSpec(8, growth=0.5, growth_step=8), 25)
    np.testing.assert_array_equal(growing[:8], plain[:8])
    for position in (8, 15, 16, 24):
        np.testing.assert_allclose(growing[position], plain[position] * (1 + 0.5 * np.log(1 + position // 8)), rtol=1e-6)
    with pytest.raises(ValueError, match="all dimensions"):
        rope_table(RopeSpec(8, rotated=4, growth=0.5, growth_step=8), 25)
