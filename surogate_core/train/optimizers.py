"""Optimizers: what emits the update of one group of parameters. No arithmetic happens here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..program.program import Instruction
from ..program.trainable import PARAMETER_ALIGNMENT, ParameterGroup


@dataclass(frozen=True)
class Optimizer(ABC):
    """name: what `optimizer:` in a config says. states: names of what is kept for every parameter, f32 or bf16."""

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Optimizer:
        """Reads its settings from a `TrainConfig`."""

    @abstractmethod
    def emit(
        self, group: ParameterGroup, gradient: str, norm: str, hyper: str, parameter: str, states: Mapping[str, str]
    ) -> list[Instruction]:
        """Instructions that update one group. All operands are names of flat tensors: the group's gradient, parameter
        and states [n] (f32 or bf16), the global gradient norm f32 [1], hyper f32 [4] = (learning rate, step from 1, 0,
        0)."""


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101); vectors are not decayed.

    rounding: "nearest" or "stochastic", of parameters and states that are stored as bf16. seed: of that randomness."""

    name: ClassVar[str] = "adamw"
    states: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    rounding: str = "nearest"
    seed: int = 0

    @classmethod
    def from_config(cls, config: Any) -> AdamW:
        narrow = "bf16" in (config.master_dtype, config.optimizer_state_dtype)
        return cls(config.adam_beta1, config.adam_beta2, config.adam_epsilon, config.weight_decay, config.max_grad_norm,
                   "stochastic" if narrow else "nearest", config.seed if narrow else 0)

    def emit(self, group, gradient, norm, hyper, parameter, states):
        attrs = (
            ("beta1", float(self.beta1)), ("beta2", float(self.beta2)), ("eps", float(self.epsilon)),
            ("max_grad_norm", float(self.max_grad_norm)), *self._rounding(group),
            ("weight_decay", self.weight_decay if group.decay else 0.0),
        )
        return [Instruction("adamw", (gradient, norm, hyper), (parameter, states["m"], states["v"]), attrs)]

    def _rounding(self, group: ParameterGroup) -> tuple[tuple[str, Any], ...]:
        """Random bits count from a group's first element, so the key's high word tells groups apart."""
        if self.rounding == "nearest":
            return ()
        high = (group.start // PARAMETER_ALIGNMENT) & 0x7FFFFFFF
        return ("rounding", self.rounding), ("seed", high << 32 | self.seed & 0xFFFFFFFF)


BUILTIN: dict[str, Optimizer] = {"adamw": AdamW()}
"""Optimizers of the core, by name. A run makes its own with `from_config`."""
