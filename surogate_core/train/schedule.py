"""Learning-rate schedules: the rate of each optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """kind: constant, linear, cosine or wsd (constant, then linear to the floor over the last ``decay_ratio``).

    ``warmup`` steps rise linearly in every kind: step 0 already trains, at peak / warmup. ``floor``, a fraction of the peak,
    is what the rate falls to one step after the last, so that no step of a run is without effect.
    """

    kind: str
    peak: float
    total: int
    warmup: int = 0
    floor: float = 0.0
    decay_ratio: float = 0.1

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * (self.floor + (1 - self.floor) * self._shape(step))

    def _shape(self, step: int) -> float:
        """From 1 at the end of the warm-up to 0 at the end of the run."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            decay = max(1, round(self.total * self.decay_ratio))
            start = self.total - decay
            return 1.0 if step < start else max(0.0, 1 - (step - start + 1) / (decay + 1))
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
