"""Module: a tree of named submodules and parameters; Stack: layers of one or several kinds, each kind traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.graph import Region, Value
from .tensor import Context, Flow, Tensor


@dataclass
class Parameter:
    """A weight that a module declares. ``role`` is what passes select it by."""

    shape: tuple[int, ...]
    role: str | None
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
        self.context, self.prefix, self._home = context, prefix, context.region
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
        another region (a tied head) shares it. A layer that uses a parameter of the whole model shares it with all layers.
        None when this module was made without it (no bias, say)."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        graph, region = self.context.graph, self.context.region
        if region not in (graph.prologue, graph.epilogue):
            region = self._home
        if name not in self._traced:
            self._traced[name] = graph.param(region, f"{self.prefix}{name}", parameter.shape, parameter.role)
        value = self._traced[name]
        region.params.setdefault(value.name, value)
        return value

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@dataclass
class _Body:
    """A layer's body as traced: its region, what it makes of x, and what it read and set of the flow."""

    region: Region
    x: Value
    result: Value
    flow: Flow


class Stack(Module):
    """The layers of a model.

    kinds: kind of each layer in order, e.g. ["local", "local", "global"].
    make: called once per kind; returns the Module whose forward(x) -> x is that kind's body. It may read and set values of
    ``context.flow``, which layers hand on beside x. A kind that is handed or hands on other values in one place than in
    another is several regions: "local", "local:2", ...
    """

    def __init__(self, kinds: Sequence[str], make: Callable[[str], Module]) -> None:
        if not kinds:
            raise ValueError("a stack needs at least one layer")
        self.kinds = tuple(kinds)
        self.bodies = {kind: make(kind) for kind in dict.fromkeys(kinds)}

    def bind(self, context: Context, prefix: str = "") -> None:
        """Bodies are bound when the stack is traced, each in a region of its own, without a prefix."""
        self.context, self.prefix = context, prefix

    def parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for index, kind in enumerate(self.kinds):
            yield from self.bodies[kind].parameters(f"{prefix}{index}.")

    def forward(self, x: Tensor) -> Tensor:
        context, graph = self.context, self.context.graph
        first = context.flow.given
        known = dict(first)  # by name, a tensor of what is handed on
        bodies: dict[str, _Body] = {}
        for kind in self.bodies:
            bodies[kind] = self._trace(kind, kind, x, known)
            known |= bodies[kind].flow.given
        live = _live([bodies[kind].flow for kind in self.kinds])
        graph.prologue.carry_out = (x.value, *(first[name].value for name in known if name in live[0]))
        regions: dict[tuple[str, frozenset[str], frozenset[str]], str] = {}
        places = list(zip(self.kinds, live, live[1:]))
        for kind, taken, given in dict.fromkeys(places):
            count = sum(other == kind for other, _, _ in regions)
            body = self._trace(f"{kind}:{count + 1}", kind, x, known) if count else bodies[kind]
            regions[kind, taken, given] = body.region.name
            self._connect(body, [n for n in known if n in taken], [n for n in known if n in given], known)
        graph.layers = tuple(regions[place] for place in places)
        context.region, context.flow = graph.epilogue, Flow()
        handed_on = graph.value("x", x.shape, x.dtype, role="residual")
        graph.epilogue.carry_in = (handed_on,)
        return Tensor(context, handed_on)

    def _trace(self, name: str, kind: str, x: Tensor, known: Mapping[str, Tensor]) -> _Body:
        """The body of ``kind`` in a region called ``name``."""
        context, graph = self.context, self.context.graph
        region = graph.regions[name] = Region(name)
        context.region, context.flow = region, Flow(lambda each: Tensor(context, self._like(each, known)))
        body = self.bodies[kind]
        body.bind(context)
        carried = graph.value("x", x.shape, x.dtype, role="residual")
        result = body(Tensor(context, carried)).value
        return _Body(region, carried, result, context.flow)

    def _like(self, name: str, known: Mapping[str, Tensor]) -> Value:
        """What stands for ``name`` in a layer that is handed it."""
        if name not in known:
            raise ValueError(f"no layer before hands on {name!r}; there are {', '.join(known) or 'none'}")
        value = known[name].value
        return self.context.graph.value(name, value.shape, value.dtype, role=value.role)

    def _connect(self, body: _Body, taken: list[str], given: list[str], known: Mapping[str, Tensor]) -> None:
        """Says what enters and leaves the body's region, beside x in order."""
        flow = body.flow
        handed = {n: flow.taken[n].value if n in flow.taken else self._like(n, known) for n in taken}
        left = {**handed, **{name: tensor.value for name, tensor in flow.given.items()}}
        body.region.carry_in = (body.x, *handed.values())
        body.region.carry_out = (body.result, *(left[name] for name in given))


def _live(flows: Sequence[Flow]) -> list[frozenset[str]]:
    """The names that are handed to each layer, and by the last one: those that it or a later one reads."""
    live = [frozenset()]
    for flow in reversed(flows):
        live.append(frozenset(flow.taken) | (live[-1] - frozenset(flow.given)))
    return live[::-1]
