"""Quantised weights are decoded on a stream of their own, each while the product before its own runs.

    stream 0    ... product i-1 ........ product i ........ product i+1 ...
    stream 1        decode weight i      decode weight i+1

A copy in the dtype of the activations is made for the product that reads it, and is in memory from the beginning of
the product before to the end of its own: so two copies at a time, of these two weights. Products that follow one
another, or have but one between them, share a copy where they read one weight: in the backward pass of a layer that is
computed again many do. No copy is kept while the head runs, where memory is fullest.

Which memory a copy gets is decided as for all activations, by its life in the program's order; `waits` says what that
demands of the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..ir.graph import ACTIVATION, Node, Value
from .call import Call, Key
from .memory import Life

PRODUCTS = frozenset({"linear", "linear_input_grad"})
"""Ops whose weight, their input 1, is read as a copy."""
WEIGHT = 1
COPIES = 2
"""Copies in memory at a time."""


def prefetch(calls: Sequence[Call], is_quantised: Callable[[Key], bool], stream: int) -> list[Call]:
    """The calls with a `dequantize` on ``stream`` for every quantised weight that a product reads. ``is_quantised``
    tells frozen parameters in a block format from all else."""
    result: list[Call] = []
    held: dict[tuple[Key, str], Key] = {}  # by weight and dtype, the one read last at the end
    ahead = 0  # where the product before stands, or what comes last before the layers
    count = 0
    for call in calls:
        if call.node.op not in PRODUCTS or not is_quantised(call.inputs[WEIGHT]):
            if call.layer is None:
                held.clear()
                ahead = len(result)
            result.append(call)
            continue
        weight, dtype = call.inputs[WEIGHT], call.node.inputs[0].dtype
        copy = held.pop((weight, dtype), None)
        if copy is None:
            count += 1
            value, layer = weight
            decoded = Value(count, f"{value.name}.decoded", value.shape, dtype, ACTIVATION, value.role)
            copy = decoded, layer
            node = Node("dequantize", (value,), (decoded,), {"out_dtype": dtype})
            result.insert(ahead, Call(node, (weight,), (copy,), layer, stream))
        held[weight, dtype] = copy
        while len(held) > COPIES:
            del held[next(iter(held))]
        ahead = len(result)
        result.append(_reading(call, copy))
    return result


def _reading(call: Call, copy: Key) -> Call:
    def swapped(operands: tuple, new: object) -> tuple:
        return (*operands[:WEIGHT], new, *operands[WEIGHT + 1:])

    node = Node(call.node.op, swapped(call.node.inputs, copy[0]), call.node.outputs, call.node.attrs)
    return replace(call, node=node, inputs=swapped(call.inputs, copy))


def waits(calls: Sequence[Call], lives: Mapping[Key, Life]) -> dict[int, int]:
    """By index, the calls that must wait, each for which. ``lives`` tells of every storage which bytes it has.

    A product waits for the copy that it is the first to read. A copy waits for the last that touched its memory before:
    always a call of stream 0, as copies are read there too. So whatever takes the place of a copy follows it by itself.
    """
    placed = [life for life in lives.values() if life.bytes > 0]
    ends = np.array([life.end for life in placed], np.int64)
    low = np.array([life.offset for life in placed], np.int64)
    high = low + np.array([life.bytes for life in placed], np.int64)
    result: dict[int, int] = {}
    unread: dict[Key, int] = {}
    waited: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.stream == 0:
            copies = [unread.pop(key) for key in call.inputs if key in unread]
            if copies:
                result[index] = max(copies)
            continue
        copy = call.outputs[0]
        unread[copy] = index
        mine = lives[copy]
        there_before = (ends < index) & (low < mine.offset + mine.bytes) & (mine.offset < high)
        last = int(ends[there_before].max(initial=-1))
        if last > waited.get(call.stream, -1):
            result[index] = waited[call.stream] = last
    return result


__all__ = ["prefetch", "waits"]
