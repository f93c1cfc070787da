"""What a run may hold, and the way out that is offered where it cannot fit."""

from __future__ import annotations

import re

import pytest

from surogate_core.errors import TrainingError
from surogate_core.train import memory
from surogate_core.train.prepare import prepare

from . import runs

FULL = {"lora": False, "recipe": "bf16"}


def least(root, **changes) -> int:
    """Bytes of a run with everything recomputed, to 0.1 MiB above."""
    with pytest.raises(TrainingError, match="needs at least") as caught:
        prepare(runs.config(root, memory_budget=1, **changes), "sft")
    return int((float(re.search(r"at least ([0-9.]+) MiB", caught.value.message)[1]) + 0.06) * 2**20)


def refused(root, budget: int, **changes) -> TrainingError:
    """What a run says that may take ``budget`` bytes."""
    with pytest.raises(TrainingError) as caught:
        prepare(runs.config(root, memory_budget=budget, **changes), "sft")
    return caught.value


def offered(error: TrainingError) -> dict[str, str]:
    """The settings in its hint."""
    return dict(re.findall(r"(\w+): (\w+)", error.hint))


@pytest.mark.parametrize(("changes", "way"), [
    ({**FULL, "per_device_train_batch_size": 4},
     {"per_device_train_batch_size": "2", "gradient_accumulation_steps": "4"}),
    (FULL, {"optimizer_state_dtype": "bf16"}),
    ({**FULL, "optimizer_state_dtype": "bf16"}, {"master_dtype": "bf16"}),
    ({**FULL, "optimizer_state_dtype": "bf16", "master_dtype": "bf16", "sequence_len": 384},
     {"recipe": "pure_bf16"}),
    ({**FULL, "optimizer_state_dtype": "bf16", "master_dtype": "bf16", "recipe": "pure_bf16"}, {"lora": "true"}),
    ({"recipe": "pure_bf16", "optimizer_state_dtype": "bf16", "master_dtype": "bf16", "sequence_len": 512},
     {"sequence_len": "256"}),
])
def test_the_cheapest_way_that_fits_is_offered_and_works(root, changes, way):
    budget = least(root, **{**changes, **way})
    assert budget < least(root, **changes) - (1 << 14)
    error = refused(root, budget, **changes)
    assert offered(error) == way and "would take" in error.hint
    found = prepare(runs.config(root, memory_budget=budget, **{**changes, **way}), "sft")
    assert found.plan.resident_bytes <= budget


def test_ways_are_taken_together_where_one_does_not_do(root):
    changes = {**FULL, "per_device_train_batch_size": 2}
    way = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "optimizer_state_dtype": "bf16",
           "master_dtype": "bf16"}
    error = refused(root, least(root, **{**changes, **way}), **changes)
    assert offered(error) == {key: str(value) for key, value in way.items()}
    assert "per_device_train_batch_size: 1 with gradient_accumulation_steps: 4, optimizer_state_dtype: bf16" in error.hint


def test_the_table_by_part_adds_up(root):
    changes = {**FULL, "validation_split": 6, "per_device_train_batch_size": 2}
    error = refused(root, 1 << 16, **changes)
    head, *rows = error.message.splitlines()
    assert "may take 0.1 MiB (memory_budget)" in head and "for logits" in error.message
    sizes = {row[2:22].strip(): float(row[22:].split("MiB")[0]) for row in rows}
    assert set(sizes) == {"frozen weights", "trained weights", "gradients", "inputs", "activations", "optimizer states",
                          "kernel workspace", "evaluation"}
    assert sum(sizes.values()) == pytest.approx(float(re.search(r"at least ([0-9.]+)", head)[1]), abs=0.05 * len(sizes))


def test_nothing_is_written_and_nothing_silently_changed(root):
    error = refused(root, 1 << 16, **FULL)
    assert error.hint.startswith("Nothing that was tried would fit; the least, ") and not (root / "out").exists()


class TestDevice:
    """`auto` on a device, as the engine would describe it."""

    @pytest.fixture
    def budget(self, root, monkeypatch):
        def of(total: int, free: int, limit: int | str = "auto") -> memory.Budget:
            info = {"total_bytes": total << 30, "free_bytes": free << 30}
            monkeypatch.setattr(memory, "device_info", lambda backend, device: info)
            return memory.memory_budget(runs.config(root, backend="cuda", memory_budget=limit))

        return of

    def test_what_is_free_less_a_reserve(self, budget):
        found = budget(139, 138)
        assert found.bytes == (138 << 30) - memory.DEVICE_RESERVE
        assert found.source == "device 0 has 139.0 GiB, 138.0 GiB free, 1.0 GiB of it reserved"

    def test_other_processes_are_named(self, budget):
        assert budget(139, 38).source.endswith("; the rest, 101.0 GiB, is held by other processes")
        assert budget(139, 0).bytes == 1

    def test_the_config_may_ask_for_less_and_gets_no_more_than_there_is(self, budget):
        assert budget(139, 138, 20 << 30) == memory.Budget(20 << 30, "memory_budget")
        found = budget(139, 15, 20 << 30)
        assert found.bytes == 14 << 30 and "held by other processes" in found.source
