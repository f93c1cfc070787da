"""Level 1 of the tests: every kernel of an op against the op's numpy reference in float64.

Driven by records and by the engine's registry, so that a plugin's op or kernel is tested by registering it::

    problems = check_kernel(kernel, cases(ops.get(kernel["op"])))

A kernel gets its operands between guard bytes and its outputs poisoned. It must write every element and nothing else,
agree with the reference within the record's tolerance, give the same bits with any number of threads, and do the same
in place where it says that it can, and on operands whose rows lie apart where the record says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import engine
from ..weights.formats import FORMATS
from ..weights.quants import dequantize, quantize
from .record import Op, Operand, Sample, TensorType

_GUARD = 64  # bytes on each side of an operand
_POISON = 0xFF  # as float: NaN; as integer: -1
_INTEGERS = {"i8": np.int8, "u8": np.uint8, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class Stored:
    """A tensor as a kernel sees it: the array that carries it (bf16 as uint16, blocks as bytes), dtype and shape."""

    array: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    gaps: tuple[np.ndarray, ...] = ()
    """What lies between the rows."""

    @classmethod
    def of(cls, values: np.ndarray, dtype: str) -> Stored:
        """``values`` rounded to ``dtype``. Raises WeightError for rows that are not whole blocks."""
        if dtype in _INTEGERS:
            return cls(np.ascontiguousarray(values).astype(_INTEGERS[dtype]), dtype, values.shape)
        return cls(quantize(np.asarray(values, np.float32), dtype), dtype, values.shape)

    @cached_property
    def values(self) -> np.ndarray:
        """What the bits stand for, as float64 (or integers)."""
        return self.array if self.dtype in _INTEGERS else dequantize(self.array, self.dtype).astype(np.float64)

    def guarded(self, poisoned: bool = False) -> Stored:
        """A copy between guard bytes; ``poisoned`` keeps only its form."""
        size = self.array.nbytes
        memory = np.full(size + 2 * _GUARD, _POISON, np.uint8)
        array = memory[_GUARD : _GUARD + size].view(self.array.dtype).reshape(self.array.shape)
        if not poisoned:
            array[...] = self.array
        return Stored(array, self.dtype, self.shape)

    def apart(self, before: int, after: int, poisoned: bool = False) -> Stored:
        """A copy whose rows (indices of the first axis) are columns of a wider matrix, with ``before`` and ``after`` elements
        beside them; ``poisoned`` keeps only its form."""
        rows, size = self.shape[0], self.array.dtype.itemsize
        row = self.array[:1].size
        memory = np.full(rows * (before + row + after) * size + 2 * _GUARD, _POISON, np.uint8)
        wide = memory[_GUARD:-_GUARD].reshape(rows, -1)
        first, last = before * size, (before + row) * size
        array = wide[:, first:last].view(self.array.dtype).reshape(self.array.shape)
        if not poisoned:
            array[...] = self.array
        return Stored(array, self.dtype, self.shape, (wide[:, :first], wide[:, last:]))

    @property
    def is_block(self) -> bool:
        return self.dtype not in _INTEGERS and FORMATS[self.dtype].is_block

    @property
    def guards_intact(self) -> bool:
        memory = self.array
        while memory.base is not None:
            memory = memory.base
        beside = (memory[:_GUARD], memory[-_GUARD:], *self.gaps)
        return all((part == _POISON).all() for part in beside)

    @property
    def operand(self) -> tuple[np.ndarray, str, tuple[int, ...]]:
        return self.array, self.dtype, self.shape


class Case:
    """One sample of an op in one combination of dtypes."""

    def __init__(self, record: Op, sample: Sample, dtypes: Mapping[str, str], index: int) -> None:
        self.record, self.index, self.dtypes = record, index, dtypes
        self.inputs = [self._store(o.name, sample.inputs.get(o.name)) for o in record.inputs]
        self.initial = {name: self._store(name, values) for name, values in sample.initial.items()}
        attrs = dict(sample.attrs)
        if "out_dtype" in record.attrs:  # of the output that the combination names; f32 when it names none
            attrs["out_dtype"] = next((dtypes[o.name] for o in record.outputs if o.name in dtypes), "f32")
        self.attrs = record.complete_attrs(attrs)
        types = record.infer([None if t is None else TensorType(t.shape, t.dtype) for t in self.inputs], self.attrs)
        self.outputs = [
            None if operand.name in sample.absent_outputs else self._output_form(operand, type_)
            for operand, type_ in zip(record.outputs, types, strict=True)
        ]

    def __str__(self) -> str:
        shapes = ", ".join("-" if t is None else f"{t.dtype}{list(t.shape)}" for t in self.inputs)
        forms = ", ".join("-" if t is None else t.dtype for t in self.outputs)
        return f"sample {self.index}: {self.record.name}({shapes}) -> {forms} {self.attrs}"

    def _store(self, name: str, values: np.ndarray | None) -> Stored | None:
        if values is None:
            return None
        integral = np.issubdtype(np.asarray(values).dtype, np.integer)
        return Stored.of(np.asarray(values), self.dtypes.get(name, "i32" if integral else "f32"))

    def _output_form(self, operand, type_: TensorType) -> Stored:
        if operand.inout:
            return self.initial[operand.name]
        dtype = type_.dtype if type_.dtype in _INTEGERS else self.dtypes.get(operand.name, "f32")
        if dtype != type_.dtype:
            name = f"{self.record.name}: output {operand.name}"
            raise ValueError(f"{name} is run as {dtype}, `infer` gives {type_.dtype}")
        return Stored.of(np.zeros(type_.shape), dtype)

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """The reference's outputs on the rounded inputs."""
        inputs = {o.name: None if t is None else t.values for o, t in zip(self.record.inputs, self.inputs)}
        with np.errstate(all="ignore"):
            outputs = self.record.reference(inputs, self.attrs, {name: t.values for name, t in self.initial.items()})
        if len(outputs) != len(self.record.outputs):
            raise ValueError(f"{self.record.name}: the reference gives {len(outputs)} outputs")
        if self.record.store is not None:
            dtypes = [None if form is None else form.dtype for form in self.outputs]
            outputs = self.record.store(outputs, dtypes, inputs, self.attrs)
        return [np.asarray(o) for o in outputs]

    def _placed(self, operand: Operand, stored: Stored | None, poisoned: bool, apart: bool) -> Stored | None:
        """Rows apart leave odd addresses in every other sample, and ones that suit wide loads in the others."""
        if stored is None:
            return None
        may_lie_apart = operand.name in self.record.rows_apart and not stored.is_block  # blocks always lie dense
        if apart and may_lie_apart and stored.array.ndim > 1 and stored.array.size:
            return stored.apart(*((8, 16) if self.index % 2 else (3, 2)), poisoned)
        return stored.guarded(poisoned)

    def can_run_in_place(self, kernel: Mapping[str, Any]) -> bool:
        """Whether output 0 can be the operand that the kernel offers to overwrite."""
        index = kernel["in_place_input"]
        source = None if index is None else self.inputs[index]
        target = self.outputs[0]
        if source is None or target is None:
            return False
        return (source.dtype, source.shape) == (target.dtype, target.shape)

    def run(self, kernel: Mapping[str, Any], threads: int, in_place: bool = False, apart: bool = False) -> Run:
        """``apart``: operands that the record names in rows_apart lie so. Raises EngineError."""
        inputs = [self._placed(o, t, False, apart) for o, t in zip(self.record.inputs, self.inputs)]
        outputs = [self._placed(o, t, not o.inout, apart) for o, t in zip(self.record.outputs, self.outputs)]
        if in_place:
            outputs[0] = inputs[kernel["in_place_input"]]
        engine.run_op(
            self.record.name,
            [None if t is None else t.operand for t in inputs],
            [None if t is None else t.operand for t in outputs],
            self.attrs, backend=kernel["backend"], kernel=kernel["name"], threads=threads,
        )
        return Run(self, inputs, outputs, kernel["in_place_input"] if in_place else None)


