"""Runs whose projections are joined, planned so on the CPU: they learn the same, and leave the same files."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from surogate_core.export import open_installed
from surogate_core.model import FrozenWeights, evaluation_bytes, loss_program, training_program
from surogate_core.passes import RECIPES, LoraSpec
from surogate_core.train import prepare as preparing
from surogate_core.train.explain import describe
from surogate_core.train.session import TrainSession
from surogate_core.weights.quants import quantize

from . import runs

COURSE = ("loss", "grad_norm", "eval_loss")


@pytest.fixture
def joining(monkeypatch):
    """Plans every run with joined projections from here on, as if the backend were a device's."""
    for plan in (training_program, evaluation_bytes):
        monkeypatch.setattr(preparing, plan.__name__, lambda *values, plan=plan, **names: plan(
            *values, **{**names, "join_projections": True}))


@pytest.mark.parametrize("settings", [
    {}, {"lora": False, "learning_rate": 3e-3}, {"recipe": "bf16"}, {"lora_target_modules": ["q_proj", "v_proj", "up_proj"]},
    {"memory_budget": "1200KiB"}, {"lora_dropout": 0.2}, {"lora_rank": 3},
], ids=["lora", "full", "bf16", "some", "recomputed", "dropout", "odd rank"])
def test_a_run_takes_the_same_course(root, settings, request):
    keys = {"num_epochs": 2, "validation_split": 0.2, "eval_steps": 4, "output_dir": str(root / "apart"), **settings}
    apart = runs.run(runs.config(root, **keys))
    request.getfixturevalue("joining")
    joined = runs.run(runs.config(root, **{**keys, "output_dir": str(root / "joined")}))
    tolerance = 2e-2 if settings.get("recipe") == "bf16" else 1e-3
    for ours, theirs in zip(joined.history, apart.history, strict=True):
        for key in COURSE:
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance)
    first, second = (runs.final_state(root / name) for name in ("apart", "joined"))
    assert first.keys() == second.keys()
    for name, data in first.items():
        assert len(data) == len(second[name])


def test_the_plan_says_what_is_joined(root, joining):
    prepared, _ = runs.open_run(runs.config(root))
    assert prepared.plan.joins_projections
    text = describe(prepared)
    assert "on   projections joined: attn.q_k_v, attn.q_k_v.lora_a, mlp.gate_up, mlp.gate_up.lora_a: each is" in text
    assert "fuse_projections(4 products)" in text
    layers = len(prepared.plan.graph.layers)
    assert f"on   low-rank gradients in one reading: of {7 * layers} adapters in {4 * layers} calls: the" in text


def test_the_plan_says_why_nothing_is_joined(root):
    assert "off  projections joined: backend cpu reads each weight where its file is mapped" in describe(
        runs.open_run(runs.config(root))[0])


def test_a_checkpoint_of_either_kind_goes_on_as_the_other(root, request):
    """The first four steps apart, the rest joined."""
    keys = {"save_steps": 4, "max_steps": 8}
    whole = runs.run(runs.config(root, **keys))
    shutil.rmtree(root / "out" / "step_00000008")
    request.getfixturevalue("joining")
    rest = runs.run(runs.config(root, **keys, resume_from_checkpoint=True))
    assert [r["step"] for r in rest.history] == [5, 6, 7, 8]
    for ours, theirs in zip(rest.history, whole.history[4:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


class Quantised(FrozenWeights):
    """The layers' matrices in blocks of 32 bytes, as a GGUF file has them."""

    def dtype(self, name, shape):
        return "q8_0" if len(shape) > 1 and name.startswith("layers.") and "lora" not in name else super().dtype(name, shape)

    def array(self, name, shape):
        dtype = self.dtype(name, shape)
        return quantize(self.stored(name, shape).to_f32(), dtype) if dtype == "q8_0" else super().array(name, shape)


def logits(root, adapter: LoraSpec | None = None, join: bool = False, kind: type = FrozenWeights) -> np.ndarray:
    model = open_installed(root / "model")
    weights = kind(model, "f32")
    if adapter is not None:
        generator = np.random.default_rng(3)
        for name, parameter in model.dsl().parameters():
            if parameter.role in adapter.roles:
                stem, (rows, columns) = name.removesuffix(".weight"), parameter.shape
                weights.adopt(f"{stem}.lora_a", "f32", generator.standard_normal((adapter.rank, columns), np.float32))
                weights.adopt(f"{stem}.lora_b", "f32", generator.standard_normal((rows, adapter.rank), np.float32))
    graph, program = loss_program(model, RECIPES["fp32"], weights, {"T": 24, "D": 2}, max_positions=32, output="logits",
                                  adapter=adapter, join_projections=join)
    assert ("attn.q_k_v.weight" in graph.layer_regions()[0].joined) == join
    session = weights.open_session(graph, program, threads=1)
    session.write("tokens", np.arange(24, dtype=np.int32) * 7 % 256)
    session.write("positions", np.arange(24, dtype=np.int32))
    session.write("doc_starts", np.array([0, 24], np.int32))
    session.run("forward")
    return session.read("logits")


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
@pytest.mark.parametrize("adapter", [None, LoraSpec(4, 4.0, frozenset({"attn.q", "attn.k", "mlp.up"}))], ids=["base", "adapter"])
def test_frozen_weights_are_joined_as_they_are_stored(root, dtype, adapter):
    runs.write_model(root / "model", dtype)
    np.testing.assert_allclose(logits(root, adapter, True), logits(root, adapter), rtol=1e-4, atol=1e-4)


def test_quantised_weights_are_joined_row_by_row(root):
    apart, joined = (logits(root, None, join, Quantised) for join in (False, True))
    np.testing.assert_allclose(joined, apart, rtol=1e-4, atol=1e-4)
    assert np.abs(joined - logits(root)).max() > 1e-3


def test_what_a_session_holds_apart_is_not_joined_behind_its_back(root):
    prepared, session = runs.open_run(runs.config(root))
    assert isinstance(session, TrainSession)
    for name in session.layout.parameters:
        prepared.weights.adopt(name, *session.compute_tensor(name))
    graph, program = loss_program(prepared.model, prepared.recipe, prepared.weights, prepared.plan.bindings,
                                  max_positions=96, adapter=prepared.adapter, join_projections=True)
    with pytest.raises(ValueError, match="lora_a belongs to a session: adopt what it is joined to as well"):
        prepared.weights.open_session(graph, program, 1)
