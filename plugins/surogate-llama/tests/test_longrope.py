"""Rotary scaling with two sets of factors, whose choice hangs on the longest text, against transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core.dsl import RopeSpec
from surogate_core.dsl.rope import inverse_frequencies, rope_table
from surogate_core.errors import WeightError
from surogate_core.model import LoadedModel
from surogate_core.testing.parity import Parity
from surogate_llama.families import FAMILIES
from surogate_llama.tiny import LLAMA

FAMILY = FAMILIES[0]
SHORT, LONG = [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0]
ROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": SHORT, "long_factor": LONG,
        "original_max_position_embeddings": 64}
CONFIG = {**LLAMA, "max_position_embeddings": 256, "rope_parameters": ROPE}


@pytest.mark.parametrize("length", [0, 64, 65])
@pytest.mark.parametrize("change", [{}, {"factor": 8.0}, {"attention_factor": 1.25}])
def test_frequencies_are_those_of_transformers(length, change):
    transformers = pytest.importorskip("transformers", reason="compares with transformers: install the extra `test`")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {**CONFIG, "rope_parameters": {**ROPE, **change}}
    theirs = ROPE_INIT_FUNCTIONS["longrope"](
        transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"}),
        seq_len=length)
    ours = inverse_frequencies(FAMILY.from_hf(config).rope, length)
    np.testing.assert_allclose(ours[0], theirs[0].numpy(), rtol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


def test_a_table_for_longer_texts_has_the_long_factors():
    spec = FAMILY.from_hf(CONFIG).rope
    short, long = rope_table(spec, 64), rope_table(spec, 65)
    assert np.abs(short - long[:64]).max() > 0.1


def test_a_model_within_its_first_context_is_that_of_transformers(tmp_path):
    parity = Parity.make(FAMILY, CONFIG, tmp_path, seed=3)
    assert parity.loaded.hyperparameters.rope.kind == "longrope"
    assert parity.logits_error() < 2e-5
    plain = replace(parity.loaded.hyperparameters, rope_scaling={})
    parity.loaded = LoadedModel(FAMILY, plain, parity.loaded.store, parity.loaded.names)
    assert parity.logits_error() > 1e-3, "the factors change nothing"


@pytest.mark.parametrize(("change", "says"), [
    ({"short_factor": None}, "needs 'short_factor', a number for each of 8"),
    ({"long_factor": [1.0]}, "needs 'long_factor', a number for each of 8"),
])
def test_refused_by_name(change, says):
    with pytest.raises(WeightError, match=says):
        FAMILY.from_hf({**CONFIG, "rope_parameters": {**ROPE, **change}})


def test_where_the_first_context_may_be_said():
    rope = {key: value for key, value in ROPE.items() if key != "original_max_position_embeddings"}
    beside = FAMILY.from_hf({**CONFIG, "rope_parameters": rope, "original_max_position_embeddings": 64})
    assert beside == FAMILY.from_hf(CONFIG)
    assert FAMILY.from_hf({**CONFIG, "rope_parameters": rope}).rope == RopeSpec(
        16, 1000.0, 16, {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                         "original_max_position_embeddings": 256}, 256)
