"""Models through other files and through the public face: GGUF and back to transformers, and Generator."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core.errors import WeightError
from surogate_core.export import export, open_installed
from surogate_core.generate import Generator
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity, installed_family, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer

from .variants import NO_GGUF, cases, exported, gguf_cases

torch = pytest.importorskip("torch", reason="compares with transformers: pip install 'surogate-core[test]'")
transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")

# Released Llama 3.2 parameters, with heads wide enough for the three ranges of wavelengths.
LLAMA32 = {"head_dim": 32, "max_position_embeddings": 131072, "rope_parameters": {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}}  # fmt: skip
NO_WAY_BACK = {("llama", "llama3_rope"), ("llama", "yarn_rope_tuned")}
"""A GGUF holds their frequency factors, which config.json has no name for."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def checkpoint(folder, family: str, config) -> Parity:
    """A random checkpoint, and a tokenizer that has a byte for each of its first ids and one merge."""
    parity = Parity.make(installed_family(family), config, folder, seed=8)
    write_byte_tokenizer(folder, num_bytes=config["vocab_size"] - 1, merges=[("t", "h")])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return parity


def special_cases():
    llama, mistral = (installed_family(name).tiny_configs() for name in ("llama", "mistral"))
    louder = {**llama["yarn_rope"]["rope_parameters"], "attention_factor": 1.5}
    return {
        "biases": ("llama", {**llama["attention_bias"], "mlp_bias": True}),
        "llama3": ("llama", {**llama["gqa"], **LLAMA32}),
        "yarn": ("llama", {**llama["gqa"], "rope_parameters": louder}),
        "window": ("mistral", mistral["window"]),
    }


@pytest.mark.parametrize("case", ["biases", "llama3", "yarn", "window"])
def test_through_gguf_and_back_it_is_the_same_model_to_transformers(tmp_path, case):
    parity = checkpoint(tmp_path / "first", *special_cases()[case])
    export(tmp_path / "first", tmp_path / "model.gguf", "f32")
    again = back_in_transformers(parity, tmp_path / "model.gguf", tmp_path / "second")
    assert type(again.reference) is type(parity.reference)


@pytest.mark.parametrize("case", [case for case in gguf_cases() if case not in NO_WAY_BACK], ids="-".join)
def test_every_variant_through_gguf_and_back(gguf_of, tmp_path, case):
    held = gguf_of(case)
    back_in_transformers(held.parity, held.path, tmp_path)
    read = open_installed(held.path)
    assert relative_error(Parity(held.path, None, read, held.parity.batch).logits(), held.parity.logits()) < 1e-5


@pytest.mark.parametrize("case", [case for case in NO_GGUF if case in cases()], ids="-".join)
def test_what_gguf_cannot_say_is_refused_when_exporting(tmp_path, case):
    with pytest.raises(WeightError, match=NO_GGUF[case]):
        exported(case, tmp_path)


def back_in_transformers(parity: Parity, gguf, folder) -> Parity:
    """The GGUF of a checkpoint as a folder again, which transformers opens and finds the checkpoint's logits in."""
    export(gguf, folder, "f32")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    back = Parity(folder, again, parity.loaded, parity.batch)
    assert relative_error(back.reference_logits(), parity.reference_logits()) < 5e-6
    return back


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
    assert min(len(set(text)) for text in expected) >= 6
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
