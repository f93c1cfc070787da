"""LoRA against PEFT, both ways: adapters read and written, gradients of A and B, steps, merged weights, dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.export import merge
from surogate_core.model import AppliedAdapter, LoadedModel
from surogate_core.passes import LoraSpec
from surogate_core.passes.lora import adapter_names
from surogate_core.testing.parity import Gradients, Parity, installed_family, relative_error
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.train.optimizers import AdamW
from surogate_core.weights.peft_adapter import Adapter, LoraPair, read_adapter, write_adapter

from .in_peft import base_of, in_peft, linears, of_peft, peft_logits, saved
from .variants import cases

torch = pytest.importorskip("torch", reason="compares with PEFT: pip install 'surogate-core[test]'")
peft = pytest.importorskip("peft", reason="compares with PEFT: pip install 'surogate-core[test]'")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
RUNS = [
    pytest.param({}, id="cpu"), pytest.param({"joins": True}, id="cpu, planned as on a device"),
    pytest.param({"backend": "cuda"}, id="cuda", marks=pytest.mark.cuda),
]
"""How programs that train are planned and run: settings of `Parity`."""


@pytest.fixture(scope="module")
def parity(tmp_path_factory) -> Parity:
    family = installed_family("llama")
    return Parity.make(family, family.tiny_configs()["mlp_bias_tied"], tmp_path_factory.mktemp("base"), seed=2)


def trained(parity: Parity, spec: LoraSpec, values: dict[str, LoraPair] | None = None, optimizer: AdamW = AdamW(),
            recipe: str = "fp32"):
    """A training session whose A and B are ``values``, or random."""
    session = parity.train_session(recipe, spec, optimizer=optimizer)
    generator = np.random.default_rng(7)
    for name in session.layout.parameters:
        session.set_parameter(name, generator.normal(0, 0.1, session.layout.parameters[name].shape))
    for weight, pair in (values or {}).items():
        name_a, name_b = adapter_names(weight)
        session.set_parameter(name_a, pair.a)
        session.set_parameter(name_b, pair.b)
    session.refresh()
    return session


def pairs_of(parity: Parity, session, spec: LoraSpec) -> dict[str, LoraPair]:
    found = {}
    for weight, _ in parity.loaded.dsl().parameters():
        name_a, name_b = adapter_names(weight)
        if name_a in session.layout.parameters:
            found[weight] = LoraPair(session.parameter(name_a), session.parameter(name_b), spec.scale)
    return found


@pytest.mark.parametrize("settings", [
    {},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6}, "alpha_pattern": {"k_proj": 12}},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
], ids=["plain", "rslora", "patterns", "some_layers"])  # fmt: skip
def test_adapters_of_peft_mean_the_same_here(parity, tmp_path, settings):
    model = in_peft(parity, **{"target_modules": ALL, **settings})
    model.save_pretrained(tmp_path)
    applied = AppliedAdapter.open(tmp_path, parity.loaded)
    expected = peft_logits(parity, model)
    assert relative_error(parity.logits(adapter=applied), expected) < 5e-6
    assert relative_error(parity.logits(), expected) > 1e-2, "the adapter changes too little to tell"


@dataclass
class Adapted:
    """A variant with adapters on every linear of its stack. ``model``: PEFT's; ``folder``: its files; ``adapter``: as read here;
    ``logits``: what PEFT's says."""

    parity: Parity
    model: Any
    folder: Path
    adapter: Adapter
    logits: np.ndarray

    @cached_property
    def gradients(self) -> Gradients:
        return self.parity.reference_gradients(module=self.model)


RANK, ALPHA = 8, 12.0
"""Ranks of which a device puts the adapters inside the products."""


