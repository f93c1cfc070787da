"""What a model is served with, as it is asked for; `sizes` makes numbers of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """None: chosen from the model and the machine.

    recipe: of precision, by name. threads: of the CPU. context: tokens of prompt and answer together. max_sequences: that
    run at once. kv_memory: bytes of the key-value cache. kv_share: where that is None, the share of what could be its
    memory that may be: less where other models come after this one. token_budget: tokens of a step.

    adapter_slots, adapter_rank: adapters that one step can use, and their largest rank; no slots, no adapters.
    adapter_memory: bytes of adapters in host memory, from which slots are filled.

    run_ahead: a step is launched before the one ahead of it is read; None: on devices. batch_invariant: a token's bits do
    not depend on what else is in a step, nor on what was cached; slower, and only where the backend has such kernels.
    decode_weights: a device keeps quantised matrices decoded too, for steps of many tokens, or for all where its kernels
    read those faster than the blocks; None: where at most half of its memory goes to them.
    """

    recipe: str = "bf16"
    backend: str = "cpu"
    device: int = 0
    threads: int | None = None
    context: int | None = None
    max_sequences: int | None = None
    kv_memory: int | None = None
    kv_share: float = 1.0
    token_budget: int | None = None
    adapter_slots: int = 4
    adapter_rank: int = 16
    adapter_memory: int = 2 << 30
    run_ahead: bool | None = None
    batch_invariant: bool = False
    decode_weights: bool | None = None