@dataclass
class Run:
    """What a kernel left behind."""

    case: Case
    inputs: list[Stored | None]
    outputs: list[Stored | None]
    overwritten: int | None

    def problems(self) -> list[str]:
        found = []
        for i, (before, after) in enumerate(zip(self.case.inputs, self.inputs)):
            name = self.case.record.inputs[i].name
            if after is None:
                continue
            if not after.guards_intact:
                found.append(f"memory beside input {name} was written")
            if i != self.overwritten and before.array.tobytes() != after.array.tobytes():
                found.append(f"input {name} was changed")
        for operand, output, expected in zip(self.case.record.outputs, self.outputs, self.case.expected):
            if output is None:
                continue
            if not output.guards_intact:
                found.append(f"memory beside output {operand.name} was written")
            problem = difference(output, expected, self.case.record.tolerance)
            if problem:
                found.append(f"output {operand.name} {problem}")
        return found

    def bits(self) -> list[bytes]:
        return [t.array.tobytes() for t in self.outputs if t is not None]


def difference(output: Stored, expected: np.ndarray, tolerance) -> str | None:
    """How ``output`` misses ``expected`` by more than the tolerance, or None."""
    got = output.values
    if got.shape != expected.shape:
        return f"has shape {got.shape}, the reference {expected.shape}"
    if output.dtype in _INTEGERS:
        wrong = np.flatnonzero(got != expected)
        return f"differs in {len(wrong)} of {got.size} elements, first at {wrong[0]}" if len(wrong) else None
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return "differs where the reference is not finite"
    error = float(np.linalg.norm(got[finite] - expected[finite]))
    allowed = tolerance.relative[output.dtype] * float(np.linalg.norm(expected[finite]))
    allowed += tolerance.absolute * float(np.sqrt(expected.size))
    if error <= allowed:
        return None
    unwritten = int(np.isnan(got[finite]).sum())
    return f"is off by {error:.3g} in the norm, {allowed:.3g} is allowed" + (f"; {unwritten} NaN" if unwritten else "")