@pytest.fixture(scope="module", params=cases(), ids="-".join)
def adapted(request, tmp_path_factory) -> Adapted:
    family, folder = installed_family(request.param[0]), tmp_path_factory.mktemp("adapted")
    parity = Parity.make(family, family.tiny_configs()[request.param[1]], folder / "base", seed=2)
    model = in_peft(parity, r=RANK, lora_alpha=ALPHA)
    adapter = read_adapter(saved(model, folder / "theirs"), family.hf_names(parity.loaded.hyperparameters))
    assert set(adapter.pairs) == set(linears(parity))
    return Adapted(parity, model, folder / "theirs", adapter, peft_logits(parity, model))


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_of_every_variant(adapted, backend):
    """On every linear of the stack, from PEFT's files."""
    parity = replace(adapted.parity, backend=backend)
    ours = parity.logits(adapter=AppliedAdapter.of(adapted.adapter, parity.loaded))
    assert relative_error(ours, adapted.logits) < 2e-5
    assert relative_error(parity.logits(), adapted.logits) > 1e-2, "the adapter changes too little to tell"


def test_adapters_of_every_variant_written_here(adapted, tmp_path):
    h = adapted.parity.loaded.hyperparameters
    write_adapter(tmp_path, adapted.adapter, adapted.parity.loaded.family.hf_names(h), h.num_layers)
    again = peft.PeftModel.from_pretrained(base_of(adapted.parity), tmp_path).eval()
    assert relative_error(peft_logits(adapted.parity, again), adapted.logits) < 1e-6


def assert_gradients_are_pefts(parity: Parity, session, theirs: Gradients, pairs: dict[str, LoraPair]) -> None:
    names, ours = parity.loaded.family.hf_names(parity.loaded.hyperparameters), parity.gradients(session)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert len(ours.values) == len(theirs.values) == 2 * len(pairs)
    for weight in pairs:
        module = names.file_names(weight)[0].removesuffix(".weight")
        for half, name in zip("AB", adapter_names(weight)):
            expected = theirs.values[f"base_model.model.{module}.lora_{half}.default.weight"]
            assert relative_error(ours.values[name], expected) < 5e-5, name


@pytest.mark.parametrize("run", RUNS)
def test_gradients_of_a_and_b_are_those_of_peft(adapted, run):
    parity = replace(adapted.parity, **run)
    session = trained(parity, LoraSpec(RANK, ALPHA), adapted.adapter.pairs)
    assert bool(session.plan.widened) == (run != {}), "a device puts adapters inside products, the CPU does not"
    assert_gradients_are_pefts(parity, session, adapted.gradients, adapted.adapter.pairs)


@pytest.mark.parametrize("run", RUNS)
def test_gradients_under_rank_stabilised_scaling(parity, tmp_path, run):
    parity = replace(parity, **run)
    model = in_peft(parity, use_rslora=True)
    names = parity.loaded.family.hf_names(parity.loaded.hyperparameters)
    pairs = read_adapter(saved(model, tmp_path), names).pairs
    session = trained(parity, LoraSpec(4, 6.0, rank_stabilised=True), pairs)
    assert_gradients_are_pefts(parity, session, parity.reference_gradients(module=model), pairs)


@pytest.mark.parametrize("run", RUNS[1:])
def test_steps_follow_torch(adapted, run):
    optimizer = AdamW(beta2=0.95, weight_decay=0.1, max_grad_norm=0.5)
    parity = of_peft(replace(adapted.parity, **run), adapted.model)
    session = trained(parity, LoraSpec(RANK, ALPHA), adapted.adapter.pairs, optimizer)
    losses, theirs = parity.training_losses(optimizer, 1e-2, 4, session)
    np.testing.assert_allclose(losses, theirs, rtol=4e-5)
    assert theirs[-1] < 0.9 * theirs[0]


