"""fuse_projections where q and k go through a norm over each head: it reads rows that lie apart, its gradient writes them."""

from __future__ import annotations

from functools import partial

import pytest
import surogate_llama.model

from surogate_core.dsl.attention import Attention

from . import models
from .models import assert_close, assert_same_bits
from .test_fuse_projections import ADAPTERS, planned, results


@pytest.fixture
def normed(monkeypatch):
    monkeypatch.setattr(surogate_llama.model, "Attention", partial(Attention, qk_norm_eps=1e-5))
    return models.model(hidden_size=64, num_hidden_layers=3)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_loss_and_gradients_stay(normed, adapter):
    before = results(planned(normed, adapter, False), normed)
    graph = planned(normed, adapter, True)
    assert {"attn.q_k_v.weight", "mlp.gate_up.weight"} <= set(graph.layer_regions()[0].joined)
    assert_close(before, results(graph, normed), 5e-6)


def test_recompute_changes_no_bit(normed):
    whole = results(planned(normed, None, True, "bf16"), normed, "bf16")
    for share in (0.7, 0.0):
        assert_same_bits(whole, results(planned(normed, None, True, "bf16", share), normed, "bf16"))
