"""Module: a tree of named submodules and parameters; Stack: layers of one or several kinds, each kind traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.graph import Region, Value
from .tensor import Context, Tensor


@dataclass
class Parameter:
    """A weight that a module declares. ``role`` is what passes select it by."""

    shape: tuple[int, ...]
    role: str
    init_std: float | None = None
    """Standard deviation at random initialisation; None means ones (norm weights), 0.0 zeros."""


class Module:
    """Base of everything a family composes. Assign submodules and `Parameter`s as attributes; write ``forward``."""

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def bind(self, context: Context, prefix: str = "") -> None:
        """Gives this module and its children the context they are traced in and the prefix of their names."""
        self.context, self.prefix = context, prefix
        self._traced: dict[str, Value] = {}
        for name, child in self.children():
            child.bind(context, f"{prefix}{name}.")

    def parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield f"{prefix}{name}", value
        for name, child in self.children():
            yield from child.parameters(f"{prefix}{name}.")

    def traced(self, name: str) -> Value | None:
        """The graph's value of parameter ``name``, declared in the region where it is first used; a later use from
        another region (a tied head) shares it. None when this module was made without it (no bias, say)."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        region = self.context.region
        if name not in self._traced:
            self._traced[name] = self.context.graph.param(
                region, f"{self.prefix}{name}", parameter.shape, parameter.role
            )
        value = self._traced[name]
        region.params.setdefault(value.name, value)
        return value

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Stack(Module):
    """The layers of a model.

    kinds: kind of each layer in order, e.g. ["local", "local", "global"].
    make: called once per kind; returns the Module whose forward(x) -> x is that kind's body.
    """

    def __init__(self, kinds: Sequence[str], make: Callable[[str], Module]) -> None:
        if not kinds:
            raise ValueError("a stack needs at least one layer")
        self.kinds = tuple(kinds)
        self.bodies = {kind: make(kind) for kind in dict.fromkeys(kinds)}

    def bind(self, context: Context, prefix: str = "") -> None:
        """Bodies are bound when the stack is traced, each kind in a region of its own, without a prefix."""
        self.context, self.prefix = context, prefix

    def parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for index, kind in enumerate(self.kinds):
            yield from self.bodies[kind].parameters(f"{prefix}{index}.")

    def forward(self, x: Tensor) -> Tensor:
        context, graph = self.context, self.context.graph
        graph.layers = self.kinds
        graph.prologue.carry_out = (x.value,)
        for kind, body in self.bodies.items():
            region = graph.regions[kind] = Region(kind)
            context.region = region
            body.bind(context)
            region.carry_in = (graph.value("x", x.shape, x.dtype, role="residual"),)
            region.carry_out = (body(Tensor(context, region.carry_in[0])).value,)
        context.region = graph.epilogue
        handed_on = graph.value("x", x.shape, x.dtype, role="residual")
        graph.epilogue.carry_in = (handed_on,)
        return Tensor(context, handed_on)
