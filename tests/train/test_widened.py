"""Runs whose adapters lie inside the base's products, planned so on the CPU: they learn the same, and leave the same files."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from surogate_core.model import evaluation_bytes, training_program
from surogate_core.train import prepare as preparing
from surogate_core.train.evaluation import Evaluator
from surogate_core.train.explain import describe

from . import runs

COURSE = {"loss": {"f32": 1e-3, "bf16": 2e-2}, "eval_loss": {"f32": 1e-3, "bf16": 2e-2},
          "grad_norm": {"f32": 1e-3, "bf16": 1e-1}}
"""How far roundings may lead apart what two runs measure, by what they compute in."""


@pytest.fixture
def widening(monkeypatch):
    """Plans every run as if the backend were a device's, from here on."""
    for plan in (training_program, evaluation_bytes):
        monkeypatch.setattr(preparing, plan.__name__, lambda *values, plan=plan, **names: plan(
            *values, **{**names, "join_projections": True, "widen": True}))


@pytest.mark.parametrize("settings", [
    {}, {"recipe": "bf16"}, {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]}, {"memory_budget": "1200KiB"},
    {"lora_dropout": 0.2}, {"use_rslora": True}, {"recipe": "bf16", "master_dtype": "bf16"},
], ids=["lora", "bf16", "some", "recomputed", "dropout", "rank-stabilised", "bf16 masters"])
def test_a_run_takes_the_same_course(root, settings, request):
    compute = "bf16" if settings.get("recipe") == "bf16" else "f32"
    runs.write_model(root / "model", compute)
    keys = {"num_epochs": 2, "validation_split": 0.2, "eval_steps": 4, "lora_rank": 8, **settings}
    apart = runs.run(runs.config(root, **keys, output_dir=str(root / "apart")))
    request.getfixturevalue("widening")
    inside = runs.run(runs.config(root, **keys, output_dir=str(root / "inside")))
    for ours, theirs in zip(inside.history, apart.history, strict=True):
        for key, tolerance in COURSE.items():
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance[compute]), key
    first, second = (runs.final_state(root / name) for name in ("apart", "inside"))
    assert first.keys() == second.keys()
    for name, data in first.items():
        assert len(data) == len(second[name])


@pytest.fixture
def plain_model(root):
    """Stored as recipe fp32 computes."""
    runs.write_model(root / "model", "f32")
    return root


def test_the_plan_says_what_lies_inside(plain_model, widening):
    prepared, _ = runs.open_run(runs.config(plain_model, lora_rank=8))
    assert prepared.plan.widened == {"attn.q_k_v.wide", "attn.o.wide", "mlp.gate_up.wide", "mlp.down.wide"}
    assert "on   adapters inside products: attn.q_k_v, attn.o, mlp.gate_up, mlp.down: " in describe(prepared)


@pytest.mark.parametrize("settings, stored, why", [
    ({"lora_rank": 8}, "bf16", "frozen weights are not stored in what products read, f32"),
    ({"lora_rank": 3}, "f32", "ranks"), ({"lora_dropout": 0.1}, "f32", "dropout"),
    ({"lora": False}, "f32", "no adapters are trained"),
], ids=["stored otherwise", "odd rank", "dropout", "full"])
def test_the_plan_says_why_none_does(root, widening, settings, stored, why):
    runs.write_model(root / "model", stored)
    prepared, _ = runs.open_run(runs.config(root, **settings))
    line = next(line for line in describe(prepared).splitlines() if "adapters inside products" in line)
    assert line.strip().startswith("off") and why in line


def test_on_the_cpu_they_stay_apart(root):
    assert "off  adapters inside products: backend cpu reads each weight where its file is mapped" in describe(
        runs.open_run(runs.config(root))[0])


def test_a_checkpoint_of_either_kind_goes_on_as_the_other(plain_model, request):
    """The first four steps apart, the rest inside; and the same twice, so that the copies are made when a run goes on."""
    keys = {"save_steps": 4, "max_steps": 8, "lora_rank": 8}
    whole = runs.run(runs.config(plain_model, **keys))
    shutil.rmtree(plain_model / "out" / "step_00000008")
    shutil.copytree(plain_model / "out", plain_model / "again")
    request.getfixturevalue("widening")
    rest = runs.run(runs.config(plain_model, **keys, resume_from_checkpoint=True))
    assert [r["step"] for r in rest.history] == [5, 6, 7, 8]
    for ours, theirs in zip(rest.history, whole.history[4:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    runs.run(runs.config(plain_model, **keys, resume_from_checkpoint=True, output_dir=str(plain_model / "again")))
    assert runs.final_state(plain_model / "out") == runs.final_state(plain_model / "again")


def test_a_resumed_run_takes_the_course_of_one_that_was_never_stopped(plain_model, widening):
    keys = {"save_steps": 4, "max_steps": 8, "lora_rank": 8, "validation_split": 0.2, "eval_steps": 2}
    runs.run(runs.config(plain_model, **keys))
    course, state = runs.course(plain_model / "out"), runs.final_state(plain_model / "out")
    shutil.rmtree(plain_model / "out" / "step_00000008")
    runs.run(runs.config(plain_model, **keys, resume_from_checkpoint=True))
    assert runs.final_state(plain_model / "out") == state
    assert runs.course(plain_model / "out")[-4:] == course[-4:]


@pytest.mark.parametrize("recipe, stored", [("fp32", "f32"), ("bf16", "bf16")])
def test_evaluation_reads_what_training_wrote(root, widening, recipe, stored):
    """The loss of what was changed behind the session's back, as by an adapter that does nothing: once the copies are made."""
    runs.write_model(root / "model", stored)
    prepared, session = runs.open_run(runs.config(root, lora_rank=8, validation_split=0.3, recipe=recipe))
    evaluator = Evaluator(prepared, session)
    before = evaluator.losses()
    assert evaluator._session.memory()["external"].keys() >= {
        s.name for s in prepared.plan.program.external() if s.name.endswith(".wide")}
    runs.lift_b(session)
    changed = evaluator.losses()
    assert abs(changed["validation"] - before["validation"]) > 1e-4
    for name, parameter in session.layout.parameters.items():
        if name.endswith("lora_b"):
            session.set_parameter(name, np.zeros(parameter.shape, np.float32))
    session.refresh()
    assert evaluator.losses() == before


def test_bytes_of_evaluation_are_foreseen(plain_model, widening):
    prepared, session = runs.open_run(runs.config(plain_model, lora_rank=8, validation_split=0.3))
    evaluator = Evaluator(prepared, session)
    evaluator.losses()
    memory = evaluator._session.memory()
    assert prepared.evaluation_bytes == sum(memory["arenas"].values()) + memory["workspace"]


def test_files_are_bound_without_their_rows_being_held_twice(plain_model, widening):
    prepared, session = runs.open_run(runs.config(plain_model, lora_rank=8))
    names = {s.name for s in prepared.plan.program.external()}
    assert not any("attn.q" in name and not name.endswith(".wide") for name in names)
    assert not any(".q.weight" in name or ".q_k_v.weight" in name for name in prepared.weights._held)
    whole = session.session.read("layers.1.attn.q_k_v.wide")
    stored = np.concatenate([
        prepared.weights.stored(f"layers.1.attn.{part}.weight", shape).to_f32()
        for part, shape in (("q", (32, 32)), ("k", (16, 32)), ("v", (16, 32)))
    ])
    np.testing.assert_array_equal(whole[:, :32], stored)
    assert not whole[:, 32:].any()  # B starts at zero
