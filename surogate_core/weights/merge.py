"""Merging a LoRA adapter into its base: ``W + scale * B @ A`` in float32, rounded once when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import WeightError
from .peft_adapter import Adapter, LoraPair
from .tensor import AnyTensor, LazyTensor, realized


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: adapter pairs applied, and the share of the adapted weights that changed."""

    num_pairs: int
    changed: int
    total: int


class Merge:
    """A model's parameters with an adapter merged in, each made when it is read.

    ``load``: a parameter's tensor of the base, in whatever format it is stored. Use: take ``tensors()``, write them, then
    call ``check()``, which raises unless every pair went in exactly once and something changed.
    """

    def __init__(self, load: Callable[[str], AnyTensor], params: Iterable[str], adapter: Adapter) -> None:
        """Raises WeightError when the adapter has a pair for a parameter that is not among ``params``, or of another shape."""
        self._adapter = adapter
        self._base = {param: load(param) for param in params}
        for param, pair in adapter.pairs.items():
            if param not in self._base:
                raise WeightError(
                    f"the adapter has a pair for {param!r}, which the base model does not have; wrong base?"
                )
            expected = (pair.b.shape[0], pair.a.shape[1])
            if self._base[param].shape != expected:
                raise WeightError(
                    f"the adapter's pair for {param!r} is made for a weight of {list(expected)}, but the base has "
                    f"{list(self._base[param].shape)}; it was trained on another model"
                )
        if not any(pair.scale and pair.a.any() and pair.b.any() for pair in adapter.pairs.values()):
            raise WeightError(
                "the adapter changes nothing, so the merged weights would equal the base: it was never trained, or its scale is 0"
            )
        self._applied: dict[str, int] = {}
        self._changed: dict[str, int] = {}

    def tensors(self) -> dict[str, AnyTensor]:
        """All parameters: adapted ones in float32, the others as they are. Starts the count of ``check`` anew."""
        self._applied = dict.fromkeys(self._adapter.pairs, 0)
        self._changed = dict.fromkeys(self._adapter.pairs, 0)
        return {param: self._merged(param, tensor) for param, tensor in self._base.items()}

    def check(self) -> MergeReport:
        """Raises WeightError unless each pair was applied exactly once since ``tensors()`` and the weights changed."""
        wrong = {param: count for param, count in self._applied.items() if count != 1}
        if wrong or not self._applied:
            param, count = next(iter(wrong.items()), ("any", 0))
            raise WeightError(
                f"the adapter's pair for {param!r} was applied {count} times, not once ({len(wrong)} such pairs); "
                "the merged weights are not to be used"
            )
        report = MergeReport(
            len(self._applied), sum(self._changed.values()), sum(self._base[param].size for param in self._applied)
        )
        if report.changed == 0:
            raise WeightError("the merged weights equal the base: the adapter was never trained, or its scale is 0")
        return report

    def _merged(self, param: str, tensor: AnyTensor) -> AnyTensor:
        pair = self._adapter.pairs.get(param)
        if pair is None:
            return tensor
        return LazyTensor(param, "f32", tensor.shape, lambda: self._apply(param, tensor, pair))

    def _apply(self, param: str, tensor: AnyTensor, pair: LoraPair) -> np.ndarray:
        base = realized(tensor).to_f32()
        merged = base + pair.delta()
        self._applied[param] += 1
        self._changed[param] = int(np.count_nonzero(merged != base))
        return merged
