"""Whole runs on the fake device: LoRA on a quantised base and on a plain one, with evaluation, from the config to losses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.model import LoadedModel, binding
from surogate_core.plugins import Backend, get_manager
from surogate_core.program.format import from_bytes
from surogate_core.train.explain import fast_paths
from surogate_core.train.run import PROGRAM_FILE
from surogate_core.weights.export import write_gguf

from ..train import runs


@pytest.fixture
def root(device, tmp_path: Path) -> Iterator[Path]:
    """A folder with a tiny quantised model and 24 chats; backend "fake" can be named in configs."""
    manager = get_manager()
    runs.write_model(tmp_path / "model")
    loaded = LoadedModel.open(tmp_path / "model", manager.families.values())
    parameters = {name: loaded.names.load(loaded.store, name) for name, _ in loaded.dsl().parameters()}
    family, h = loaded.family, loaded.hyperparameters
    write_gguf(tmp_path / "model.gguf", family.gguf_names(h).export(parameters), family.gguf_metadata(h), dtype="q8_0")
    runs.write_rows(tmp_path / "chat.jsonl", runs.chats(24))
    (tmp_path / "template.jinja").write_text(runs.TEMPLATE)
    manager.backends.register("fake", Backend("fake", Path("fake_device.c")), "tests")
    yield tmp_path
    manager.backends.withdraw(["fake"])


def settings(root: Path, out: str, **changes):
    keys = dict(model=str(root / "model.gguf"), tokenizer=str(root / "model"),
                chat_template=str(root / "template.jinja"),
                output_dir=str(root / out), recipe="bf16", backend="fake", validation_split=0.2, eval_steps=3)
    return runs.config(root, **{**keys, **changes})


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in runs.records(folder)]


def test_a_run(root):
    """The CPU's losses, about; and bit for bit the same when launched call by call, and with some of it recomputed."""
    whole = runs.prepare(settings(root, "out"), "sft")
    tight = whole.plan.resident_bytes + whole.evaluation_bytes - whole.plan.saved_bytes[0] // 8
    again = runs.prepare(settings(root, "out", memory_budget=tight), "sft").plan
    assert again.saved_bytes[1] < whole.plan.saved_bytes[0]
    ways = {"cpu": {"backend": "cpu"}, "fake": {}, "calls": {"cuda_graphs": False}, "again": {"memory_budget": tight}}
    for out, changes in ways.items():
        assert runs.run(settings(root, out, **changes)).status == "completed"
    assert losses(root / "fake")[-1] < losses(root / "fake")[0]
    left = from_bytes((root / "fake" / PROGRAM_FILE).read_bytes())
    assert left.instructions == whole.plan.program.instructions and not (root / "cpu" / PROGRAM_FILE).exists()
    np.testing.assert_allclose(losses(root / "fake"), losses(root / "cpu"), rtol=2e-2)
    for other in ("calls", "again"):
        assert runs.course(root / other) == runs.course(root / "fake")


@pytest.mark.parametrize("recipe", ["bf16", "pure_bf16"])
def test_a_run_with_adapters_inside_products(root, recipe, monkeypatch):
    """The CPU's losses, about; and bit for bit the same call by call, recomputed in part, and stopped and gone on with."""
    monkeypatch.setattr(binding, "WRITTEN_AT_ONCE", 3000)  # several pieces, the last of them short
    keys = {"model": str(root / "model"), "tokenizer": None, "chat_template": None, "recipe": recipe, "lora_rank": 8,
            "max_steps": 6, "save_steps": 3}
    whole = runs.prepare(settings(root, "fake", **keys), "sft")
    assert whole.plan.widened == {"attn.q_k_v.wide", "attn.o.wide", "mlp.gate_up.wide", "mlp.down.wide"}
    tight = whole.plan.resident_bytes + whole.evaluation_bytes - whole.plan.saved_bytes[0] // 4
    ways = {"cpu": {"backend": "cpu"}, "fake": {}, "calls": {"cuda_graphs": False}, "again": {"memory_budget": tight}}
    for out, changes in ways.items():
        assert runs.run(settings(root, out, **keys, **changes)).status == "completed"
    assert losses(root / "fake")[-1] < losses(root / "fake")[0]
    left = from_bytes((root / "fake" / PROGRAM_FILE).read_bytes())
    assert left.instructions == whole.plan.program.instructions and not (root / "cpu" / PROGRAM_FILE).exists()
    np.testing.assert_allclose(losses(root / "fake"), losses(root / "cpu"), rtol=2e-2)
    course, state = runs.course(root / "fake"), runs.final_state(root / "fake")
    for other in ("calls", "again"):
        assert runs.course(root / other) == course
    shutil.rmtree(root / "fake" / "step_00000006")
    runs.run(settings(root, "fake", **keys, resume_from_checkpoint=True))
    assert runs.final_state(root / "fake") == state and runs.course(root / "fake")[-3:] == course[-3:]


def test_explain(root):
    for backend, on, why in (("fake", True, "decoded to bf16 while the product before runs"),
                             ("cpu", False, "backend cpu decodes blocks inside its products")):
        prepared = runs.prepare(settings(root, "out", backend=backend), "sft")
        planned = engine.plan(prepared.plan.program.to_bytes(), backend)
        path = next(p for p in fast_paths(prepared, planned) if p[0] == "quantised weights prefetched")
        assert path[1] is on and why in path[2]
