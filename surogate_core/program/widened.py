"""Where frozen weights with adapters beside them lie, and what keeps the adapters' copies in them fresh.

The storage of one is bound from outside, as that of every frozen weight: W is there when a session opens. A and sB are
written by the program itself after each update, straight from the masters, so they are rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.graph import Value
from ..weights.formats import byte_count
from .program import Instruction

if TYPE_CHECKING:
    from .emit import Emitter


class WidenedWeights:
    """Declares storages and tensors at first use."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.instances = {name: (widened, layer) for name, widened, layer in emitter.graph.widened_instances()}
        self.names = {
            (half, layer): name
            for name, (widened, layer) in self.instances.items() for half in (widened.whole, widened.turned)
        }
        """Full name of the weight that a half, in a layer, is read from."""
        self.parts = {
            name: tuple(f"layers.{layer}.{part.name}" for part in widened.base.parts or (widened.base,))
            for name, (widened, layer) in self.instances.items()
        }
        """Full names of the parameters that W is the rows of."""
        self._storages: dict[str, str] = {}

    def place(self, key: tuple[Value, int | None], dtype: str) -> str:
        """The tensor of a half."""
        name = self.names[key]
        (rows, columns), half = self.instances[name][0].shape, key[0]
        if name not in self._storages:
            size = byte_count(dtype, (rows, columns))
            self._storages[name] = self.emitter.add_storage(f"weight.{name}", None, size, 0)
        return self.emitter.add_tensor(f"layers.{key[1]}.{half.name}", self._storages[name], dtype, tuple(half.shape), 0, columns)

    def refresh(self, dtype: str) -> list[Instruction]:
        """What writes A and sB of every weight that the program reads."""
        instructions = []
        for name in self._storages:
            widened, layer = self.instances[name]
            rows, columns = widened.base.shape
            row = rows
            for first in widened.firsts:
                instructions.append(self._copy(name, f"layers.{layer}.{first.name}", first, row, 0, 1.0, dtype))
                row += first.shape[0]
            for second, row, column, factor in widened.seconds:
                source = f"layers.{layer}.{second.name}"
                instructions.append(self._copy(name, source, second, row, columns + column, factor, dtype))
        return instructions

    def _copy(self, name: str, source: str, value: Value, row: int, column: int, factor: float, dtype: str) -> Instruction:
        stride = self.instances[name][0].shape[1]
        place = self.emitter.add_tensor(
            f"{name}:{source}", self._storages[name], dtype, tuple(value.shape), byte_count(dtype, (row * stride + column,)),
            stride,
        )
        return Instruction("scale", (f"master.{source}", None), (place,), (("factor", factor), ("out_dtype", dtype)))


__all__ = ["WidenedWeights"]
