"""EmbeddingGemma: hidden states, vectors and files, held against transformers' model and torch's layers."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from surogate_gemma.embedding import EmbeddingGemmaFamily
from surogate_gemma.tiny import GEMMA_3

from surogate_core import export
from surogate_core.dsl import LMHead
from surogate_core.engine import cuda
from surogate_core.errors import ConfigError, WeightError
from surogate_core.model import FrozenWeights, LoadedModel, loss_program
from surogate_core.passes import RECIPES
from surogate_core.testing.parity import Parity, document_ranges, packed_batch, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer, write_sentence_modules
from surogate_core.weights.embedding import Embedding, shaped
from surogate_core.weights.quants import bf16_to_f32

torch = pytest.importorskip("torch", reason="compares with torch: pip install 'surogate-core[test]'")
transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")

FAMILY = EmbeddingGemmaFamily()
# Tokens of local layers see two to either side, which is less than the longest documents have; layers of both kinds twice.
CONFIG = {
    **{key: value for key, value in GEMMA_3.items() if key not in ("architectures", "model_type")},
    "num_hidden_layers": 4, "sliding_window": 5, "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "matryoshka_dimensions": [64, 24],
}
NO_DEVICE = pytest.mark.skipif(bool(cuda.unavailable()), reason=str(cuda.unavailable()))
BACKENDS = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_DEVICE])]
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**CONFIG)
    model = transformers.Gemma3TextModel._from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5
        parameter.data.normal_(0, 1.0).mul_(scale)
    return model.eval()


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 64, bias=False))


@pytest.fixture(scope="module")
def folder(reference, layers, tmp_path_factory) -> Path:
    """A checkpoint as sentence-transformers keeps it."""
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("embedding") / "model"
    reference.save_pretrained(path)
    write_sentence_modules(path, 64, "mean_tokens", "Dense", "Dense", "Normalize")
    for name, layer in zip(("2_Dense", "3_Dense"), layers):
        (path / name).mkdir()
        save_file({"linear.weight": layer.weight.detach()}, path / name / "model.safetensors")
        dense = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": False,
                 "activation_function": "torch.nn.modules.linear.Identity"}
        (path / name / "config.json").write_text(json.dumps(dense))
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    return write_byte_tokenizer(path, ["<eos>", "<bos>"], num_bytes=150, eos_token="<eos>")


def hidden_states(model: LoadedModel, recipe: str = "fp32", backend: str = "cpu") -> np.ndarray:
    """float32 [useful tokens, dim] of a packed batch."""
    batch = packed_batch(model.hyperparameters.vocab_size)
    weights = FrozenWeights(model, RECIPES[recipe].compute, backend)
    bindings = {"T": len(batch.tokens), "D": len(batch.doc_starts)}
    graph, program = loss_program(
        model, RECIPES[recipe], weights, bindings, max_positions=len(batch.tokens), output="hidden")
    session = weights.open_session(graph, program, threads=1)
    for name in ("tokens", "positions", "doc_starts"):
        session.write(name, getattr(batch, name))
    session.run("forward")
    hidden = session.read("hidden")[:batch.useful_tokens]
    return bf16_to_f32(hidden) if hidden.dtype == np.uint16 else hidden


def theirs(reference) -> list[torch.Tensor]:
    """[tokens, dim] of each document by itself."""
    batch = packed_batch(CONFIG["vocab_size"])
    with torch.no_grad():
        return [reference(torch.from_numpy(batch.tokens[part].astype(np.int64))[None]).last_hidden_state[0]
                for part in document_ranges(batch)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_of_packed_documents(folder, reference, backend):
    got = hidden_states(LoadedModel.open(folder, [FAMILY]), backend=backend)
    assert relative_error(got, torch.cat(theirs(reference)).numpy()) < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_in_bf16_are_as_near_to_the_truth_as_torchs(folder, reference, backend):
    exact = torch.cat(theirs(reference)).numpy()
    got = hidden_states(LoadedModel.open(folder, [FAMILY]), "bf16", backend)
    rounded = torch.cat(theirs(copy.deepcopy(reference).bfloat16())).float().numpy()
    assert np.abs(got - exact).mean() < 1.25 * np.abs(rounded - exact).mean()


def test_the_reference_sees_ahead_and_no_further_than_its_windows(reference):
    """Else the comparison would prove little."""
    expected = theirs(reference)
    with torch.no_grad():
        reference.config.use_bidirectional_attention = False
        try:
            assert relative_error(torch.cat(theirs(reference)).numpy(), torch.cat(expected).numpy()) > 0.1
        finally:
            reference.config.use_bidirectional_attention = True


class WithHead(torch.nn.Module):
    """The reference as the parity harness asks: the embeddings are its head too."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        logits = self.inner(ids).last_hidden_state @ self.inner.embed_tokens.weight.T
        scale = self.inner.config.hidden_size**-0.5
        return SimpleNamespace(logits=logits * scale)

    def named_parameters(self, *args, **kwargs):
        return self.inner.named_parameters(*args, **kwargs)


