"""fuse_norms: norm, product and gated unit in one op give the logits that they give apart, and only where they may."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core.dsl import trace
from surogate_core.ir import Graph
from surogate_core.passes import dead_code, fuse, fuse_norms, fuse_projections, precision
from surogate_core.passes.precision import RECIPES
from surogate_core.program import EmitOptions, emit

from . import models
from .models import MAX_POSITIONS, batch, frozen_dtypes, open_session

TOKENS, ROWS = 24, 5


def planned(loaded, recipe: str, *, join: bool = True, matrices: str = "bf16", fused: bool = True) -> Graph:
    graph = trace(loaded.dsl(), "row_logits", MAX_POSITIONS)
    dtypes = frozen_dtypes(graph, matrices)
    if join:
        fuse_projections(graph, dtypes)
    precision(fuse(graph), RECIPES[recipe])
    return dead_code(fuse_norms(graph, dtypes) if fused else graph)


def logits(graph: Graph, loaded, recipe: str) -> np.ndarray:
    dtypes = frozen_dtypes(graph, "bf16")
    program = emit(graph, EmitOptions({"T": TOKENS, "R": ROWS, "D": 4}, RECIPES[recipe].compute, dtypes))
    session = open_session(graph, program, loaded, stored=dtypes)
    given = {**batch(), "rows": np.array([23, 0, 8, 9, 17], np.int32)}
    for name in graph.inputs:
        session.tensor(name)[:] = given[name]
    session.run("forward")
    return session.tensor("logits").copy()


def ops_of(graph: Graph) -> list[str]:
    return [node.op for region in graph.ordered_regions() for node in region.forward]


@pytest.mark.parametrize("recipe", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "hidden_size": 256, "tie_word_embeddings": True}])
def test_logits_stay(changes, recipe):
    loaded = models.model(**changes)
    before = planned(loaded, recipe, fused=False)
    after = planned(loaded, recipe)
    assert "fuse_norms(3 products)" in after.history
    assert ops_of(after).count("rms_norm_linear") == 3 and not {"rms_norm", "glu"} & set(ops_of(after))
    expected, found = logits(before, loaded, recipe), logits(after, loaded, recipe)
    assert np.linalg.norm(found - expected) <= 0.03 * np.linalg.norm(expected)
    truth = logits(planned(loaded, "fp32", fused=False), loaded, "fp32")
    assert np.linalg.norm(found - truth) <= 1.2 * np.linalg.norm(expected - truth)


def test_a_norm_that_several_products_read_stays():
    ops = ops_of(planned(models.model(), "bf16", join=False))
    assert ops.count("rms_norm") == 2 and ops.count("rms_norm_linear") == 1  # the latter the head's


@pytest.mark.parametrize("recipe, matrices", [("fp32", "bf16"), ("bf16", "q8_0"), ("bf16", "f32")])
def test_products_of_other_kinds_stay(recipe, matrices):
    graph = planned(models.model(hidden_size=64, intermediate_size=96), recipe, matrices=matrices)
    assert "fuse_norms(0 products)" in graph.history and "rms_norm_linear" not in ops_of(graph)
