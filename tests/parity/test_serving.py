"""Every variant of every installed family, served: the server says to the bit what the trainer's forward pass says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate_core.model import initial_values
from surogate_core.testing.parity import installed_family
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.export import write_hf
from surogate_core.weights.tensor import from_f32

from .variants import Case, cases

pytest.importorskip("surogate_serve", reason="serves models: pip install surogate-serve")

VOCAB = 264
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(case: Case, folder: Path) -> Path:
    """Random weights loud enough for answers to be more than noise; room for the conversations."""
    family = installed_family(case[0])
    config = dict(family.tiny_configs()[case[1]])
    config |= {key: VOCAB for key in config if key.startswith("vocab_size")} | {"max_position_embeddings": 1024}
    h = family.from_hf(config)
    parameters = {}
    for name, parameter in family.model(h).parameters():
        array = np.asarray(initial_values(name, parameter.shape, parameter, 7), np.float32)
        parameters[name] = from_f32(name, array * np.float32(4 if array.ndim > 1 else 1))
    write_hf(folder, family.hf_names(h).export(parameters), family.hf_config(h), dtype="f32")
    return write_byte_tokenizer(folder, SPECIAL, merges=[("t", "h")], eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_the_server_says_what_the_trainer_says(case, tmp_path):
    from surogate_serve.engine import EngineOptions
    from surogate_serve.parity import compare

    options = EngineOptions(recipe="fp32", threads=1, max_sequences=4, kv_memory=4 << 20, batch_invariant=True)
    for row in compare(checkpoint(case, tmp_path / "model"), None, False, options, 8):
        assert (row.tokens, row.differ, row.largest) == (48, 0, 0.0), row.name