class FamilyWithHead(EmbeddingGemmaFamily):
    def model(self, h):
        model = super().model(h)
        model.lm_head = LMHead(h.hidden_size, h.vocab_size, model.embed, logit_scale=h.hidden_size**-0.5)
        return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(folder, reference, backend):
    """Of a loss that the model does not have, through all of its layers: attention both ways has a gradient like any other."""
    parity = replace(Parity.of(FamilyWithHead(), WithHead(reference), folder), backend=backend)
    errors = parity.gradient_errors()
    assert len(errors) == 1 + 2 + 4 * 13 and max(errors.values()) < 1e-4, errors


def test_what_the_files_say_of_vectors(folder):
    model = LoadedModel.open(folder, [FAMILY])
    embedding = model.embedding
    assert (embedding.pooling, embedding.normalized, embedding.sizes) == ("mean", True, (64, 24))
    assert embedding.prompts == PROMPTS and embedding.width(64) == 64
    assert not model.writes_text


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_as_served(folder, reference, layers, backend):
    """Through the engine of the server, where that is installed: texts side by side, in fp32."""
    serve = pytest.importorskip("surogate_serve", reason="needs the server: pip install ./plugins/surogate-serve")
    options = serve.EngineOptions(recipe="fp32", backend=backend, threads=1, max_sequences=2)
    model = serve.ServedModel.open(folder, options=options)
    try:
        batch = packed_batch(CONFIG["vocab_size"])
        vectors = asyncio.run(model.embed([batch.tokens[part].tolist() for part in document_ranges(batch)]))
    finally:
        model.close()
    with torch.no_grad():
        dense = layers(torch.stack([each.mean(dim=0) for each in theirs(reference)]))
    for size in (64, 24):
        expected = torch.nn.functional.normalize(dense[:, :size], dim=1).numpy()
        np.testing.assert_allclose(shaped(vectors, size, True), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["again", "again.gguf"])
def test_export_and_back(folder, tmp_path, name):
    export.export(folder, tmp_path / name, "f32" if name.endswith("gguf") else None)
    before, after = LoadedModel.open(folder, [FAMILY]), LoadedModel.open(tmp_path / name, [FAMILY])
    assert after.family is FAMILY and after.embedding.pooling == "mean" and after.embedding.normalized
    assert after.embedding.finished(np.eye(64, dtype=np.float32)).shape == (64, 64)
    tolerance = 1e-6 if name.endswith("gguf") else 0.05  # a folder is written in bf16
    assert relative_error(after.embedding._linear[0], before.embedding._linear[0]) < tolerance
    assert relative_error(hidden_states(after), hidden_states(before)) < tolerance
    if not name.endswith("gguf"):
        assert after.hyperparameters == before.hyperparameters
        assert (after.embedding.prompts, after.embedding.sizes) == (PROMPTS, (64, 24))
        again = transformers.AutoModel.from_pretrained(tmp_path / name, attn_implementation="eager", dtype=torch.float32)
        assert again.config.use_bidirectional_attention and again.config.sliding_window == 3
        assert relative_error(hidden_states(after), torch.cat(theirs(again)).numpy()) < 2e-5


def test_what_is_refused(folder):
    with pytest.raises(WeightError, match="use_bidirectional_attention is None"):
        FAMILY.from_hf({key: value for key, value in CONFIG.items() if key != "use_bidirectional_attention"})
    model = LoadedModel.open(folder, [FAMILY])
    weights = FrozenWeights(model, "f32")
    with pytest.raises(WeightError, match="no head that writes text"):
        loss_program(model, RECIPES["fp32"], weights, {"T": 8, "D": 2}, max_positions=8)


def test_training_says_so_before_anything_starts(folder, tmp_path):
    from surogate_core.cli.options import read_config
    from surogate_core.train.prepare import prepare

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    config = f"model: {folder}\ndatasets: [rows.jsonl]\noutput_dir: {tmp_path}/out\nsequence_len: 16\n"
    (tmp_path / "run.yaml").write_text(config)
    with pytest.raises(ConfigError, match="no head that writes text"):
        prepare(read_config(tmp_path / "run.yaml", None, "pt"), "pt")
    assert not (tmp_path / "out").exists()


def test_sizes_of_released_checkpoints(folder):
    """They do not say them: they are the family's, where vectors are as long."""
    model = LoadedModel.open(folder, [FAMILY])
    sizes = FAMILY.embedding_sizes(model.hyperparameters)
    assert model.embedding.with_sizes(sizes, 64).sizes == (64,)
    assert Embedding().with_sizes(sizes, 768).sizes == (768, 512, 256, 128)
