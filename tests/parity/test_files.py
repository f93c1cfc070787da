"""Models through other files and through the public face: GGUF and back to transformers, and Generator."""

from __future__ import annotations


import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.export import export
from surogate_core.generate import Generator
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, installed_family, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer

torch = pytest.importorskip("torch", reason="compares with transformers: pip install 'surogate-core[test]'")
transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")

# Released Llama 3.2 parameters, with heads wide enough for the three ranges of wavelengths.
LLAMA32 = {"head_dim": 32, "max_position_embeddings": 131072, "rope_parameters": {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def checkpoint(folder, family: str, config) -> Parity:
    """A random checkpoint, and a tokenizer that has a byte for each of its first ids and one merge."""
    parity = Parity.make(installed_family(family), config, folder, seed=8)
    write_byte_tokenizer(folder, num_bytes=config["vocab_size"] - 1, merges=[("t", "h")])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return parity


def cases():
    llama, mistral = (installed_family(name).tiny_configs() for name in ("llama", "mistral"))
    louder = {**llama["yarn_rope"]["rope_parameters"], "attention_factor": 1.5}
    return {
        "biases": ("llama", {**llama["attention_bias"], "mlp_bias": True}),
        "llama3": ("llama", {**llama["gqa"], **LLAMA32}),
        "linear": ("llama", llama["linear_rope"]),
        "yarn": ("llama", {**llama["gqa"], "rope_parameters": louder}),
        "window": ("mistral", mistral["window"]),
    }


@pytest.mark.parametrize("case", ["biases", "llama3", "linear", "yarn", "window"])
def test_through_gguf_and_back_it_is_the_same_model_to_transformers(tmp_path, case):
    parity = checkpoint(tmp_path / "first", *cases()[case])
    export(tmp_path / "first", tmp_path / "model.gguf", "f32")
    export(tmp_path / "model.gguf", tmp_path / "second", "f32")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "second", attn_implementation="eager", dtype=torch.float32)
    assert type(again) is type(parity.reference)
    expected = parity.reference_logits()
    assert relative_error(Parity(tmp_path, again, parity.loaded, parity.batch).reference_logits(), expected) < 5e-6


def test_what_config_json_cannot_say_is_refused_when_exporting(tmp_path):
    checkpoint(tmp_path / "first", "llama", installed_family("llama").tiny_configs()["yarn_rope_tuned"])
    export(tmp_path / "first", tmp_path / "model.gguf", "f32")
    with pytest.raises(WeightError, match="not those of a Llama 3 scaling"):
        export(tmp_path / "model.gguf", tmp_path / "second", "f32")


def test_generator_gives_transformers_greedy_text_alone_and_side_by_side(tmp_path):
    parity = checkpoint(tmp_path, "llama", installed_family("llama").tiny_configs()["gqa"])
    tokens = parity.batch.tokens.tolist()
    prompts = [tokens[0:13], tokens[14:38], tokens[38:44], tokens[3:4]]
    expected = [parity.reference_greedy(prompt, 12) for prompt in prompts]
    generator = Generator(tmp_path, recipe="fp32", threads=1, context=64, sequences=3)
    assert [list(generator.tokens(prompt, 12)) for prompt in prompts] == expected
    tokenizer = generator.tokenizer
    conversations = [[{"role": "user", "content": character}] for character in "AbC?9"]
    answers = generator.chat_many(conversations, max_new_tokens=12)
    alone = [parity.reference_greedy(tokenizer.encode(c[0]["content"]), 12) for c in conversations]
    assert answers == [tokenizer.decode(ids) for ids in alone]


def test_wider_files_hold_the_same_values(tmp_path):
    """bf16 to f32 GGUF to bf16 loses nothing."""
    parity = checkpoint(tmp_path / "first", "llama", installed_family("llama").tiny_configs()["mha_tied"])
    export(tmp_path / "first", tmp_path / "bf16", "bf16")
    export(tmp_path / "bf16", tmp_path / "model.gguf", "f32")
    export(tmp_path / "model.gguf", tmp_path / "again", "bf16")
    stores = [LoadedModel.open(tmp_path / name, [parity.loaded.family]).store for name in ("bf16", "again")]
    assert stores[0].names() == stores[1].names()
    for name in stores[0].names():
        assert np.array_equal(stores[0].get(name).data, stores[1].get(name).data), name
