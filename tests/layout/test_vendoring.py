"""The core copied, with its native library, into another package under another name: it imports, runs and trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import surogate_core
from surogate_core.testing.tiny import write_byte_tokenizer

CORE = Path(surogate_core.__file__).parent
NAME = "acme._vendor.engine_core"

# Whoever reaches back to the public core by name is stopped, though it is installed beside the copy.
PREAMBLE = """
import sys

class NoPublicCore:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "surogate_core":
            raise ImportError(f"a vendored core imports {name}")

sys.meta_path.insert(0, NoPublicCore())
sys.path.insert(0, sys.argv[1])
"""


@pytest.fixture(scope="module")
def vendored(tmp_path_factory) -> Path:
    """A folder holding the package `acme`, with a copy of the core inside."""
    root = tmp_path_factory.mktemp("vendored")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CORE, root.joinpath(*NAME.split(".")), ignore=ignore)
    for package in ("acme", "acme/_vendor"):
        (root / package / "__init__.py").touch()
    return root


def run(root: Path, program: str, *arguments: str) -> str:
    source = PREAMBLE + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, str(root), *arguments], capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_under_the_new_name(vendored):
    output = run(
        vendored,
        f"""
        import importlib, pkgutil
        package = importlib.import_module("{NAME}")
        names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print(*names, sep="\\n")
        """,
    )
    names = output.split()
    assert f"{NAME}._native" in names and f"{NAME}.plugins.manager" in names and len(names) > 20


def test_the_copy_runs_kernels_of_its_own_library(vendored):
    output = run(
        vendored,
        f"""
        import numpy
        from {NAME} import engine
        x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(4, 16)
        weight, y, rstd = numpy.ones(16, "f4"), numpy.empty_like(x), numpy.empty(4, "f4")
        engine.run_op("rms_norm", [x, weight], [y, rstd], {{"eps": 0.0}})
        numpy.testing.assert_allclose((y * y).mean(axis=1), 1.0, rtol=1e-5)
        print(*(library["origin"] for library in engine.libraries()))
        """,
    )
    assert all(Path(origin).is_relative_to(vendored) for origin in output.split()) and output.strip()


def test_the_copy_listens_to_entry_points_of_its_own(vendored):
    """Plugins installed for the public core are made of its classes, not of the copy's."""
    output = run(
        vendored,
        f"""
        from {NAME}.plugins import get_manager
        from {NAME}.plugins.manager import ENTRY_POINT_GROUP
        print(ENTRY_POINT_GROUP, [report.distribution for report in get_manager().report()])
        """,
    )
    assert output.strip() == f"{NAME} ['{NAME}']"


def vendor_family(root: Path) -> None:
    """Copies the Llama plugin beside the core, its imports rewritten, as whoever vendors a package does."""
    import surogate_llama

    source = Path(surogate_llama.__file__).parent
    target = root / "acme" / "_vendor" / "surogate_llama"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in target.rglob("*.py"):
        text = path.read_text(encoding="utf-8").replace("surogate_core", NAME)
        path.write_text(text.replace("from surogate_llama", "from acme._vendor.surogate_llama"), encoding="utf-8")


def test_the_copy_trains(vendored, tmp_path):
    vendor_family(vendored)
    write_byte_tokenizer(tmp_path / "tokenizer", ["<|end|>"], eos_token="<|end|>")
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": "round and round " * 8}) + "\n") * 8)
    config = {
        "from_scratch": True,
        "architecture": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        },
        "tokenizer": "tokenizer", "datasets": ["text.jsonl"], "sequence_len": 128, "overlong": "split",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 2, "learning_rate": 0.01,
        "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    run(
        vendored,
        f"""
        from {NAME}.cli.app import app
        from {NAME}.plugins import get_manager
        from acme._vendor import surogate_llama
        get_manager().register(surogate_llama, "surogate-llama")
        app(["pt", sys.argv[2]])
        """,
        str(tmp_path / "config.yaml"),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
