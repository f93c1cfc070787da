"""The plugin as a user gets it: found by its entry point, its kernels right, and a tiny model of its family learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.errors import WeightError
from surogate_core.ops import conformance, get
from surogate_core.ops.gradient_check import check_gradient
from surogate_core.plugins import get_manager
from surogate_core.testing.tiny import write_byte_tokenizer

CONFIG = {
    "architectures": ["TidyForCausalLM"],
    "model_type": "tidy",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}
SENTENCE = "the quick brown fox jumps over the lazy dog and naps. "


@pytest.fixture(scope="module")
def manager():
    manager = get_manager()
    manager.require("surogate-tidy")
    manager.load_kernels()
    return manager


def test_everything_is_registered_under_this_distribution(manager):
    report = manager.require("surogate-tidy")
    assert report.provides == {
        "surogate_families": ["tidy"],
        "surogate_ops": ["relu2", "relu2_grad"],
        "surogate_kernel_libraries": ["tidy"],
    }
    assert manager.ops.source("relu2") == f"surogate-tidy {report.version}"


@pytest.mark.parametrize("op", ["relu2", "relu2_grad"])
def test_the_kernel_agrees_with_the_reference(manager, op):
    (kernel,) = [kernel for kernel in engine.kernels() if kernel["op"] == op]
    assert kernel["name"] == "tidy" and kernel["deterministic"]
    cases = conformance.cases(get(op))
    verdict = conformance.check_kernel(kernel, cases)
    assert not verdict.problems, "\n".join(verdict.problems)
    assert len(verdict.supported) == len(cases)


def test_the_gradient_rule_agrees_with_finite_differences(manager):
    op = get("relu2")
    for sample in op.samples(np.random.default_rng(0))[:3]:
        assert not check_gradient(op, sample, ("x",), np.random.default_rng(1))


def test_a_config_is_read_whole_or_refused(manager):
    family = manager.families["tidy"]
    hyperparameters = family.from_hf(CONFIG)
    assert family.from_hf(family.hf_config(hyperparameters)) == hyperparameters
    with pytest.raises(WeightError, match="no setting 'mlp_gate'"):
        family.from_hf({**CONFIG, "mlp_gate": True})
    with pytest.raises(WeightError, match="lacks 'hidden_size'"):
        family.from_hf({key: value for key, value in CONFIG.items() if key != "hidden_size"})


def test_a_tiny_model_trains_from_a_config_file(tmp_path):
    write_byte_tokenizer(tmp_path / "tokenizer", ["<|end|>"], eos_token="<|end|>")
    rows = [json.dumps({"text": SENTENCE * 4}) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {
        "from_scratch": True,
        "architecture": CONFIG,
        "tokenizer": "tokenizer",
        "datasets": ["text.jsonl"],
        "sequence_len": 128,
        "overlong": "split",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 40,
        "num_epochs": 10,
        "learning_rate": 0.005,
        "plugins": ["surogate-tidy"],
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    surogate = Path(sys.executable).with_name("surogate")
    done = subprocess.run(
        [surogate, "pt", "config.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses[0] > 4.5, "at first, every byte is about as likely as any other"
    assert losses[-1] < 1.0, "a sentence that repeats is soon known"
