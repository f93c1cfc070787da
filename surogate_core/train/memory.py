"""How much a run may hold, what holds it, and, where it cannot fit, the cheapest settings that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config import TrainConfig
from ..errors import ConfigError, TrainingError
from ..model import TrainPlan
from .machine import device_info

HOST_RESERVE = 512 << 20
"""Bytes left to the rest of the process and the machine when memory_budget is "auto"."""
DEVICE_RESERVE = 1 << 30
"""Bytes of a device left to its libraries, their code, recorded graphs and the timing of products."""
_OTHERS = 2 << 30
"""What a driver and our own context hold at most; more than that is of other processes."""
_PARTS = {"trained": "trained weights", "optimizer": "optimizer states"}
_LEAST_SEQUENCE = 128

Plan = Callable[[TrainConfig, "int | None"], "tuple[TrainPlan, int]"]
"""(config, memory budget as `training_program` takes it) -> the plan, and what evaluating takes beside it."""


@dataclass(frozen=True)
class Budget:
    """bytes: what a run may hold, None for no limit. source: where that number comes from, in words."""

    bytes: int | None
    source: str


def memory_budget(config: TrainConfig) -> Budget:
    """What the config says, and what the machine has free; of a device never more than that."""
    wanted = None if config.memory_budget == "auto" else int(config.memory_budget)
    if config.backend != "cpu":
        return _of_device(config, wanted)
    if wanted is not None:
        return Budget(wanted, "memory_budget")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return Budget(None, "this machine does not tell what it has free")
    return Budget(max(free - HOST_RESERVE, 1), f"the machine has {in_words(free)} free, {in_words(HOST_RESERVE)} of it reserved")


def _of_device(config: TrainConfig, wanted: int | None) -> Budget:
    info = device_info(config.backend, config.device)
    total, free = info["total_bytes"], info["free_bytes"]
    available = max(free - DEVICE_RESERVE, 1)
    if wanted is not None and wanted <= available:
        return Budget(wanted, "memory_budget")
    source = f"device {config.device} has {in_words(total)}, {in_words(free)} free, {in_words(DEVICE_RESERVE)} of it reserved"
    if total - free > _OTHERS:
        source += f"; the rest, {in_words(total - free)}, is held by other processes"
    return Budget(available, source)


def by_part(plan: TrainPlan) -> list[tuple[str, int]]:
    """What a program holds: (part, bytes). They add up to its resident_bytes."""
    planned = plan.planned
    rows = [("frozen weights", sum(planned["external"].values()))]
    rows += [(_PARTS.get(name, name), size) for name, size in planned["arenas"].items()]
    return [*rows, ("kernel workspace", planned["workspace"])]


def logits_bytes(plan: TrainPlan) -> int:
    """What of the kernels' workspace holds logits."""
    return max((i["workspace"] for i in plan.planned["instructions"] if i["op"].startswith("linear_cross_entropy")), default=0)


def too_large(least: TrainPlan, evaluation: int, budget: Budget, plan: Plan, config: TrainConfig) -> TrainingError:
    """The error of a run that cannot fit: ``least`` has everything recomputed already."""
    needed = least.resident_bytes + evaluation
    rows = [*by_part(least), *([("evaluation", evaluation)] if evaluation else [])]
    table = [f"  {name:<20}{in_words(size):>12}" for name, size in rows]
    table[-1 - bool(evaluation)] += f"   ({in_words(logits_bytes(least))} of it for logits)"
    head = (f"the run needs at least {in_words(needed)} with everything recomputed, and may take "
            f"{in_words(budget.bytes or 0)} ({budget.source})")
    return TrainingError("\n".join([head, *table]), _advice(plan, config, budget))


def _advice(plan: Plan, config: TrainConfig, budget: Budget) -> str:
    smallest = None
    for changes in _ways(config):
        try:
            found, evaluation = plan(config.model_copy(update=changes), 0)
        except ConfigError:  # settings that do not go together, for this recipe or this model
            continue
        size = found.resident_bytes + evaluation
        if size <= (budget.bytes or 0):
            return f"{_spelled(changes)} would take {in_words(size)}."
        if smallest is None or size < smallest[0]:
            smallest = (size, changes)
    if smallest is None:
        return "Raise memory_budget, or train a smaller model."
    return (f"Nothing that was tried would fit; the least, {in_words(smallest[0])}, is {_spelled(smallest[1])}. "
            "Raise memory_budget, or train a smaller model.")


def _ways(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Changes of settings, what they cost the result growing: each alone, then together, then with adapters instead of all
    weights, at last with shorter sequences."""
    singles = [*_batches(config), *_narrower(config)]
    yield from singles
    together: dict[str, Any] = {}
    for changes in [*_batches(config)][-1:] + _narrower(config):
        known = len(together)
        together = together | changes
        if known:
            yield together
    adapters = {"lora": True} if not config.lora and not config.from_scratch else {}
    if adapters:
        yield from (adapters, adapters | together)
    length = config.sequence_len // 2
    while length >= _LEAST_SEQUENCE:
        yield together | {"sequence_len": length}
        if adapters:
            yield together | adapters | {"sequence_len": length}
        length //= 2


def _batches(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Smaller micro-batches of the same step."""
    batch, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    for size in range(batch // 2, 0, -1):
        if batch % size == 0:
            yield {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation * (batch // size)}


def _narrower(config: TrainConfig) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    if config.optimizer_state_dtype != "bf16":
        result.append({"optimizer_state_dtype": "bf16"})
    if config.master_dtype != "bf16":
        result.append({"master_dtype": "bf16"} if config.recipe != "fp32" else {"master_dtype": "bf16", "recipe": "bf16"})
    if config.recipe in ("bf16", "fp32"):
        result.append({"recipe": "pure_bf16"})
    return result


def _spelled(changes: dict[str, Any]) -> str:
    written = [f"{key}: {str(value).lower()}" for key, value in changes.items()]
    return written[0] if len(written) == 1 else f"{written[0]} with {', '.join(written[1:])}"


def in_words(size: int) -> str:
    """"29.5 GiB", or MiB below one."""
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:,.1f} MiB"
