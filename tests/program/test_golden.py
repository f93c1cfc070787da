"""The text of three small programs, kept in golden/: a change of theirs is seen, and meant.

`pytest tests/program --update-golden` writes them anew; the difference is reviewed with the change that made it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_core.model import FrozenWeights, cached_program, training_program
from surogate_core.model.serving import ServingShape, serving_graph, serving_program
from surogate_core.passes import RECIPES, LoraSpec
from surogate_core.program import Program
from surogate_core.program.text import parse
from surogate_core.train.optimizers import AdamW

from ..passes import models

FOLDER = Path(__file__).parent / "golden"


class StoredAsF32(FrozenWeights):
    """The weights of a checkpoint in f32 as programs see them, without the checkpoint."""

    def dtypes(self, graph):
        return {name: "bf16" if len(v.shape) > 1 and self.compute == "bf16" else "f32"
                for name, v, _ in graph.instances() if not v.trainable}


def training() -> Program:
    loaded = models.model()
    return training_program(
        loaded, RECIPES["bf16"], StoredAsF32(loaded, "bf16"), {"T": 24, "D": 4}, max_positions=24,
        adapter=LoraSpec(4, 8.0, frozenset({"attn.q", "mlp.down"}), dropout=0.1), optimizer=AdamW(), memory_budget=None,
    ).program


def decoding() -> Program:
    loaded = models.model()
    _, program = cached_program(loaded, RECIPES["bf16"], StoredAsF32(loaded, "bf16"),
                                {"T": 4, "R": 2, "S": 64, "B": 2, "M": 2}, max_positions=32)
    return program


def serving() -> Program:
    loaded, recipe = models.model(), RECIPES["bf16"]
    weights = StoredAsF32(loaded, "bf16")
    graph = serving_graph(loaded, recipe, weights, max_positions=32)
    return serving_program(graph, recipe, weights.dtypes(graph), ServingShape(4, 2, 3, 4, 2), 16)


@pytest.mark.parametrize("make", [training, decoding, serving])
def test_the_text_is_the_golden_one(make, request):
    program = make()
    text = program.text()
    assert parse(text) == program
    golden = FOLDER / f"{make.__name__}.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), (
        f"{golden.name} is not what is planned now; where that is meant: pytest tests/program --update-golden")


@pytest.mark.parametrize("make", [training, decoding, serving])
def test_the_same_model_gives_the_same_bytes(make):
    assert make().to_bytes() == make().to_bytes()
