"""Tiny models that the tests of the engine serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surogate_llama.family import LlamaFamily

from surogate_core.model import initial_values
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.export import write_hf
from surogate_core.weights.peft_adapter import Adapter, LoraPair, write_adapter
from surogate_core.weights.tensor import StoredTensor

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": True,
}
FAMILY = LlamaFamily("llama", "LlamaForCausalLM", ("llama",))


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """A random model that answers with more than noise."""
    h = FAMILY.from_hf({**ARCHITECTURE, **changes})
    parameters = {}
    for name, parameter in FAMILY.model(h).parameters():
        array = initial_values(name, parameter.shape, parameter, 7)
        array = array * np.float32(4.0) if array.ndim > 1 else array
        parameters[name] = StoredTensor(name, "f32", parameter.shape, np.ascontiguousarray(array, np.float32))
    write_hf(folder, FAMILY.hf_names(h).export(parameters), FAMILY.hf_config(h), dtype="f32")
    return write_byte_tokenizer(folder, SPECIAL, merges=[("t", "h")], eos_token="<|im_end|>", chat_template=TEMPLATE)


def write_tiny_adapter(folder: Path, seed: int, rank: int = 4, layers: int = 2, **changes: Any) -> Path:
    """Random pairs for q and down of every layer, large enough to change every answer."""
    h = FAMILY.from_hf({**ARCHITECTURE, **changes})
    generator = np.random.default_rng(seed)
    pairs = {}
    for name, parameter in FAMILY.model(h).parameters():
        if parameter.role in ("attn.q", "mlp.down"):
            out, width = parameter.shape
            a, b = (generator.standard_normal(shape).astype(np.float32) * 0.5 for shape in ((rank, width), (out, rank)))
            pairs[name] = LoraPair(a, b, 2.0)
    write_adapter(folder, Adapter(pairs, "tiny"), FAMILY.hf_names(h), layers)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny chat model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def write_tiny() -> Callable[..., Path]:
    """`write_tiny_model`."""
    return write_tiny_model


@pytest.fixture(scope="session")
def write_adapter_for() -> Callable[..., Path]:
    """`write_tiny_adapter`."""

    def write(folder: Path, seed: int, rank: int = 4, **changes: Any) -> Path:
        return write_tiny_adapter(folder, seed, rank, **changes)

    return write


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders of adapters of that model, by seed."""
    root = tmp_path_factory.mktemp("adapters")

    def make(seed: int, rank: int = 4) -> Path:
        folder = root / f"{seed}-{rank}"
        return folder if folder.exists() else write_tiny_adapter(folder, seed, rank)

    return make
