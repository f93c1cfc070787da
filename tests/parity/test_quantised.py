"""Quantised bases: multiplied as they lie in the file, they are the model of their dequantised weights, and LoRA's gradients
through them are PEFT's through that model."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from surogate_core.export import open_installed
from surogate_core.model import LoadedModel
from surogate_core.passes import LoraSpec
from surogate_core.passes.lora import adapter_names
from surogate_core.testing.parity import Parity, installed_family, relative_error
from surogate_core.weights.export import write_gguf
from surogate_core.weights.tensor import realized

from .variants import exported, gguf_cases

torch = pytest.importorskip("torch", reason="compares with torch: pip install 'surogate-core[test]'")

# Rows of whole 256-wide blocks, which K-quants need.
CONFIG = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2, "tie_word_embeddings": True}
FORMATS = ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Parity:
    family = installed_family("llama")
    return Parity.make(family, {**family.tiny_configs()["gqa"], **CONFIG}, tmp_path_factory.mktemp("original"), seed=4)


BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def quantised(original: Parity, path: Path, dtype: str, backend: str = "cpu") -> Parity:
    """The checkpoint in a GGUF of ``dtype``, and transformers' model with the values that are left."""
    family, h = original.loaded.family, original.loaded.hyperparameters
    parameters = {name: original.loaded.names.load(original.loaded.store, name) for name, _ in original.loaded.dsl().parameters()}
    formats = write_gguf(path, family.gguf_names(h).export(parameters), family.gguf_metadata(h), dtype=dtype)
    assert formats["blk.0.attn_q.weight"] == dtype
    return beside_dequantised(original, LoadedModel.open(path, [family]), backend)


def beside_dequantised(original: Parity, loaded: LoadedModel, backend: str = "cpu") -> Parity:
    """A quantised file of ``original``, and transformers' model with the values that are left."""
    # By the names that it was written under: a file of a relative of Llama is Llama's when it is read, rows in another order.
    names = original.loaded.family.gguf_names(original.loaded.hyperparameters)
    left = {name: names.load(loaded.store, name) for name, _ in original.loaded.dsl().parameters()}
    reference = copy.deepcopy(original.reference)
    state = reference.state_dict()
    for name, tensor in original.loaded.names.export(left).items():
        state[name].copy_(torch.tensor(realized(tensor).to_f32()))
    return Parity(loaded.store.path, reference, loaded, original.batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_quantised_file_is_its_dequantised_model(original, tmp_path, dtype, backend):
    parity = quantised(original, tmp_path / "model.gguf", dtype, backend)
    assert parity.logits_error() < 1e-5
    assert relative_error(parity.logits("bf16"), parity.reference_logits()) < 5e-2
    assert relative_error(parity.logits(), original.reference_logits()) > 1e-4, "nothing was quantised"


@pytest.mark.parametrize("case", gguf_cases(), ids="-".join)
def test_a_quantised_file_of_every_variant(tmp_path, case):
    """What a family's names do to rows and norms, they do to blocks too."""
    held = exported(case, tmp_path, "q4_0")
    parity = beside_dequantised(held.parity, open_installed(held.path))
    assert "q4_0" in {parity.loaded.store.get(name).dtype for name in parity.loaded.store.names()}
    assert parity.logits_error() < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_lora_on_a_quantised_base_has_pefts_gradients(original, tmp_path, dtype, backend):
    peft = pytest.importorskip("peft", reason="compares with PEFT: pip install 'surogate-core[test]'")
    parity = quantised(original, tmp_path / "model.gguf", dtype, backend)
    spec = LoraSpec(4, 8.0, frozenset({"attn.q", "attn.v", "mlp.down"}))
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(parity.reference, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    parameters = dict(model.named_parameters())
    session = parity.train_session(adapter=spec)
    names = parity.loaded.family.hf_names(parity.loaded.hyperparameters)
    generator = np.random.default_rng(0)
    theirs_by_ours = {}
    for weight, _ in parity.loaded.dsl().parameters():
        for half, name in zip("AB", adapter_names(weight)):
            if name in session.layout.parameters:
                value = generator.normal(0, 0.1, session.parameter(name).shape).astype(np.float32)
                module = names.file_names(weight)[0].removesuffix(".weight")
                theirs_by_ours[name] = f"base_model.model.{module}.lora_{half}.default.weight"
                session.set_parameter(name, value)
                parameters[theirs_by_ours[name]].data.copy_(torch.from_numpy(value))
    session.refresh()
    ours, theirs = parity.gradients(session), parity.reference_gradients(module=model.eval())
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert len(ours.values) == len(theirs.values) == 12
    for name, value in ours.values.items():
        assert relative_error(value, theirs.values[theirs_by_ours[name]]) < 5e-5, name
