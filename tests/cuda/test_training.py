"""Whole runs on a device: close to the CPU's, the same bits whenever nothing but the way of running differs, and resumable
anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.model import LoadedModel
from surogate_core.plugins import get_manager
from surogate_core.train import checkpoint as checkpoints
from surogate_core.train.prepare import prepare
from surogate_core.weights.export import write_gguf

from ..train import runs
from ..train.test_resume import stop_after

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
SETTINGS: dict[str, Any] = dict(lora_dropout=0.25, num_epochs=2, save_steps=3, lr_scheduler_type="cosine", warmup_steps=3)
FULL: dict[str, Any] = {"lora": False, "lora_dropout": 0.0, "learning_rate": 1e-3}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "full": FULL, "full-bf16-state": {**FULL, "master_dtype": "bf16", "optimizer_state_dtype": "bf16"},
}
"""What is trained. In fp32 state the course is the CPU's but for rounding; what is rounded at random is not."""
IN_FP32_STATE = ["lora", "full"]


def settings(root: Path, name: str, backend: str = DEVICE, kind: str = "lora", **changes: Any):
    return runs.config(root, backend=backend, output_dir=str(root / name), **{**SETTINGS, **KINDS[kind], **changes})


def train(root: Path, name: str, **changes: Any) -> tuple[dict[str, bytes], list[tuple[Any, ...]]]:
    """Trains; gives the final tensors and the metrics."""
    result = runs.run(settings(root, name, **changes))
    assert result.status == "completed"
    return runs.final_state(root / name), runs.course(root / name)


def losses(course: list[tuple[Any, ...]]) -> np.ndarray:
    return np.array([row[1] for row in course])


