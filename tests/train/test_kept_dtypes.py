"""Masters and optimizer states in bf16: what is kept, that it learns, that it goes on bit for bit, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core.errors import ConfigError, TrainingError
from surogate_core.model import training_program
from surogate_core.train import checkpoint as checkpoints
from surogate_core.train.prepare import checkpoint_bytes, prepare
from surogate_core.train.session import TrainSession
from surogate_core.weights.safetensors_file import SafetensorsFile

from . import runs
from .test_resume import stop_after

BF16 = {"recipe": "bf16", "optimizer_state_dtype": "bf16", "master_dtype": "bf16"}
FULL = {"lora": False, "learning_rate": 1e-3}
KINDS = {"lora": {}, "full": FULL}


def arenas(root, **changes) -> dict[str, int]:
    """Bytes by arena, as planned."""
    return {a.name: a.bytes for a in prepare(runs.config(root, **changes), "sft").plan.program.arenas}


def kept(folder) -> dict[str, str]:
    """Dtypes in the newest checkpoint."""
    file = SafetensorsFile(checkpoints.list_checkpoints(folder)[-1].path / checkpoints.STATE_FILE)
    return {name: file.get(name).dtype for name in file.names()}


@pytest.mark.parametrize("recipe", ["bf16", "pure_bf16"])
def test_what_is_kept_and_what_it_takes(root, recipe):
    wide = arenas(root, **FULL, recipe=recipe)
    narrow = arenas(root, **FULL, **{**BF16, "recipe": recipe})
    states = arenas(root, **FULL, recipe=recipe, optimizer_state_dtype="bf16")
    assert narrow["optimizer"] == states["optimizer"] == wide["optimizer"] // 2
    assert states["trained"] == wide["trained"] and narrow["gradients"] == wide["gradients"]
    assert narrow["trained"] < 0.36 * wide["trained"]  # 2 bytes for 4 + 2, but 4 for vectors
    prepared, session = runs.open_run(runs.config(root, **FULL, **{**BF16, "recipe": recipe}))
    assert "refresh" not in {e.name for e in prepared.plan.program.entries}
    for name, p in session.layout.parameters.items():
        dtype = "bf16" if len(p.shape) > 1 else "f32"
        assert session.dtype(f"master.{name}") == dtype == session.state_dtype("master", p)
        assert session.compute_tensor(name)[0] == dtype
        assert session.state_dtype("optimizer.v", p) == "bf16"
        np.testing.assert_array_equal(session.parameter(name), prepared.weights.stored(name, p.shape).to_f32())


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_learns_as_fp32_does(root, kind):
    changes = {**KINDS[kind], "num_epochs": 3, "recipe": "bf16"}
    wide = runs.run(runs.config(root, output_dir=str(root / "wide"), **changes))
    narrow = runs.run(runs.config(root, output_dir=str(root / "narrow"), **{**changes, **BF16}))
    first, (last, theirs) = wide.history[0]["loss"], (r.history[-1]["loss"] for r in (narrow, wide))
    assert narrow.history[0]["loss"] == pytest.approx(first, rel=1e-2)
    assert theirs < 0.9 * first and abs(last - theirs) < 0.1 * (first - theirs)


@pytest.mark.parametrize("kind", list(KINDS))
def test_stopping_and_going_on_is_one_run(root, kind, monkeypatch):
    changes = {**KINDS[kind], **BF16, "save_steps": 3}
    runs.run(runs.config(root, output_dir=str(root / "reference"), **changes))
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        runs.run(runs.config(root, **changes))
    runs.run(runs.config(root, **changes))
    assert runs.final_state(root / "out") == runs.final_state(root / "reference")
    assert runs.course(root / "out") == runs.course(root / "reference")
    dtypes = kept(root / "out")
    assert all(dtype == "bf16" for name, dtype in dtypes.items() if not name.startswith("master/"))
    assert {dtypes[name] for name in dtypes if name.endswith("norm.weight") and name.startswith("master/")} <= {"f32"}
    written = checkpoints.list_checkpoints(root / "out")[-1].path / checkpoints.STATE_FILE
    estimate = checkpoint_bytes(prepare(runs.config(root, **changes), "sft"))
    assert estimate - (1 << 20) <= written.stat().st_size <= estimate


def test_the_seed_decides_the_rounding(root):
    def one_step(rounding_seed: int) -> dict[str, bytes]:
        prepared = prepare(runs.config(root, **FULL, **BF16), "sft")
        optimizer = replace(prepared.optimizer, seed=rounding_seed)
        plan = training_program(
            prepared.model, prepared.recipe, prepared.weights, prepared.plan.bindings, max_positions=96, adapter=None,
            optimizer=optimizer, memory_budget=None, master="bf16", states="bf16", threads=1,
        )
        session = TrainSession(plan, prepared.model, prepared.weights, optimizer, 0, 1)
        session.step(prepared.loader.next_step(), 0, 1e-3)
        return {name: session.parameter(name).tobytes() for name in session.layout.parameters}

    first, other = one_step(1), one_step(2)
    assert one_step(1) == first
    differ = {name for name in first if first[name] != other[name]}
    assert differ == {name for name in first if "norm" not in name}  # vectors are not rounded


def test_a_checkpoint_of_other_dtypes_is_refused(root):
    runs.run(runs.config(root, **FULL, recipe="bf16", max_steps=1))
    for changes, what in (({"optimizer_state_dtype": "bf16"}, "optimizer.m/"), ({"master_dtype": "bf16"}, "master/")):
        with pytest.raises(TrainingError, match=f"{what}.* in f32, this run keeps it in bf16") as caught:
            runs.run(runs.config(root, **FULL, recipe="bf16", max_steps=2, **changes))
        assert "optimizer_state_dtype" in str(caught.value)


def test_masters_are_fp32_or_what_products_read(root):
    with pytest.raises(ConfigError, match="master_dtype is bf16, and recipe 'fp32' computes in f32"):
        prepare(runs.config(root, recipe="fp32", master_dtype="bf16"), "sft")


def test_evaluation_reads_bf16_masters(root):
    result = runs.run(runs.config(root, **FULL, **BF16, validation_split=6, max_steps=3))
    wide = runs.run(runs.config(root, **FULL, recipe="bf16", validation_split=6, max_steps=3, output_dir=str(root / "wide")))
    assert result.evaluation["validation"] == pytest.approx(wide.evaluation["validation"], rel=2e-2)
