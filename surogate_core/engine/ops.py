"""One op on numpy arrays, outside of any program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import EngineError
from .library import backend_module

#: None (absent), an array whose dtype says it all, or (array, dtype name, logical shape).
Operand = None | np.ndarray | tuple[np.ndarray, str, Sequence[int]]

# uint16 is not here: numpy has no bfloat16, and bits without a name are not guessed at.
_DTYPE_NAMES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.float64): "f64",
    np.dtype(np.int8): "i8",
    np.dtype(np.uint8): "u8",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}


def _normalise(operand: Operand, side: str, index: int) -> tuple[np.ndarray, str, tuple[int, ...]] | None:
    if operand is None:
        return None
    if isinstance(operand, np.ndarray):
        name = _DTYPE_NAMES.get(operand.dtype)
        if name is None:
            raise EngineError(
                f"{side} {index} is an array of {operand.dtype}, which is no dtype of the engine",
                'pass (array, dtype name, shape); bfloat16 travels as uint16 with the name "bf16"',
            )
        return operand, name, operand.shape
    array, name, shape = operand
    return array, name, tuple(int(size) for size in shape)


def run_op(
    op: str,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    attrs: Mapping[str, int | float | str | bool] | None = None,
    backend: str = "cpu",
    kernel: str | None = None,
    threads: int = 1,
) -> None:
    """Runs one op; the outputs are written where they are.

    An operand is None (absent), a numpy array, or ``(array, dtype name, logical shape)``: bf16 as uint16, quantised
    rows as the uint8 bytes of their blocks. An array that isn't dense is passed with its strides; not every
    kernel takes it. `kernel`: the name of the kernel to run; None runs the one that scores highest. `threads` counts
    the calling one. Raises :class:`EngineError`.
    """
    backend_module(backend).run_op(
        op,
        [_normalise(operand, "input", i) for i, operand in enumerate(inputs)],
        [_normalise(operand, "output", i) for i, operand in enumerate(outputs)],
        dict(attrs or {}),
        backend,
        kernel or "",
        threads,
    )
