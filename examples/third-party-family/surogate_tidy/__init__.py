"""The Tidy family for Surogate, as anybody could publish it: a family, an op, and the op's native kernels."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from .family import TIDY

    register(TIDY.name, TIDY)


@hookimpl
def surogate_ops(register):
    from .ops import RELU2, RELU2_GRAD

    for op in (RELU2, RELU2_GRAD):
        register(op.name, op)


@hookimpl
def surogate_kernel_libraries(register):
    from ._kernels import kernel_library

    register("tidy", kernel_library())
