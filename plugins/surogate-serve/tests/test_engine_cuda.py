"""A served model on a CUDA device: beside the trainer there, and beside itself in other batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from surogate_core.engine import cuda
from surogate_core.export import export
from surogate_serve import EngineOptions, Generation, Sampling, ServedModel
from surogate_serve.parity import compare

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(cuda.unavailable()), reason=str(cuda.unavailable()))]
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "max_position_embeddings": 1024}
OPTIONS = EngineOptions(backend="cuda", context=512, max_sequences=16, kv_memory=64 << 20, token_budget=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_tiny) -> Path:
    return write_tiny(tmp_path_factory.mktemp("cuda") / "model", **SHAPE)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, write_adapter_for) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cuda-adapters")
    return {name: write_adapter_for(root / name, seed, 8, **SHAPE) for seed, name in enumerate(("one", "two"))}


@pytest.mark.parametrize(("recipe", "bound"), [("fp32", 2e-3), ("bf16", 0.5)])
@pytest.mark.parametrize("adapted", [False, True])
def test_what_the_trainer_says_within_rounding(folder, adapters, recipe, bound, adapted):
    options = EngineOptions(backend="cuda", recipe=recipe, max_sequences=8, kv_memory=64 << 20)
    for row in compare(folder, adapters["one"] if adapted else None, False, options, 16):
        assert row.tokens == 96 and row.largest < bound, row
        assert row.mean < bound / 10, row


def answers(model: ServedModel, prompts: list[list[int]], names: list[str | None]) -> list[list[tuple[int, float]]]:
    generations = [
        Generation(prompt, max_tokens=40, sampling=Sampling(temperature=0.0), ignore_eos=True, logprobs=1, adapter=name)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    for index, delta in model.generate_many(generations):
        assert delta.error is None
        found[index] += [(one.token, one.logprob) for one in delta.logprobs or ()]
    return found


@pytest.mark.parametrize("dtype", ["bf16", "q8_0", "q4_1"])
def test_batches_caches_and_adapters(folder, adapters, tmp_path, dtype):
    """The same requests alone, all at once, and from the cache: as long as two agree on the tokens, they agree on what
    these are worth. Steps of few tokens look up embeddings in blocks, others in a copy that is rounded to bf16: of a model as
    small as this, that alone is worth half of a log-probability now and then."""
    path = folder
    if dtype != "bf16":
        path = tmp_path / "model.gguf"
        export(folder, path, dtype)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 256, length).tolist() for length in (1, 17, 64, 100, 200, 300, 33, 5, 90, 2, 16, 48)]
    names = [None, "one", "two"] * 4
    model = ServedModel.open(path, options=OPTIONS, adapters=adapters)
    try:
        alone = [answers(model, [prompt], [name])[0] for prompt, name in zip(prompts, names, strict=True)]
        for again in (answers(model, prompts, names), answers(model, prompts, names)):
            for index, (one, other) in enumerate(zip(alone, again, strict=True)):
                same = next((i for i in range(40) if one[i][0] != other[i][0]), 40)
                assert same > 0, f"request {index} begins otherwise"
                apart = np.abs(np.subtract([p for _, p in one[:same]], [p for _, p in other[:same]]))
                assert apart.max() < (0.3 if dtype == "bf16" else 0.8) and apart.mean() < 0.06, index
        assert model.stats()["cached_tokens"] > 0
        vectors = asyncio.run(model.embed(prompts))
        apart = np.concatenate([asyncio.run(model.embed([prompt])) for prompt in prompts])
        np.testing.assert_allclose(vectors, apart, atol=0.1 * np.abs(apart).max())
    finally:
        model.close()