@pytest.mark.parametrize("spec", [
    LoraSpec(4, 6.0), LoraSpec(4, 6.0, rank_stabilised=True), LoraSpec(3, 8.0, frozenset({"attn.q", "mlp.down"})),
], ids=["all", "rslora", "two_roles"])  # fmt: skip
def test_adapters_from_here_mean_the_same_in_peft(parity, tmp_path, spec):
    session = trained(parity, spec)
    adapter = Adapter(pairs_of(parity, session, spec), str(parity.folder), spec.rank_stabilised)
    names = parity.loaded.family.hf_names(parity.loaded.hyperparameters)
    write_adapter(tmp_path, adapter, names, parity.loaded.hyperparameters.num_layers)
    model = peft.PeftModel.from_pretrained(base_of(parity), tmp_path).eval()
    ours = parity.logits(adapter=AppliedAdapter.open(tmp_path, parity.loaded))
    assert relative_error(ours, peft_logits(parity, model)) < 5e-6
    again = read_adapter(tmp_path, names)
    for weight, pair in adapter.pairs.items():
        np.testing.assert_array_equal(again.pairs[weight].a, pair.a)
        np.testing.assert_array_equal(again.pairs[weight].b, pair.b)
        assert again.pairs[weight].scale == pytest.approx(pair.scale, rel=1e-7)


def test_merged_weights_answer_as_the_adapter_does(parity, tmp_path):
    model = in_peft(parity, target_modules=ALL, rank_pattern={"q_proj": 2})
    model.save_pretrained(tmp_path / "adapter")
    write_byte_tokenizer(parity.folder, num_bytes=parity.loaded.hyperparameters.vocab_size)
    report = merge(parity.folder, tmp_path / "adapter", tmp_path / "merged", "f32")
    assert report.num_pairs == 14 and report.changed > 0.99 * report.total
    merged = LoadedModel.open(tmp_path / "merged", [parity.loaded.family])
    ours = Parity(tmp_path / "merged", None, merged, parity.batch).logits()
    assert relative_error(ours, peft_logits(parity, model)) < 5e-6
    theirs = model.merge_and_unload().state_dict()
    for name in merged.store.names():
        np.testing.assert_allclose(merged.store.get(name).to_f32(), theirs[name].numpy(), rtol=2e-6, atol=1e-7, err_msg=name)


def test_dropout_repeats_and_keeps_the_mean(parity):
    """A batch's loss under dropout: the same for the same step, another for another, and unbiased to first order: with a
    tiny B the loss is linear in what dropout passes on, so its mean over many steps is the loss without dropout."""
    from surogate_core.data.loader import Step

    spec = LoraSpec(4, 8.0, frozenset({"attn.v"}), dropout=0.25)
    dropped, plain = trained(parity, spec), trained(parity, LoraSpec(4, 8.0, spec.roles))
    for session in (dropped, plain):
        for name in session.layout.parameters:
            if name.endswith("lora_b"):
                session.set_parameter(name, 1e-2 * session.parameter(name))
    step = Step([parity.batch], 0, 0)
    assert dropped.accumulate(step, 3) == dropped.accumulate(step, 3)
    losses = np.array([dropped.accumulate(step, index) for index in range(200)])
    assert len(np.unique(losses)) > 150
    standard_error = losses.std() / np.sqrt(len(losses))
    assert losses.std() > 0
    assert abs(losses.mean() - plain.accumulate(step, 0)) < 4 * standard_error + 1e-6


def test_the_gradient_under_dropout_goes_through_the_same_mask(parity):
    """The slope of the loss along the gradient, by differences, is the gradient's length."""
    from surogate_core.data.loader import Step

    session, step = trained(parity, LoraSpec(4, 8.0, dropout=0.4)), Step([parity.batch], 0, 0)
    session.accumulate(step, 1)
    gradient = session.session.tensor("gradients").copy()
    master, length = session.session.tensor("master"), float(np.linalg.norm(gradient))
    start, width = master.copy(), 3e-3
    losses = []
    for sign in (1, -1):
        master[:] = start + np.float32(sign * width / length) * gradient
        losses.append(session.accumulate(step, 1))
    assert (losses[0] - losses[1]) / (2 * width) == pytest.approx(length, rel=2e-3)