@pytest.mark.parametrize(("recipe", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("kind", IN_FP32_STATE)
def test_the_losses_are_those_of_the_cpu(root, kind, recipe, tolerance):
    _, here = train(root, "cpu", backend="cpu", kind=kind, recipe=recipe)
    _, there = train(root, "device", kind=kind, recipe=recipe)
    np.testing.assert_allclose(losses(there), losses(here), rtol=tolerance)
    assert losses(there)[-1] < losses(there)[0]
    keys = slice(3, None)  # rate, tokens, targets, place in the data
    assert [row[keys] for row in there] == [row[keys] for row in here]


@pytest.mark.parametrize(("kind", "recipe"), [(k, "bf16") for k in KINDS] + [(k, "fp32") for k in IN_FP32_STATE])
def test_twice_the_same_run_gives_the_same_bits(root, kind, recipe):
    assert train(root, "one", kind=kind, recipe=recipe) == train(root, "other", kind=kind, recipe=recipe)


@pytest.mark.parametrize("kind", list(KINDS))
def test_with_and_without_graphs_the_same_bits(root, kind):
    recorded = train(root, "graphs", kind=kind, recipe="bf16", cuda_graphs=True)
    assert train(root, "one-by-one", kind=kind, recipe="bf16", cuda_graphs=False) == recorded


def test_steps_are_recorded_as_graphs(root):
    prepared, session = runs.open_run(settings(root, "out", recipe="bf16"))
    for index in range(2):
        session.step(prepared.loader.next_step(), index, 1e-3)
    reasons = {entry: session.session.why_not_recorded(entry) for entry in ("begin", "micro_step", "update")}
    assert not any(reasons.values()), reasons


@pytest.mark.parametrize("kind", list(KINDS))
def test_with_and_without_recomputation_the_same_bits(root, kind):
    changes = dict(kind=kind, recipe="bf16", per_device_train_batch_size=6)
    plan = prepare(settings(root, "whole", **changes), "sft").plan
    budget = plan.resident_bytes - plan.saved_bytes[0] // 4
    tight = prepare(settings(root, "tight", memory_budget=budget, **changes), "sft").plan
    assert tight.saved_bytes[1] < plan.saved_bytes[1] and tight.resident_bytes <= budget
    assert train(root, "tight", memory_budget=budget, **changes) == train(root, "whole", **changes)


@pytest.mark.parametrize("kind", list(KINDS))
def test_stopping_and_going_on_is_one_run(root, kind, monkeypatch):
    reference = train(root, "reference", kind=kind, recipe="bf16")
    for stop in (1, 7):
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            assert runs.run(settings(root, "out", kind=kind, recipe="bf16")).status == "interrupted"
    assert train(root, "out", kind=kind, recipe="bf16") == reference


@pytest.mark.parametrize(("first", "then"), [("cpu", DEVICE), (DEVICE, "cpu")])
@pytest.mark.parametrize("kind", IN_FP32_STATE)
def test_a_run_goes_on_elsewhere(root, kind, first, then, monkeypatch):
    """The checkpoint is read back to the same bits, and the run ends where it would have ended."""
    _, reference = train(root, "reference", backend=first, kind=kind)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        runs.run(settings(root, "out", backend=first, kind=kind))
    saved = runs.final_state(root / "out")
    _, session = runs.open_run(settings(root, "out", backend=then, kind=kind))
    checkpoints.load(checkpoints.list_checkpoints(root / "out")[-1], session)
    for name in session.layout.parameters:
        assert session.parameter(name).tobytes() == saved[f"master/{name}"]
    _, course = train(root, "out", backend=then, kind=kind)
    np.testing.assert_allclose(losses(course), losses(reference), rtol=1e-3)


def test_evaluation_beside_training(root):
    changes = dict(validation_split=6, eval_steps=2, recipe="fp32")
    here = runs.run(settings(root, "cpu", backend="cpu", **changes))
    there = runs.run(settings(root, "device", **changes))
    assert there.evaluation.keys() == here.evaluation.keys()
    for name, loss in here.evaluation.items():
        assert there.evaluation[name] == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_adapters_on_a_quantised_base(root, dtype):
    """Rows of whole 256-wide blocks, which K-quants need."""
    runs.write_model(root / "wide", hidden_size=256, intermediate_size=256)
    loaded = LoadedModel.open(root / "wide", get_manager().families.values())
    family, h = loaded.family, loaded.hyperparameters
    parameters = {name: loaded.names.load(loaded.store, name) for name, _ in loaded.dsl().parameters()}
    write_gguf(root / "model.gguf", family.gguf_names(h).export(parameters), family.gguf_metadata(h), dtype=dtype)
    template = root / "template.jinja"
    template.write_text(runs.TEMPLATE)
    changes = dict(model=str(root / "model.gguf"), tokenizer=str(root / "model"), recipe="bf16", num_epochs=1,
                   chat_template=str(template))
    _, here = train(root, "cpu", backend="cpu", **changes)
    _, there = train(root, "device", **changes)
    np.testing.assert_allclose(losses(there), losses(here), rtol=2e-2)


NARROW: dict[str, Any] = dict(kind="full", recipe="bf16", master_dtype="bf16", optimizer_state_dtype="bf16")


def test_bf16_masters_and_states_go_the_way_of_the_cpu(root):
    """Where a product's last bit differs another random bit decides, so the courses part further than fp32's."""
    _, here = train(root, "cpu", backend="cpu", **NARROW)
    _, there = train(root, "device", **NARROW)
    np.testing.assert_allclose(losses(there), losses(here), rtol=3e-2)


def test_bf16_masters_and_states_go_on_bit_for_bit(root, monkeypatch):
    reference = train(root, "reference", **NARROW)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert runs.run(settings(root, "out", **NARROW)).status == "interrupted"
    assert train(root, "out", **NARROW) == reference
    assert train(root, "one-by-one", cuda_graphs=False, **NARROW) == reference


def test_free_order_of_additions_stays_close(root):
    _, fixed = train(root, "fixed", recipe="bf16")
    _, free = train(root, "free", recipe="bf16", deterministic=False)
    np.testing.assert_allclose(losses(free), losses(fixed), rtol=2e-2)
