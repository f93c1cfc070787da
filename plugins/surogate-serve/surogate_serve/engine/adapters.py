"""Adapters that come and go while a model is served.

An adapter is loaded once and never changes: loading another under its name makes a new one, with a new key for cached
blocks, and requests that run keep theirs until they end. All are held in host memory; those in use, or used lately, have a slot
of the banks that programs read.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from surogate_core.engine import Memory
from surogate_core.errors import SurogateError
from surogate_core.model import LoadedModel
from surogate_core.passes import BankSpec, bank_names
from surogate_core.weights.peft_adapter import CONFIG_NAME, WEIGHTS_NAME, Adapter, read_adapter
from surogate_core.weights.tensor import from_f32

from ..types import Refused

WAIT = 0.005
"""Seconds between two looks for a slot that has become free."""


@dataclass(eq=False)
class HeldAdapter:
    """name, path: as it was loaded. key: of its weights and of this loading, for names of cached blocks. pairs: by parameter,
    A [rank, in] and B [out, rank] in the compute dtype's numpy form, the scale folded into B."""

    name: str
    path: Path
    key: bytes
    rank: int
    bytes: int
    loaded: float
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    slot: int | None = None
    users: int = 0
    used: int = field(default=0)
    """When it was last asked for, in a count of requests."""


