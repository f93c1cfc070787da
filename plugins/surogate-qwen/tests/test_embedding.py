"""Qwen3-Embedding: the last token's hidden state, which is that of the end that its tokenizer appends; beside transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from surogate_qwen.family import FAMILIES

from surogate_core.engine import cuda
from surogate_core.model import LoadedModel
from surogate_core.testing.tiny import write_byte_tokenizer, write_sentence_modules
from surogate_core.weights.embedding import shaped

torch = pytest.importorskip("torch", reason="compares with torch: pip install 'surogate-core[test]'")
transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")

NO_DEVICE = pytest.mark.skipif(bool(cuda.unavailable()), reason=str(cuda.unavailable()))
BACKENDS = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_DEVICE])]
END = "<|endoftext|>"
CONFIG = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True,
}
TEXTS = ["a", "Instruct: Find what answers it\nQuery: how far is the moon?", "Der Mond ist 384 400 km entfernt.", "x" * 90]


def append_end(folder: Path) -> None:
    """What the published tokenizer does: a template that puts the end behind every text."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    (number,) = (token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": END, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [number], "tokens": [END]}},
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "body_alone"])
def folder(request, tmp_path_factory) -> Path:
    """Files named as those that were published: the body without a prefix under the name of the whole. tied: its
    embeddings would be a head's weight, as in the smallest one; the larger ones have none."""
    path = tmp_path_factory.mktemp("qwen") / "embedding"
    torch.manual_seed(4)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": request.param}
    (path / "config.json").write_text(json.dumps(config))
    write_sentence_modules(path, 32, "lasttoken", "Normalize")
    write_byte_tokenizer(path, [END], eos_token=END)
    append_end(path)
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_as_served(folder, backend):
    """Through the engine of the server, where that is installed: texts side by side, in fp32."""
    serve = pytest.importorskip("surogate_serve.models", reason="needs the server: pip install ./plugins/surogate-serve")
    options = serve.EngineOptions(recipe="fp32", backend=backend, threads=1, kv_memory=64 << 20, max_sequences=2)
    model = serve.ServedModel.open(folder, "qwen", options)
    try:
        assert model.vectors.embedding.pooling == "last" and model.vectors.embedding.normalized
        ids = [model.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        vectors = asyncio.run(model.embed(ids))
    finally:
        model.close()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert ids == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert {each[-1] for each in ids} == {tokenizer.convert_tokens_to_ids(END)}
    reference = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        states = [reference(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    for size in (32, 8):
        expected = [torch.nn.functional.normalize(each[:size], dim=0).numpy() for each in states]
        np.testing.assert_allclose(shaped(vectors, size, True), np.stack(expected), atol=2e-5)


def test_whether_it_writes_text(folder):
    """A tied model has its head in its embeddings, whatever it was trained for; of an untied one there is only the body."""
    model = LoadedModel.open(folder, FAMILIES)
    assert model.writes_text == model.hyperparameters.tied
    assert model.embedding.sizes == ()  # vectors may be cut to any length
