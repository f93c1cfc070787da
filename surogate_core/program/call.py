"""What emission works on between unrolling the graph and writing instructions."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Node, Value

Key = tuple[Value, "int | None"]
"""One tensor of the unrolled program: a value and the layer it belongs to."""


@dataclass
class Call:
    """One instruction before places are known."""

    node: Node
    inputs: tuple[Key | None, ...]
    outputs: tuple[Key | None, ...]
    layer: int | None
    stream: int = 0