class Adapters:
    """The adapters of one model. Methods may be called from any thread."""

    def __init__(self, model: LoadedModel, bank: BankSpec | None, dtype: str, memory_limit: int) -> None:
        """``memory_limit``: bytes in host memory."""
        self._model, self._bank, self._dtype, self._limit = model, bank, dtype, memory_limit
        declared = model.dsl().parameters()
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in declared
            if name.startswith("layers.") and len(parameter.shape) == 2 and parameter.role
        }
        self._memories: Mapping[str, Memory] = {}
        self._uses: Callable[[int], int] = lambda slot: 0
        self._named: dict[str, HeldAdapter] = {}
        self._slots: list[HeldAdapter | None] = [None] * (0 if bank is None else bank.slots)
        self._filling: set[int] = set()
        """Slots that are being written, each for the adapter that it has."""
        self._lock, self._writes = threading.Lock(), threading.Lock()
        """The first is never held for long: event loops wait for it. The second lets one write at a time."""
        self._requests, self._loadings = itertools.count(1), itertools.count(1)

    def bind(self, memories: Mapping[str, Memory], uses: Callable[[int], int]) -> None:
        """``memories``: the banks by their names in the programs. ``uses``: how many requests the engine has for a slot."""
        self._memories, self._uses = memories, uses

    @property
    def names(self) -> list[str]:
        return sorted(self._named)

    def describe(self) -> list[dict[str, object]]:
        """name, path, rank, bytes, loaded (seconds since 1970), slot (None where it has none now), users."""
        with self._lock:
            return [
                {"name": each.name, "path": str(each.path), "rank": each.rank, "bytes": each.bytes,
                 "loaded": each.loaded, "slot": each.slot, "users": each.users}
                for _, each in sorted(self._named.items())
            ]

    def load(self, name: str, path: str | Path) -> None:
        """Reads a PEFT adapter; requests that come from now on get it. Raises `Refused`."""
        if self._bank is None:
            raise Refused("this model is served without adapters: start the server with slots for them", 400, "no_adapters")
        try:
            family = self._model.family
            adapter = read_adapter(path, family.hf_names(self._model.hyperparameters), family.hf_prefixes)
            digest = _digest(Path(path))
        except (SurogateError, OSError) as error:
            raise Refused(f"the adapter cannot be loaded: {error}", 400, "invalid_adapter", "lora_path") from None
        held = self._held(name, Path(path), adapter, digest)
        with self._lock:
            others = sum(each.bytes for each in self._named.values() if each.name != name)
            if others + held.bytes > self._limit:
                raise Refused(
                    f"adapters may take {self._limit:,} bytes of memory: this one takes {held.bytes:,}, the others {others:,}",
                    400, "adapter_memory",
                )
            before, self._named[name] = self._named.get(name), held
            self._leave(before)
        if None in self._slots:
            self._place(held)  # its first request need not wait for that

    def unload(self, name: str) -> None:
        """Requests that run with it go on. Raises `Refused` (404)."""
        with self._lock:
            if name not in self._named:
                raise Refused(f"there is no adapter {name[:64]!r}", 404, "adapter_not_found", "lora_name")
            self._leave(self._named.pop(name))

    async def acquire(self, name: str) -> HeldAdapter:
        """The adapter, with a slot that is its own until `release`; waits while all slots are in use. Raises `Refused`."""
        held = self._use(name)
        try:
            while held.slot is None and not await asyncio.to_thread(self._place, held):
                await asyncio.sleep(WAIT)
        except BaseException:
            self.release(held)
            raise
        return held

    def acquire_now(self, name: str) -> HeldAdapter:
        """As `acquire`, for a thread that may block."""
        held = self._use(name)
        try:
            while not self._place(held):
                time.sleep(WAIT)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: HeldAdapter) -> None:
        with self._lock:
            held.users -= 1
            if self._named.get(held.name) is not held:
                self._leave(held)

    def _use(self, name: str) -> HeldAdapter:
        with self._lock:
            held = self._named.get(name)
            if held is None:
                raise Refused(f"there is no adapter {name[:64]!r}", 404, "model_not_found", "model")
            held.users += 1
            held.used = next(self._requests)
            return held

    def _leave(self, held: HeldAdapter | None) -> None:
        """Gives back the slot of one that has no name any more, once nobody uses it."""
        if held is not None and held.slot is not None and held.users == 0:
            self._slots[held.slot], held.slot = None, None

    def _place(self, held: HeldAdapter) -> bool:
        """Gives it a slot if it has none: a free one, or that of the one unused for longest. False where there is none
        yet, or another thread is filling one for it."""
        with self._lock:
            if held.slot is not None:
                return True
            slot = None if held in self._slots else self._free_slot()
            if slot is None:
                return False
            self._slots[slot] = held
            self._filling.add(slot)
        written = False
        try:
            with self._writes:
                self._write(held, slot)
            written = True
        finally:
            with self._lock:
                self._filling.discard(slot)
                if written:
                    held.slot = slot
                    if self._named.get(held.name) is not held:  # it was unloaded or replaced meanwhile
                        self._leave(held)
                else:
                    self._slots[slot] = None
        return True

    def _free_slot(self) -> int | None:
        """A request that was cancelled has its slot until the engine let go of it."""
        idle = [
            slot for slot, each in enumerate(self._slots)
            if (each is None or each.users == 0) and slot not in self._filling and not self._uses(slot)
        ]
        empty = [slot for slot in idle if self._slots[slot] is None]
        if empty or not idle:
            return empty[0] if empty else None
        slot = min(idle, key=lambda slot: self._slots[slot].used)
        self._slots[slot].slot = None
        return slot

    def _write(self, held: HeldAdapter, slot: int) -> None:
        """Fills a slot that no request uses. What has no pair adds nothing: its B is zero."""
        for name, shape in self._shapes.items():
            name_a, name_b = bank_names(name)
            pair = held.pairs.get(name)
            if name_b not in self._memories:
                continue
            a, b = self._padded(shape, pair)
            if a is not None:
                self._memories[name_a].write(a, slot * a.nbytes)
            self._memories[name_b].write(b, slot * b.nbytes)

    def _padded(
        self, shape: tuple[int, int], pair: tuple[np.ndarray, np.ndarray] | None
    ) -> tuple[np.ndarray | None, np.ndarray]:
        kind = np.float32 if self._dtype == "f32" else np.uint16
        b = np.zeros((shape[0], self._bank.rank), kind)
        if pair is None:
            return None, b
        a = np.zeros((self._bank.rank, shape[1]), kind)
        rank = pair[0].shape[0]
        a[:rank], b[:, :rank] = pair
        return a, b

    def _held(self, name: str, path: Path, adapter: Adapter, digest: bytes) -> HeldAdapter:
        rank = max(pair.rank for pair in adapter.pairs.values())
        if rank > self._bank.rank:
            raise Refused(
                f"the adapter has rank {rank}, and slots were made for at most {self._bank.rank}: start the server with a "
                "larger adapter rank", 400, "adapter_rank", "lora_path",
            )
        pairs = {}
        for parameter, pair in adapter.pairs.items():
            shape = self._shapes.get(parameter)
            if shape is None or (pair.b.shape[0], pair.a.shape[1]) != shape:
                raise Refused(
                    f"the adapter has {pair.b.shape[0]}x{pair.a.shape[1]} for {parameter}, and the model "
                    f"{'no such matrix' if shape is None else 'x'.join(map(str, shape))}: it is another model's", 400,
                    "invalid_adapter", "lora_path",
                )
            halves = (pair.a, pair.b * np.float32(pair.scale))
            if not all(np.isfinite(half).all() for half in halves):
                raise Refused(f"the adapter has values for {parameter} that are not finite", 400, "invalid_adapter", "lora_path")
            pairs[parameter] = tuple(self._rounded(half) for half in halves)
        size = sum(half.nbytes for pair in pairs.values() for half in pair)
        key = hashlib.sha256(digest + next(self._loadings).to_bytes(8, "little")).digest()[:16]
        return HeldAdapter(name, path, key, rank, size, time.time(), pairs)

    def _rounded(self, half: np.ndarray) -> np.ndarray:
        half = np.ascontiguousarray(half, np.float32)
        return half if self._dtype == "f32" else from_f32("adapter", half, self._dtype).data


def adapter_rank(path: str | Path, model: LoadedModel) -> int:
    """The largest rank of a PEFT adapter. Raises WeightError."""
    adapter = read_adapter(path, model.family.hf_names(model.hyperparameters), model.family.hf_prefixes)
    return max(pair.rank for pair in adapter.pairs.values())


def _digest(folder: Path) -> bytes:
    """Of what an adapter's files hold."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with open(folder / name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
