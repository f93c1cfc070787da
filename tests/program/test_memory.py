"""The planner: what lives at once never overlaps, and the arena is close to the least there could be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.passes import RECIPES, LoraSpec, autodiff, dead_code, fuse, lora, precision, recompute
from surogate_core.passes.recompute import saved_bytes
from surogate_core.program.emit import EmitOptions, Emitter
from surogate_core.program.memory import ALIGNMENT, Life, aligned, lower_bound, plan
from surogate_core.train.optimizers import AdamW

from ..passes import models

LIVES = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 30), st.integers(0, 12)), max_size=40).map(
    lambda rows: [Life(f"a{i}", size, start, start + length) for i, (size, start, length) in enumerate(rows)])


def conflicts(lives: list[Life]) -> list[tuple[str, str]]:
    """By comparing all pairs."""
    return [
        (a.name, b.name) for i, a in enumerate(lives) for b in lives[:i]
        if a.start <= b.end and b.start <= a.end
        and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes
    ]


@settings(max_examples=300, deadline=None)
@given(LIVES)
def test_what_lives_at_once_never_overlaps(lives):
    size = plan(lives)
    assert conflicts(lives) == []
    for life in lives:
        assert life.offset >= 0 and life.offset % ALIGNMENT == 0 and life.offset + life.bytes <= size


@settings(max_examples=200, deadline=None)
@given(LIVES)
def test_the_lower_bound_is_the_most_that_is_alive_at_once(lives):
    slow = max((sum(aligned(x.bytes) for x in lives if x.start <= t <= x.end) for t in range(50)), default=0)
    assert lower_bound(lives) == slow
    assert plan(lives) >= slow


def first_fit_by_size(lives: list[Life]) -> int:
    """Another planner: largest first, each at the lowest place that is free for its whole life."""
    placed: list[tuple[int, int, Life]] = []
    peak = 0
    for life in sorted(lives, key=lambda x: -x.bytes):
        offset = 0
        for start, end, _ in sorted((p for p in placed if p[2].start <= life.end and life.start <= p[2].end),
                                    key=lambda p: p[0]):
            if start - offset >= aligned(life.bytes):
                break
            offset = max(offset, end)
        placed.append((offset, offset + aligned(life.bytes), life))
        peak = max(peak, offset + aligned(life.bytes))
    return peak


@settings(max_examples=100, deadline=None)
@given(LIVES)
def test_another_planner_stands_on_the_same_bound(lives):
    assert first_fit_by_size(lives) >= lower_bound(lives)


def emitted(budget_share: float | None, layers: int):
    graph = models.gradient_graph(models.model(num_hidden_layers=layers), fuse)
    if budget_share is not None:
        recompute(graph, int(budget_share * saved_bytes(graph, models.BINDINGS)), models.BINDINGS)
    emitter = Emitter(dead_code(graph), EmitOptions(models.BINDINGS, "f32", {}, optimizer=AdamW()))
    return emitter, emitter.run()


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("budget_share", [None, 0.5, 0.0])
def test_a_training_program_is_near_the_least(layers, budget_share):
    emitter, program = emitted(budget_share, layers)
    size = next(a.bytes for a in program.arenas if a.name == "activations")
    assert emitter.activation_floor <= size < 1.2 * emitter.activation_floor


@pytest.mark.parametrize("budget_share", [1.0, 0.5, 0.0])
def test_a_program_of_real_proportions_is_nearer_still(budget_share):
    """Eight layers of SmolLM2's width, four sequences of 512 tokens, LoRA."""
    loaded = models.model(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=8,
                          num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    bindings = {"T": 2048, "D": 17}
    graph = lora(models.loss_graph(loaded), LoraSpec(16, 32.0))
    graph = precision(fuse(autodiff(graph)), RECIPES["bf16"])
    recompute(graph, int(budget_share * saved_bytes(graph, bindings)), bindings)
    dtypes = {name: "bf16" for name, value, _ in graph.instances() if not value.trainable}
    emitter = Emitter(dead_code(graph), EmitOptions(bindings, "bf16", dtypes, optimizer=AdamW()))
    program = emitter.run()
    size = next(a.bytes for a in program.arenas if a.name == "activations")
    assert size < 1.03 * emitter.activation_floor


def test_storages_of_a_program_lie_in_their_arenas_without_overlap_where_they_persist():
    _, program = emitted(None, 2)
    sizes = {a.name: a.bytes for a in program.arenas}
    for arena in sizes:
        held = sorted((s.offset, s.offset + s.bytes) for s in program.storages if s.arena == arena)
        assert all(end <= sizes[arena] for _, end in held)
        if arena != "activations":
            assert all(a[1] <= b[0] for a, b in zip(held, held[1:]))


def test_trained_parameters_lie_alike_in_all_their_flat_storages():
    _, program = emitted(None, 2)
    places = {}
    for tensor in program.tensors:
        for flat in ("master", "gradients"):
            if tensor.name.startswith(f"{flat}.") and tensor.storage == flat:
                places.setdefault(tensor.name.removeprefix(f"{flat}."), set()).add((tensor.byte_offset, tensor.shape))
    assert len(places) > 10
    assert all(len(where) == 1 for name, where in places.items()), places