def cases(record: Op, seed: int = 0) -> list[Case]:
    """Every sample of the record in every combination of dtypes."""
    if record.samples is None:
        raise ValueError(f"op {record.name} has no samples to test it on")
    samples = record.samples(np.random.default_rng(seed))
    return [Case(record, sample, dtypes, i) for i, sample in enumerate(samples) for dtypes in sample.dtypes]


def kernels_of(record: Op, backend: str) -> list[dict[str, Any]]:
    """The registered kernels of an op, as `engine.kernels` describes them."""
    return [k for k in engine.kernels() if k["op"] == record.name and k["backend"] == backend]


@dataclass
class Verdict:
    """supported: the cases that the kernel takes. problems: a line for each failure."""

    supported: list[Case]
    problems: list[str]


def check_kernel(kernel: Mapping[str, Any], all_cases: Sequence[Case], threads: Sequence[int] = (1, 2, 3)) -> Verdict:
    """Runs one kernel (a row of `engine.kernels`) on every case that it supports."""
    verdict = Verdict([], [])
    in_place = kernel["in_place_input"]
    if all_cases and in_place is not None and in_place != all_cases[0].record.in_place:
        verdict.problems.append(f"works in place on input {in_place}, the record says {all_cases[0].record.in_place}")
    for case in all_cases:
        try:
            first = case.run(kernel, threads[0])
        except engine.EngineError as error:
            if "cannot run op" not in error.message:
                verdict.problems.append(f"{case}: {error.message}")
            continue
        verdict.supported.append(case)
        problems = first.problems()
        for count in threads[1:]:
            again = case.run(kernel, count)
            if kernel["deterministic"] and again.bits() != first.bits():
                problems.append(f"{count} threads give other bits than {threads[0]}")
        if case.can_run_in_place(kernel):
            problems += [f"in place: {problem}" for problem in case.run(kernel, threads[-1], in_place=True).problems()]
        if case.record.rows_apart:
            problems += _problems_apart(case, kernel, threads[-1])
        verdict.problems += [f"{case}: {problem}" for problem in problems]
    return verdict


def _problems_apart(case: Case, kernel: Mapping[str, Any], threads: int) -> list[str]:
    """A kernel may leave rows that lie apart, or oddly so, to another one of its backend."""
    problems = []
    for in_place in (False, True) if case.can_run_in_place(kernel) else (False,):
        where = "rows apart, in place" if in_place else "rows apart"
        try:
            found = case.run(kernel, threads, in_place, apart=True).problems()
        except engine.EngineError as error:
            if "cannot run op" in error.message and not in_place:
                found = _problems_of_others(case, kernel, threads)
            else:
                found = [] if "cannot run op" in error.message else [error.message]
        problems += [f"{where}: {problem}" for problem in found]
    return problems


def _problems_of_others(case: Case, kernel: Mapping[str, Any], threads: int) -> list[str]:
    try:
        return case.run({**kernel, "name": None}, threads, apart=True).problems()
    except engine.EngineError as error:
        return [error.message]
