"""Level 4 of the ladder: every variant that an installed family declares, against `transformers`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core.testing.parity import Parity, installed_family
from surogate_core.train.optimizers import AdamW

from .variants import cases


@pytest.fixture(scope="module", params=cases(), ids="-".join)
def parity(request, tmp_path_factory) -> Parity:
    name, variant = request.param
    family = installed_family(name)
    return Parity.make(family, family.tiny_configs()[variant], tmp_path_factory.mktemp(variant), seed=1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def ours(request, parity) -> Parity:
    """The same, run by each backend that this machine has."""
    return replace(parity, backend=request.param)


def test_logits(ours):
    assert ours.logits_error() < 2e-5


def test_loss_and_every_gradient(ours):
    errors = ours.gradient_errors()
    assert errors.pop("loss") < 1e-6
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_every_gradient_where_projections_are_joined(parity):
    """As a device's programs are planned, which `ours` runs there."""
    errors = replace(parity, joins=True).gradient_errors()
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_training_follows_torch(ours):
    optimizer = AdamW(beta2=0.95, weight_decay=0.1, max_grad_norm=0.5)
    losses, theirs = ours.training_losses(optimizer, 3e-3, 6)
    # A device adds in another order, and Adam's steps multiply the last bits: of `cwm`, 1.4e-4 after six of them.
    np.testing.assert_allclose(losses, theirs, rtol=1e-4 if ours.backend == "cpu" else 3e-4)
    assert theirs[-1] < 0.8 * theirs[0]


def test_greedy_text_through_the_cache(ours):
    prompt = ours.batch.tokens[14:38].tolist()
    text = ours.reference_greedy(prompt, 20)
    assert len(set(text)) >= 8, "a text of few different ids proves little"
    assert ours.greedy(prompt, 20) == text


@pytest.mark.parametrize("recipe", ["bf16", "pure_bf16"])
def test_bf16_is_as_near_to_the_truth_as_torch(ours, recipe):
    for what, (error, theirs) in ours.bf16_errors(recipe).items():
        assert error < 1.25 * theirs, (what, error, theirs)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_files_come_out_as_they_went_in(parity, tmp_path, dtype):
    parity.round_trip(tmp_path, dtype)


def test_families_of_this_repository_take_part():
    assert {name for name, _ in cases()} >= {"llama", "mistral", "qwen2", "qwen3"}
    assert np.unique(["-".join(case) for case in cases()]).size == len(cases())
