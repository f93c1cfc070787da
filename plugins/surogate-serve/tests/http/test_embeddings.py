"""A model without a head behind /v1/embeddings, through the official client, beside transformers and torch; what a model
says of its vectors, and what it cannot be asked for."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from conftest import Running
from fake import FakeModel
from surogate_gemma.embedding import EmbeddingGemmaFamily

from surogate_core.errors import ConfigError
from surogate_core.model import initial_values
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.embedding import Dense, Embedding
from surogate_core.weights.export import write_hf
from surogate_core.weights.sentence_transformers import write_modules
from surogate_core.weights.tensor import from_f32
from surogate_serve.engine import EngineOptions
from surogate_serve.http.limits import Settings
from surogate_serve.models import ServedModel
from surogate_serve.types import Refused

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True,
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "max_position_embeddings": 256, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
PROMPTS = {"query": "find: ", "document": "text: "}
SIZES = [24, 16, 8]
TEXTS = ["a", "Several words, of which none stands alone.", "x" * 200, "käse und brot"]
OPTIONS = EngineOptions(recipe="fp32", threads=1)


def write_tiny(folder: Path) -> Path:
    """A random embedding model of 24 dimensions, as sentence-transformers keeps it."""
    family, generator = EmbeddingGemmaFamily(), np.random.default_rng(1)
    h = family.from_hf(CONFIG)
    parameters = {}
    for name, parameter in family.model(h).parameters():
        array = initial_values(name, parameter.shape, parameter, 7)
        parameters[name] = from_f32(name, array * np.float32(8.0) if array.ndim > 1 else array)
    config = {**family.hf_config(h), "matryoshka_dimensions": SIZES}
    write_hf(folder, family.hf_names(h).export(parameters), config, dtype="f32")
    weights = (generator.standard_normal(shape).astype(np.float32) for shape in ((40, 32), (24, 40)))
    dense = [Dense(from_f32("w", weight)) for weight in weights]
    write_modules(folder, Embedding("mean", tuple(dense), prompts=PROMPTS), 32, "f32")
    return write_byte_tokenizer(folder, ["<pad>", "<bos>", "<eos>"], eos_token="<eos>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("vectors") / "tiny")


@pytest.fixture(scope="module")
def running(folder):
    model = ServedModel.open(folder, "tiny", OPTIONS)
    server = Running([model], Settings())
    yield server
    server.stop()
    model.close()


@pytest.fixture(scope="module")
def client(running):
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def post(server, path, **body):
    return httpx.post(server.url + path, json={"model": "tiny"} | body, timeout=60)


@pytest.fixture(scope="module")
def expected(folder):
    """expected(texts, size): vectors of transformers' model, each text by itself, and torch's layers."""
    why = "compares with transformers: pip install 'surogate-core[test]'"
    torch = pytest.importorskip("torch", reason=why)
    transformers = pytest.importorskip("transformers", reason=why)
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert type(model).__name__ == "Gemma3TextModel"
    layers = [load_file(folder / name / "model.safetensors")["linear.weight"] for name in ("2_Dense", "3_Dense")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def vectors(texts: list[str], size: int = 24) -> np.ndarray:
        rows = []
        with torch.no_grad():
            for text in texts:
                row = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(dim=0)
                for layer in layers:
                    row = layer @ row
                rows.append(torch.nn.functional.normalize(row[:size], dim=0).numpy())
        return np.stack(rows)

    return vectors


def asked(client, texts, **fields) -> np.ndarray:
    return np.array([row.embedding for row in client.embeddings.create(model="tiny", input=texts, **fields).data])


def test_vectors_of_the_official_client(client, expected):
    np.testing.assert_allclose(asked(client, TEXTS), expected(TEXTS), atol=2e-5)
    for size in (16, 8):
        np.testing.assert_allclose(asked(client, TEXTS, dimensions=size), expected(TEXTS, size), atol=2e-5)
    alone = np.concatenate([asked(client, text) for text in TEXTS])
    np.testing.assert_allclose(alone, asked(client, TEXTS), atol=1e-6)
    assert not np.allclose(alone[0], alone[1], atol=0.05)


def test_floats_token_ids_and_usage(running, client):
    given = post(running, "/v1/embeddings", input=TEXTS, encoding_format="float").json()
    assert [row["index"] for row in given["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose([row["embedding"] for row in given["data"]], asked(client, TEXTS), atol=1e-7)
    ids = [post(running, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    assert given["usage"]["prompt_tokens"] == sum(map(len, ids))
    np.testing.assert_allclose(asked(client, ids), asked(client, TEXTS), atol=1e-7)


def test_sizes_that_the_model_does_not_have(client):
    for size in (12, 25, 1024):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.embeddings.create(model="tiny", input="a", dimensions=size)
        assert refusal.value.param == "dimensions" and "24, 16, 8" in refusal.value.message
    assert asked(client, "a", dimensions=24).shape == (1, 24)


def test_prompts_of_the_model(running, client):
    named = {"prompt_name": "query"}
    expected = asked(client, [PROMPTS["query"] + text for text in TEXTS[:2]])
    np.testing.assert_allclose(asked(client, TEXTS[:2], extra_body=named), expected, atol=1e-6)
    wrong = (({"input": "a", "prompt_name": "chat"}, "query, document"), ({"input": [5], **named}, "token ids"))
    for body, says in wrong:
        error = post(running, "/v1/embeddings", **body).json()["error"]
        assert (error["param"], error["type"]) == ("prompt_name", "invalid_request_error") and says in error["message"]


def test_pooling_and_length_may_be_asked_for(running):
    whole = post(running, "/v1/embeddings", input="abc", normalize=False).json()["data"][0]["embedding"]
    assert abs(np.linalg.norm(whole) - 1) > 0.1
    first, last = (post(running, "/v1/embeddings", input="abc", pooling=each).json()["data"][0]["embedding"]
                   for each in ("cls", "last"))
    assert not np.allclose(first, last, atol=0.01)
    only = [post(running, "/v1/embeddings", input="a", pooling=each).json()["data"][0]["embedding"]
            for each in ("cls", "mean")]
    np.testing.assert_allclose(*only, atol=1e-6)
    too_long = post(running, "/v1/embeddings", input="x" * 257)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
])
def test_what_it_cannot_write_is_refused(running, path, body):
    answer = post(running, path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert "makes vectors of texts and cannot write any" in error["message"]


def test_what_is_told_of_it(running, client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.tasks, listed.max_model_len) == ("tiny", ["embed"], 256)
    assert listed.embedding == {
        "dimensions": 24, "sizes": SIZES, "pooling": "mean", "normalized": True, "prompts": PROMPTS,
        "max_input_tokens": 256,
    }
    for path in ("/health", "/ready", "/metrics", "/stats", "/"):
        assert httpx.get(running.url + path).status_code == 200, path


def test_no_program_that_decodes_is_opened(folder, monkeypatch):
    """It would need a cache; and adapters have nothing to go to."""
    from surogate_core.engine import serving
    from surogate_serve.engine.runtime import Runtime

    for kind in (Runtime, serving.Loop):
        monkeypatch.setattr(kind, "__init__", lambda *_, **__: pytest.fail("a model without a head got one"))
    model = ServedModel.open(folder, "tiny", OPTIONS)
    assert not model.writes_text and model.context == 256 and model.drain(0.0)
    model.close()
    with pytest.raises(ConfigError, match="takes no adapters"):
        ServedModel.open(folder, "tiny", OPTIONS, {"more": folder})
    with pytest.raises(ConfigError, match="context is 300"):
        ServedModel.open(folder, "tiny", EngineOptions(context=300))


def test_bits_do_not_depend_on_the_batch_where_that_is_asked_for(folder):
    model = ServedModel.open(folder, "tiny", EngineOptions(recipe="fp32", threads=2, batch_invariant=True))
    prompts = [model.tokenizer.encode(text) for text in TEXTS]
    together = asyncio.run(model.embed(prompts))
    apart = np.concatenate([asyncio.run(model.embed([prompt])) for prompt in prompts])
    assert np.array_equal(together, apart)


def test_the_other_faces_say_what_it_is(folder):
    from surogate_serve.llm import LLM
    from surogate_serve.parity import compare

    with LLM(folder, options=OPTIONS) as llm, pytest.raises(Refused, match="cannot write any"):
        llm.generate("hi")
    with pytest.raises(ConfigError, match="no text to compare"):
        compare(folder, None, False, OPTIONS)


def test_prompts_that_are_always_meant_and_files_that_say_less(folder, tmp_path, serve):
    """Defaults of the files are used; without any, the mean is taken and normalised."""
    model = FakeModel()
    model.vectors = SimpleNamespace(
        embedding=Embedding(normalized=False, prompts={"any": "one "}, default_prompt="any"), width=4, longest=9)
    server = serve(model)
    answer = httpx.post(server.url + "/v1/embeddings", json={"input": ["two", [17, 18]]}).json()
    assert answer["usage"]["prompt_tokens"] == 2 + 2  # the prompt is a word; token ids have none
    assert httpx.post(server.url + "/v1/embeddings", json={"input": [17] * 10}).status_code == 400
    short = Path(shutil.copytree(folder, tmp_path / "short"))
    (short / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    assert ServedModel.open(short, "short", OPTIONS).context == 100
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    (bare / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["matryoshka_dimensions"]
    (bare / "config.json").write_text(json.dumps(config))
    vectors = ServedModel.open(bare, "bare", OPTIONS).vectors
    assert (vectors.width, vectors.embedding.pooling, vectors.embedding.normalized) == (32, "mean", True)
